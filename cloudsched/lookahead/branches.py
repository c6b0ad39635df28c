"""Tries other decisions: what would have come of them, on the same arrivals.

A leader runs many clusters. From some of its states branches set out: one takes the decision of the
policy that is to be improved, others each take another one, and then that policy decides in all of
them. Arrivals are the same, so what differs between branches is due to that one decision. They are
followed for some ticks; what is different at the end (work left over, servers awake) is told by the
outlook.

The leader is at first the policy itself, later what was learned so far: who learned from the
policy's states alone errs wherever its own decisions lead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cloudsched.config import ClusterConfig, Settings
from cloudsched.envs.cluster import FRESH_SEEDS, ClusterVectorEnv
from cloudsched.envs.observation import columns
from cloudsched.envs.scenario import Scenario
from cloudsched.lookahead.outlook import NAMES, Outlook
from cloudsched.metrics import episode_return
from cloudsched.policy import Policy

FEW = 0.7  # share of branches still running below which the others are left out of decisions


@dataclass(frozen=True, kw_only=True)
class BranchConfig(Settings):
    """How many branches set out, from where, and how far they go."""

    num_clusters: int = 256
    """Clusters that the policy runs."""
    num_states: int = 256
    """States of a batch from which branches set out."""
    num_others: int = 3
    """Other decisions that are tried in each."""
    chance: float = 0.3
    """Share of ticks from which branches set out."""
    dull_chance: float = 0.2
    """The same for states in which nothing can be placed, in proportion."""
    ticks: int = 10
    """How far branches are followed."""
    far_ticks: int = 40
    """How far they are followed in some batches, to learn what an outlook is worth."""
    far_every: int = 6
    """One batch out of so many goes far."""

    def __post_init__(self) -> None:
        for name in ("num_clusters", "num_states", "num_others", "ticks", "far_every"):
            self._integer(name, low=1)
        self._integer("far_ticks", low=self.ticks + 1)
        self._number("chance", low=0.0, high=1.0, exclusive=True)
        self._number("dull_chance", low=0.0, high=1.0)


class Branches(NamedTuple):
    """What came of other decisions in S states; A others in each, H times at which it was read."""

    observation: dict[str, NDArray[Any]]  # (S, ...) each
    decided: NDArray[np.int64]  # (S,) by the policy
    others: NDArray[np.int64]  # (S, A)
    gain: NDArray[np.float32]  # (S, A, H) reward beyond that of the policy's own decision
    outlook: NDArray[np.float32]  # (S, A, H, F) outlook beyond that of its own decision


class BranchCollector:
    """Runs clusters, and branches off.

    Args:
        make_policy: builds the policy to improve for clusters with some rules; it decides from
            observations alone.
        make_leader: the same for who runs the clusters.
        seed: of arrivals and of all draws.
        episodes: seeds of the episodes that clusters run; any below the test seeds if None.
    """

    def __init__(
        self,
        scenario: Scenario,
        make_policy: Callable[[ClusterConfig], Policy],
        make_leader: Callable[[ClusterConfig], Policy],
        config: BranchConfig,
        seed: int,
        episodes: NDArray[np.int64] | None = None,
    ) -> None:
        self._config = config
        self._rng = np.random.default_rng(seed)
        self._episodes = episodes
        num_branches = config.num_states * (1 + config.num_others)
        settings = scenario.to_dict()
        self._env = ClusterVectorEnv(
            config.num_clusters, copy=False, autoreset_mode="Disabled", **settings
        )
        self._engine = ClusterVectorEnv(num_branches, copy=False, **settings).engine
        self._policy = make_policy(self._env.config)
        self._leader = make_leader(self._env.config)
        self._outlook = Outlook(self._engine)
        self._num_batches = 0
        self._live, _ = self._env.reset(seed=self._draw_episodes())
        self._spread_out()

    def collect(self) -> Branches:
        """Return a batch; one in `far_every` is read at two times, the others once."""
        config = self._config
        is_far = self._num_batches % config.far_every == 0
        self._num_batches += 1
        decided, led = self._set_out(config.far_ticks if is_far else config.ticks)
        num_states = config.num_states
        observation = {
            name: array[:num_states].copy()
            for name, array in self._engine.observation._asdict().items()
        }
        others = self._other_decisions(observation, decided)
        others[:, 0] = np.where(led != decided, led, others[:, 0])
        times = (config.ticks, config.far_ticks) if is_far else (config.ticks,)
        reward, outlook = self._follow(np.concatenate([decided, *others.T]), times)
        reward = reward.reshape(len(times), -1, num_states)
        outlook = outlook.reshape(len(times), -1, num_states, len(NAMES))
        return Branches(
            observation=observation,
            decided=decided,
            others=others,
            gain=(reward[:, 1:] - reward[:, :1]).transpose(2, 1, 0).astype(np.float32),
            outlook=(outlook[:, 1:] - outlook[:, :1]).transpose(2, 1, 0, 3).astype(np.float32),
        )

    def _spread_out(self) -> None:
        """Cut the first episodes at different ticks, so that a batch sees all times."""
        ticks = self._env.engine.state.clusters["tick"]
        until = self._rng.integers(self._env.config.episode_ticks, size=len(ticks))
        while True:
            (due,) = np.nonzero((ticks >= until) & (until >= 0))
            if len(due):
                self._begin_anew(due)
                until[due] = -1
            if (until < 0).all():
                return
            self._step(self._leader.act(self._live))

    def _step(self, actions: NDArray[np.int64]) -> None:
        """Carry out decisions; episodes that are over begin anew."""
        self._env.advance(actions)
        if self._env.engine.num_ended:
            self._begin_anew(np.flatnonzero(self._env.engine.result.is_truncated))

    def _begin_anew(self, which: NDArray[np.int64]) -> None:
        is_over = np.zeros(self._env.num_envs, np.bool_)
        is_over[which] = True
        self._env.reset(seed=self._draw_episodes(), options={"reset_mask": is_over})

    def _draw_episodes(self) -> list[int]:
        """Return a seed for each cluster."""
        count = self._env.num_envs
        if self._episodes is None:
            drawn = self._rng.integers(FRESH_SEEDS, size=count)
        else:
            drawn = self._rng.choice(self._episodes, count)
        return [int(seed) for seed in drawn]

    def _set_out(self, ticks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Copy states into branches, first those of the policy's own decision.

        Args:
            ticks: that must be left of an episode.

        Returns:
            (S,) decisions of the policy, and (S,) those of the leader.
        """
        config, engine = self._config, self._env.engine
        latest = self._env.config.episode_ticks - ticks - 1
        decided, led = np.zeros((2, config.num_states), np.int64)
        filled = 0
        while filled < config.num_states:
            actions = np.array(self._leader.act(self._live))
            (chosen,) = np.nonzero(self._is_chosen(actions, latest))
            chosen = chosen[: config.num_states - filled]
            rows = np.arange(filled, filled + len(chosen))
            for branch in range(1 + config.num_others):
                self._engine.branch(engine, branch * config.num_states + rows, chosen)
            if len(chosen):
                led[rows] = actions[chosen]
                decided[rows] = self._policy.act(
                    {name: part[chosen] for name, part in self._live.items()}
                )
            filled += len(chosen)
            self._step(actions)
        return decided, led

    def _is_chosen(self, actions: NDArray[np.int64], latest: int) -> NDArray[np.bool_]:
        """Return (E,) from which clusters branches set out now."""
        clusters, mask = self._env.engine.state.clusters, self._live["action_mask"]
        num_servers, num_jobs = self._live["servers"].shape[1], self._live["jobs"].shape[1]
        # Branches of ticks with many decisions take as much longer: time is shared out evenly.
        chance = self._config.chance / np.square(
            np.maximum(1.0, clusters["decisions"] / np.maximum(1, clusters["tick"]))
        )
        is_dull = ~mask[:, : num_jobs * num_servers].any(axis=1) & (actions == mask.shape[1] - 1)
        chance[is_dull] *= self._config.dull_chance
        is_drawn = self._rng.random(len(actions)) < chance
        return np.asarray(is_drawn & (clusters["tick"] < latest) & (mask.sum(axis=1) > 1))

    def _other_decisions(
        self, observation: dict[str, NDArray[Any]], decided: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Draw (S, A) legal decisions other than those taken: first a kind, then one of it."""
        is_other = observation["action_mask"] != 0
        rows = np.arange(len(decided))
        is_other[rows, decided] = False
        num_servers, num_jobs = observation["servers"].shape[1], observation["jobs"].shape[1]
        num_pairs = num_servers * num_jobs
        kind = np.full(is_other.shape, WAIT)
        job = np.where(decided < num_pairs, decided // num_servers, -1)
        of_job = np.arange(num_pairs) // num_servers
        kind[:, :num_pairs] = np.where(of_job == job[:, None], SAME_JOB, OTHER_JOB)
        if is_other.shape[1] > num_pairs + 1:
            at = columns(self._env.config.num_resources)
            is_asleep = observation["servers"][:, :, at.is_asleep] != 0.0
            kind[:, num_pairs:-1] = np.where(is_asleep, WAKE, SLEEP)
        weight = np.zeros(is_other.shape)
        for one, share in KINDS.items():
            is_one = is_other & (kind == one)
            weight += is_one * (share / np.maximum(1, is_one.sum(axis=1, keepdims=True)))
        with np.errstate(divide="ignore"):
            log_weight = np.log(weight)
        draws = [
            (log_weight + self._rng.gumbel(size=weight.shape)).argmax(axis=1)
            for _ in range(self._config.num_others)
        ]
        return np.stack(draws, axis=1)

    def _follow(
        self, first: NDArray[np.int64], times: tuple[int, ...]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Take the first decisions, then the policy's; return (H, B) rewards, (H, B, F) outlooks.

        Args:
            first: (B,) decisions, of all branches.
        """
        engine, tick = self._engine, self._engine.state.clusters["tick"]
        start, paid = tick.copy(), episode_return(engine)
        reward = np.zeros((len(times), len(first)))
        outlook = np.zeros((len(times), len(first), len(NAMES)))
        num_read = np.zeros(len(first), np.int64)
        engine.step(first)
        rows = np.arange(len(first))
        decisions = first.copy()
        while True:
            for number, ticks in enumerate(times):
                (due,) = np.nonzero((tick - start >= ticks) & (num_read == number))
                if len(due) == 0:
                    continue
                reward[number, due] = (episode_return(engine) - paid)[due]
                outlook[number, due] = self._outlook(due)
                num_read[due] += 1
                if number == len(times) - 1:
                    engine.end(due)
            is_running = num_read < len(times)
            if not is_running.any():
                return reward, outlook
            if is_running[rows].mean() < FEW:
                (rows,) = np.nonzero(is_running)
            decisions[rows] = self._decisions(rows)
            engine.step(decisions)

    def _decisions(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the policy's decisions in some branches."""
        observation = self._engine.observation._asdict()
        if len(rows) < self._engine.num_clusters:
            observation = {name: part[rows] for name, part in observation.items()}
        return self._policy.act(observation)


SAME_JOB, OTHER_JOB, WAKE, SLEEP, WAIT = range(5)
KINDS = {SAME_JOB: 0.35, OTHER_JOB: 0.15, WAKE: 0.15, SLEEP: 0.15, WAIT: 0.2}
"""How often each kind of other decision is tried where it can be: the job that the policy placed on
another server, another job, waking, putting to sleep, waiting."""
