"""Tunes a heuristic's numbers with CMA-ES, on train seeds and common random numbers.

Every candidate faces the same arrivals, so differences between candidates are theirs. A generation
runs as one batch: cluster `c * S + s` is candidate c on seed s. Threads share the batch out,
because the kernels release the interpreter's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import cma
import numpy as np
from numpy.typing import NDArray

from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.heuristics.parameters import RANGES, HeuristicConfig
from cloudsched.metrics import episode_return
from cloudsched.policy import Policy
from cloudsched.sim.engine import wake_delay_of
from cloudsched.sim.jobs import JobTable

_ORDER_AND_PLACEMENT = tuple(
    name for name in RANGES if name.startswith(("order_", "place_", "scan_", "hold_", "reserve"))
)
_SLEEP = {
    "never": (),
    "idle_timeout": ("timeout_ticks", "spare_servers", "idle_bias"),
    "utilisation_band": ("band_low", "band_high", "idle_bias"),
    "headroom": (
        *(name for name in RANGES if name.startswith("headroom_")),
        *("urgent_ticks", "hysteresis", "min_idle_ticks", "idle_bias"),
    ),
}

MakePolicy = Callable[[ClusterVectorEnv, Sequence[HeuristicConfig]], Policy]


@dataclass(frozen=True, kw_only=True)
class TuningProgress:
    """Where the search stands after a generation."""

    evaluations: int
    best_return: float
    generation_return: float


@dataclass(frozen=True, kw_only=True)
class TunedHeuristic:
    """The outcome of a search."""

    config: HeuristicConfig
    train_return: float
    """Mean over scenarios and train seeds of the episode return; of the returns relative to the
    start when there are several scenarios."""
    start_return: float
    evaluations: int


def free_parameters(config: HeuristicConfig, *, is_whole: bool) -> tuple[str, ...]:
    """Return the numbers to search: those of the sleep controller; of all else if `is_whole`."""
    sleep = _SLEEP[config.sleep]
    return (*_ORDER_AND_PLACEMENT, *sleep) if is_whole else ("scan_depth", "hold_laxity", *sleep)


def tune_heuristic(
    start: HeuristicConfig,
    scenarios: Sequence[Scenario],
    seeds: Sequence[int],
    *,
    names: Sequence[str],
    evaluations: int,
    population: int,
    step: float,
    seed: int,
    report: Callable[[TuningProgress], None],
    make_policy: MakePolicy | None = None,
) -> TunedHeuristic:
    """Search for better numbers.

    Args:
        start: where the search begins.
        scenarios: what to be good at; with several, each counts by its return relative to the
            start's, so that none dominates.
        seeds: arrivals of every candidate; train seeds only.
        names: the numbers to search.
        evaluations: candidates to try.
        step: how far the first candidates lie from the start, as a share of each range.
        report: called after each generation; may raise KeyboardInterrupt to end the search, which
            then returns the best so far.
        make_policy: what runs the candidates, one for each cluster; `HeuristicPolicy` if None.
    """
    if not names:
        raise ConfigError(f"A heuristic with sleep={start.sleep!r} has no numbers to tune.")
    score = Scorer(scenarios, seeds, make_policy or plain_policy)
    start_return = score([start]).mean(axis=2)
    scale = np.abs(start_return[:, 0]) if len(scenarios) > 1 else np.ones(1)
    low, high = np.array([RANGES[name] for name in names]).T
    origin = np.array([getattr(start, name) for name in names])
    search = cma.CMAEvolutionStrategy(
        np.clip((origin - low) / (high - low), 0.02, 0.98),
        step,
        {"bounds": [0.0, 1.0], "popsize": population, "seed": seed + 1, "verbose": -9},
    )
    best, best_return, done = start, float((start_return[:, 0] / scale).mean()), 1
    try:
        while done < evaluations and not search.stop():
            points = search.ask()
            configs = [_moved(start, names, low + (high - low) * np.asarray(x)) for x in points]
            # The mean of the search is often better than any sample of it.
            mean = low + (high - low) * np.clip(search.result.xfavorite, 0.0, 1.0)
            scores = score([*configs, _moved(start, names, mean)]).mean(axis=2)
            returns = (scores / scale[:, None]).mean(axis=0)
            search.tell(points, (-returns[:-1]).tolist())
            configs.append(_moved(start, names, mean))
            done += len(configs)
            leader = int(np.argmax(returns))
            if returns[leader] > best_return:
                best, best_return = configs[leader], float(returns[leader])
            report(
                TuningProgress(
                    evaluations=done,
                    best_return=best_return,
                    generation_return=float(np.median(returns)),
                )
            )
    except KeyboardInterrupt:
        pass
    return TunedHeuristic(
        config=best,
        train_return=best_return,
        start_return=float((start_return[:, 0] / scale).mean()),
        evaluations=done,
    )


def _moved(
    start: HeuristicConfig, names: Sequence[str], values: NDArray[np.float64]
) -> HeuristicConfig:
    changes: dict[str, Any] = {
        name: round(float(v), 4) for name, v in zip(names, values, strict=True)
    }
    return start.replace(**changes)


class Scorer:
    """Runs candidates on all scenarios and seeds; environments are built once."""

    def __init__(
        self, scenarios: Sequence[Scenario], seeds: Sequence[int], make_policy: MakePolicy
    ) -> None:
        self._make_policy = make_policy
        self._threads = max(1, os.cpu_count() or 1)
        self._scenarios = scenarios
        self._single = [_environment(scenario, 1) for scenario in scenarios]
        self._envs: dict[tuple[int, int, int], ClusterVectorEnv] = {}
        self.face(seeds)

    def face(self, seeds: Sequence[int]) -> None:
        """Take these arrivals from now on."""
        self._num_seeds = len(seeds)
        self._tables: list[list[JobTable]] = []
        self._wake_delays: list[list[int]] = []
        for env in self._single:
            ticks = env.config.episode_ticks
            self._tables.append([env.workload.jobs(seed, ticks) for seed in seeds])
            self._wake_delays.append([wake_delay_of(env.config, seed) for seed in seeds])

    def __call__(self, configs: Sequence[HeuristicConfig]) -> NDArray[np.float64]:
        """Return (scenarios, candidates, seeds) episode returns."""
        shards = np.array_split(np.arange(len(configs)), min(self._threads, len(configs)))
        work = [(i, j) for i in range(len(self._scenarios)) for j in range(len(shards))]
        result = np.zeros((len(self._scenarios), len(configs), self._num_seeds))
        with ThreadPoolExecutor(self._threads) as pool:
            scores = pool.map(lambda ij: self._run(ij, [configs[c] for c in shards[ij[1]]]), work)
            for (i, j), returns in zip(work, scores, strict=True):
                result[i, shards[j]] = returns
        return result

    def _run(
        self, which: tuple[int, int], configs: Sequence[HeuristicConfig]
    ) -> NDArray[np.float64]:
        """Run one shard of candidates (the second of `which`) on one scenario (the first)."""
        scenario = which[0]
        key = (*which, len(configs))
        num_clusters = len(configs) * self._num_seeds
        if key not in self._envs:
            self._envs[key] = _environment(self._scenarios[scenario], num_clusters)
        env = self._envs[key]
        observation = env.reset_to(
            self._tables[scenario] * len(configs),
            wake_delays=self._wake_delays[scenario] * len(configs),
        )
        policy = self._make_policy(
            env, [config for config in configs for _ in range(self._num_seeds)]
        )
        while not env.advance(policy.act(observation)).is_truncated.all():
            pass
        return np.asarray(episode_return(env.engine).reshape(len(configs), self._num_seeds))


def plain_policy(env: ClusterVectorEnv, configs: Sequence[HeuristicConfig]) -> Policy:
    """Run the candidates as they are."""
    return HeuristicPolicy(env.config, configs)


def _environment(scenario: Scenario, num_clusters: int) -> ClusterVectorEnv:
    return ClusterVectorEnv(
        num_clusters, copy=False, autoreset_mode="Disabled", **scenario.to_dict()
    )
