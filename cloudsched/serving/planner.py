"""Decisions for clusters of one fleet, one after another as in the simulator.

The state that a caller describes goes into the simulator's own arrays; legality is the simulator's
mask, features are those of the one encoder, and commands are carried out by the same kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cloudsched.config import ClusterConfig
from cloudsched.serving.errors import UnprocessableError
from cloudsched.sim.engine import ClusterEngine
from cloudsched.sim.fleet import Fleet
from cloudsched.sim.state import Snapshots

# The first tick of a loaded cluster, and the end of its short episode. From tick 200 on nothing
# depends on the tick any more.
MAX_START, EPISODE_TICKS = 200, 256

Arrays = dict[str, NDArray[Any]]


class Verdict(NamedTuple):
    """What a decider chose for B clusters."""

    actions: NDArray[np.int64]  # (B,) legal
    chances: NDArray[np.float32] | None  # (B, A) by the policy; None: it does not weigh
    propensity: NDArray[np.float32]  # (B,) with which the action was chosen


class Decider(Protocol):
    """Chooses one legal action for each of some clusters."""

    def __call__(self, observation: Arrays, rows: NDArray[np.int64]) -> Verdict:
        """Decide for the clusters in `rows`; the observation has a row for each of them."""


class Step(NamedTuple):
    """One decision of one cluster, as it was taken."""

    row: int
    action: int
    chance: float
    others: list[tuple[int, float]]  # the likeliest other actions


class Outcome(NamedTuple):
    """What each of S clusters got."""

    steps: list[list[Step]]  # without the final wait
    ended_by_wait: list[bool]
    wait_chance: list[float]


class Trace(NamedTuple):
    """Everything about one round of decisions, for the log."""

    rows: NDArray[np.int64]
    observation: Arrays
    verdict: Verdict
    reward: NDArray[np.float64]
    cost: NDArray[np.float64]
    power_w: NDArray[np.float64]
    elapsed_ticks: NDArray[np.int64]


Tracer = Callable[[Trace], None]
"""Is shown every round of decisions."""


class Planner:
    """Decides for up to `size` clusters of one fleet at once.

    Attributes:
        engine: the simulator whose arrays are filled.
        decider_s: seconds that the decider took in the last call of `decide`.
    """

    def __init__(self, rules: ClusterConfig, fleet: Fleet, size: int) -> None:
        self.config = serving_rules(rules, fleet)
        self.fleet = fleet
        self.size = size
        self.engine = ClusterEngine(self.config, size, fleet)
        self._observation: Arrays = self.engine.observation._asdict()
        self._wait = self.engine.wait_action
        self._actions = np.zeros(size, np.int64)
        self.decider_s = 0.0

    def load(self, snapshots: Snapshots) -> None:
        """Put the first S clusters into given states.

        Raises:
            UnprocessableError: running jobs need more than their server has.
        """
        self.engine.load(snapshots)
        free = self.engine.state.free[: len(snapshots.tick)]
        if free.size and free.min() < 0.0:
            e, n, r = (int(i) for i in np.argwhere(free < 0.0)[0])
            used = self.fleet.capacity[n, r] - free[e, n, r]
            raise UnprocessableError(
                f"{place_of(e, len(free))}server {n} has {self.fleet.capacity[n, r]:g} "
                f"{self.fleet.resources[r]}, but its running jobs use {used:g}."
            )

    def decide(
        self,
        decider: Decider,
        *,
        limits: Sequence[int],
        num_others: Sequence[int],
        tracer: Tracer | None = None,
    ) -> Outcome:
        """Let a decider act in the loaded clusters until each waits or has had enough.

        Args:
            limits: most decisions of each cluster, at least 1.
            num_others: how many other actions to name beside each decision.
        """
        num_clusters = len(limits)
        outcome = Outcome([[] for _ in limits], [False] * num_clusters, [0.0] * num_clusters)
        left = list(limits)
        numbers = list(range(num_clusters))  # clusters that are not done
        rows = np.arange(num_clusters)
        engine, wants_others = self.engine, any(num_others)
        self.decider_s = 0.0
        while numbers:
            observation = self._observation
            if len(numbers) < self.size:
                observation = {name: array[rows] for name, array in observation.items()}
            started = time.perf_counter()
            verdict = decider(observation, rows)
            self.decider_s += time.perf_counter() - started
            actions = verdict.actions
            if wants_others:
                others = _others(observation, verdict, max(num_others))
            if tracer is not None:
                observation = {name: array.copy() for name, array in observation.items()}
                verdict = verdict._replace(actions=actions.copy())
                power_w = engine.state.clusters["power_w"][rows]
            self._actions[rows] = actions
            engine.step(self._actions)
            elapsed = engine.result.elapsed_ticks[rows]
            if tracer is not None:
                tracer(
                    Trace(
                        rows=rows,
                        observation=observation,
                        verdict=verdict,
                        reward=engine.result.reward[rows],
                        cost=engine.result.cost[rows],
                        power_w=np.where(elapsed > 0, power_w, 0.0),
                        elapsed_ticks=elapsed,
                    )
                )
            going_on = []
            chances = _chances(verdict)
            for i, (row, action, has_ended, chance) in enumerate(
                zip(numbers, actions.tolist(), elapsed.tolist(), chances, strict=True)
            ):
                if action == self._wait:
                    outcome.ended_by_wait[row] = True
                    outcome.wait_chance[row] = chance
                    continue
                named = others[i][: num_others[row]] if wants_others else []
                outcome.steps[row].append(Step(row, action, chance, named))
                left[row] -= 1
                if not has_ended and left[row] > 0:
                    going_on.append(row)
            if len(going_on) < len(numbers):
                done = engine.state.clusters["tick"]
                kept = done[going_on]
                done[rows] = self.config.episode_ticks  # the kernels leave these alone
                done[going_on] = kept
                numbers, rows = going_on, np.array(going_on, np.int64)
        return outcome


def serving_rules(rules: ClusterConfig, fleet: Fleet) -> ClusterConfig:
    """Return the rules for clusters of another fleet, in the short episodes of the service."""
    return rules.replace(
        fleet=rules.fleet.replace(num_servers=fleet.num_servers, resources=fleet.resources),
        episode_ticks=EPISODE_TICKS,
    )


def _chances(verdict: Verdict) -> list[float]:
    """Return the probability of each chosen action."""
    if verdict.chances is None:
        return [1.0] * len(verdict.actions)
    rows = np.arange(len(verdict.actions))
    chances: list[float] = verdict.chances[rows, verdict.actions].tolist()
    return chances


def _others(observation: Arrays, verdict: Verdict, most: int) -> list[list[tuple[int, float]]]:
    """Return the likeliest legal actions besides the chosen one, for each cluster."""
    mask = observation["action_mask"]
    if verdict.chances is None:
        return [[] for _ in mask]
    chances = np.where(mask != 0, verdict.chances, -1.0)
    chances[np.arange(len(mask)), verdict.actions] = -1.0
    most = min(most, chances.shape[1])
    columns = np.argpartition(-chances, most - 1, axis=1)[:, :most]
    values = np.take_along_axis(chances, columns, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    columns = np.take_along_axis(columns, order, axis=1).tolist()
    values = np.take_along_axis(values, order, axis=1).tolist()
    return [
        [(action, chance) for action, chance in zip(*pair, strict=True) if chance >= 0.0]
        for pair in zip(columns, values, strict=True)
    ]


def place_of(e: int, num_requests: int) -> str:
    """Return where in a batch the fault is; nothing when there is no batch."""
    return f"requests[{e}]: " if num_requests > 1 else ""
