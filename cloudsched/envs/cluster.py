"""The cluster as a Gymnasium environment: many clusters at once, and the view of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from cloudsched.config import ClusterConfig
from cloudsched.envs.observation import feature_shapes
from cloudsched.envs.rendering import render_ansi, render_rgb
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError, EpisodeError
from cloudsched.metrics import MEASURE_DTYPE, ONLINE_METRICS, measure_clusters
from cloudsched.sim.engine import ClusterEngine, wake_delay_of
from cloudsched.sim.jobs import JobTable
from cloudsched.sim.state import StepResult
from cloudsched.workload.base import FIRST_TEST_SEED

Arrays = dict[str, NDArray[Any]]

# Episodes without a given seed draw one below this, so they never meet the test seeds above it.
FRESH_SEEDS = FIRST_TEST_SEED

NOBODY = np.zeros(0, np.int64)


class ClusterVectorEnv(VectorEnv[Arrays, NDArray[np.int64], NDArray[Any]]):
    """E clusters that take one decision each at every step.

    Action: `Discrete(K*N + N + 1)`. `k*N + n` places visible job k on server n, `K*N + n` toggles
        server n between awake and asleep, the last waits until the next tick. Without sleep there
        are no toggles. An action that `action_mask` forbids acts as `wait`, costs
        `illegal_penalty`, and is counted.
    Observation: a dictionary of `servers` (N, 2R+12), `jobs` (K, R+4), `context` (R+15,), all
        float32 in [-1, 1], and `action_mask` (A,) int8; `cloudsched.envs.observation` lists the
        features.
    Reward: zero for a placement or waking, `-toggle_penalty * 15 / N` for a request to sleep; when
        a tick ends, `-(alpha * P / sum(p_max) + beta * new_violations / N
        + late_penalty * late_jobs_queued / N)`.
    Cost: `info["cost"]`, when a tick ends: new violations + `cost_late_rate` * late jobs queued.
    Episode end: truncated after `episode_ticks` ticks, never terminated. Autoreset as
        `autoreset_mode` says (Gymnasium's NEXT_STEP unless told otherwise).
    Info: `elapsed_ticks` (0 or 1: discount by gamma ** elapsed_ticks), `cost`, and on the last
        step of an episode `episode_metrics`, the measures of `cloudsched.metrics` but the bound.
    """

    metadata = {  # noqa: RUF012 - Gymnasium's convention
        "render_modes": ["ansi", "rgb_array"],
        "render_fps": 5,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(
        self,
        num_envs: int = 1,
        *,
        preset: str = "default",
        workload: str = "poisson",
        load: float = 0.5,
        settings: Mapping[str, Any] | None = None,
        workload_options: Mapping[str, Any] | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        copy: bool = True,
        render_mode: str | None = None,
    ) -> None:
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
            raise ConfigError(f"num_envs={num_envs!r}: expected a whole number of at least 1.")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ConfigError(f"render_mode={render_mode!r}: expected 'ansi', 'rgb_array' or None.")
        self.scenario = Scenario(
            preset=preset,
            workload=workload,
            load=load,
            settings={} if settings is None else settings,
            workload_options={} if workload_options is None else workload_options,
        )
        self.config: ClusterConfig = self.scenario.config
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}
        self.num_envs = num_envs
        self.copy = copy
        self.render_mode = render_mode
        self.engine = ClusterEngine(self.config, num_envs)
        self.workload = self.scenario.build_workload(self.engine.fleet)
        self._observation: Arrays = self.engine.observation._asdict()
        self._generators: list[np.random.Generator | None] = [None] * num_envs
        self._num_over = num_envs  # clusters without an episode under way
        self._has_started = False
        self._always = np.ones(num_envs, np.bool_)

        self.single_observation_space = observation_space(self.config)
        self.single_action_space = Discrete(self.config.num_actions)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Arrays, dict[str, Any]]:
        """Start new episodes.

        Args:
            seed: a list with a seed for each cluster, or the first of consecutive ones; a seed
                fixes all arrivals of its episode and its wake delay. Without one, each cluster
                draws a fresh seed below 1,000,000.
            options: `reset_mask`, (E,) bool: which clusters to reset; all when absent.
        """
        if isinstance(seed, float):
            raise ConfigError(f"seed={seed!r}: expected whole numbers of at least 0.")
        if isinstance(seed, int | np.integer):
            seeds: Sequence[int | None] = [int(seed) + e for e in range(self.num_envs)]
        else:
            seeds = [None] * self.num_envs if seed is None else list(seed)
        if len(seeds) != self.num_envs:
            raise ConfigError(f"{len(seeds)} seeds for {self.num_envs} clusters; expected as many.")
        if any(s is not None and s < 0 for s in seeds):
            raise ConfigError(f"seed={seed!r}: expected whole numbers of at least 0.")
        chosen = np.arange(self.num_envs)
        if options and "reset_mask" in options:
            reset_mask = np.asarray(options["reset_mask"])
            if reset_mask.shape != (self.num_envs,) or reset_mask.dtype != np.bool_:
                raise ConfigError(
                    f"reset_mask has shape {reset_mask.shape} and type {reset_mask.dtype}; "
                    f"expected bool of shape ({self.num_envs},)."
                )
            chosen = np.flatnonzero(reset_mask)
        self._start(chosen, [seeds[e] for e in chosen.tolist()])
        self._has_started = True
        return self._observe(), {}

    def reset_to(
        self, tables: Sequence[JobTable], *, wake_delays: Sequence[int] | None = None
    ) -> Arrays:
        """Start an episode with given jobs in every cluster, whatever the workload.

        Args:
            wake_delays: one for each cluster, as `wake_delay_of` finds them; the config's if None.
        """
        self.engine.reset(tables, wake_delays=wake_delays)
        self._num_over = 0
        self._has_started = True
        return self._observe()

    def advance(self, actions: ArrayLike) -> StepResult:
        """Carry out one decision in each cluster, and nothing in those whose episode is over.

        For running a batch of episodes to their end: no autoreset, no copies. With `copy=False` the
        observation that the last reset returned is the current one.
        """
        if not self._has_started:
            raise EpisodeError("step() before the first reset(); call reset() once first.")
        result = self.engine.step(actions)
        self._num_over += self.engine.num_ended
        return result

    def step(
        self, actions: ArrayLike
    ) -> tuple[Arrays, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Carry out one decision in each cluster."""
        was_over = NOBODY if self._num_over == 0 else self.engine.result.is_truncated.nonzero()[0]
        if self._has_started and len(was_over) and self.autoreset_mode == AutoresetMode.DISABLED:
            raise EpisodeError(
                f"Cluster {was_over[0]} is over; call reset(options={{'reset_mask': ...}}) "
                "before the next step (autoreset is disabled)."
            )
        result = self.advance(actions)
        reward, truncated = result.reward.copy(), result.is_truncated.copy()
        info: dict[str, Any] = {
            "elapsed_ticks": result.elapsed_ticks.copy(),
            "_elapsed_ticks": self._always,
            "cost": result.cost.copy(),
            "_cost": self._always,
        }
        num_ended = self.engine.num_ended
        if len(was_over):
            truncated[was_over] = False
            self._start_fresh(was_over)  # NEXT_STEP: this is the step that resets them
        if num_ended:
            ended = truncated.nonzero()[0]
            self._finish(ended, info)
            if self.autoreset_mode == AutoresetMode.SAME_STEP:
                self._start_fresh(ended)
        return self._observe(), reward, np.zeros(self.num_envs, np.bool_), truncated, info

    def render(self) -> tuple[Any, ...] | None:
        """Draw every cluster in the environment's render mode."""
        if self.render_mode is None:
            raise ConfigError("render() needs render_mode='ansi' or 'rgb_array' at construction.")
        if not self._has_started:
            raise EpisodeError("render() before the first reset(); call reset() once first.")
        draw = render_ansi if self.render_mode == "ansi" else render_rgb
        return tuple(draw(self.engine, e) for e in range(self.num_envs))

    def _finish(self, ended: NDArray[np.int64], info: dict[str, Any]) -> None:
        """Add the measures of the episodes that ended, and their last observation if it goes."""
        has_ended = np.zeros(self.num_envs, np.bool_)
        has_ended[ended] = True
        measures = np.zeros(self.num_envs, MEASURE_DTYPE)
        measures[ended] = measure_clusters(self.engine, ended)
        info["episode_metrics"] = {name: measures[name] for name in ONLINE_METRICS}
        info["_episode_metrics"] = has_ended
        if self.autoreset_mode == AutoresetMode.SAME_STEP:
            final = np.full(self.num_envs, None, dtype=object)
            for e in ended:
                final[e] = {name: array[e].copy() for name, array in self._observation.items()}
            info["final_obs"], info["_final_obs"] = final, has_ended
            kept = ("elapsed_ticks", "cost", "episode_metrics")
            info["final_info"] = {name: info[name] for name in kept}
            info["_final_info"] = has_ended

    def _start_fresh(self, chosen: NDArray[np.int64]) -> None:
        self._start(chosen, [None] * len(chosen))

    def _start(self, chosen: NDArray[np.int64], seeds: Sequence[int | None]) -> None:
        """Start an episode in each chosen cluster, with its seed or a fresh one."""
        tables, wake_delays = [], []
        for e, seed in zip(chosen.tolist(), seeds, strict=True):
            generator = self._generators[e]
            if seed is not None or generator is None:
                generator = np.random.default_rng(seed)
                self._generators[e] = generator
            episode_seed = seed if seed is not None else int(generator.integers(FRESH_SEEDS))
            tables.append(self.workload.jobs(episode_seed, self.config.episode_ticks))
            wake_delays.append(wake_delay_of(self.config, episode_seed))
        self.engine.reset(tables, chosen, wake_delays=wake_delays)
        self._num_over = int(np.count_nonzero(self.engine.result.is_truncated))

    def _observe(self) -> Arrays:
        if not self.copy:
            return dict(self._observation)
        return {name: array.copy() for name, array in self._observation.items()}


class ClusterEnv(gymnasium.Env[Arrays, int]):
    """One cluster: the first of a `ClusterVectorEnv`, whose docstring is the manual.

    Action, Observation, Reward, Cost, Episode end, Info: as there, without the leading axis.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 5}  # noqa: RUF012

    def __init__(self, *, render_mode: str | None = None, **settings: Any) -> None:
        self.vector = ClusterVectorEnv(
            1, autoreset_mode=AutoresetMode.DISABLED, render_mode=render_mode, **settings
        )
        self.render_mode = render_mode
        self.config = self.vector.config
        self.observation_space = self.vector.single_observation_space
        self.action_space = self.vector.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Arrays, dict[str, Any]]:
        """Start an episode; its seed fixes all arrivals."""
        super().reset(seed=seed)
        if seed is None:
            seed = int(self.np_random.integers(FRESH_SEEDS))
        observation, _ = self.vector.reset(seed=[seed])
        return _first(observation), {}

    def step(self, action: int) -> tuple[Arrays, float, bool, bool, dict[str, Any]]:
        """Carry out one decision."""
        observation, reward, _, truncated, info = self.vector.step(np.array([action]))
        single: dict[str, Any] = {
            "elapsed_ticks": int(info["elapsed_ticks"][0]),
            "cost": float(info["cost"][0]),
        }
        if "episode_metrics" in info:
            single["episode_metrics"] = {
                name: values[0].item() for name, values in info["episode_metrics"].items()
            }
        return _first(observation), float(reward[0]), False, bool(truncated[0]), single

    def render(self) -> Any:
        """Draw the cluster in the environment's render mode."""
        frames = self.vector.render()
        return None if frames is None else frames[0]


def observation_space(config: ClusterConfig) -> Dict:
    """Return the space of one cluster's observation."""
    shapes = feature_shapes(config.num_servers, config.visible_jobs, config.num_resources)
    spaces: dict[str, gymnasium.Space[Any]] = {
        name: Box(-1.0, 1.0, shape, np.float32)
        for name, shape in zip(("servers", "jobs", "context"), shapes, strict=True)
    }
    spaces["action_mask"] = Box(0, 1, (config.num_actions,), np.int8)
    return Dict(spaces)


def _first(arrays: Arrays) -> Arrays:
    return {name: array[0] for name, array in arrays.items()}
