"""The simulator of E clusters: checks what comes in, then calls the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cloudsched.config import ClusterConfig
from cloudsched.errors import ConfigError, InvalidActionError, InvalidJobsError
from cloudsched.sim.fleet import Fleet, build_fleet
from cloudsched.sim.jobs import JobTable
from cloudsched.sim.kernels import (
    load_snapshots,
    power_at,
    reset_clusters,
    show_clusters,
    step_unpacked,
)
from cloudsched.sim.records import records
from cloudsched.sim.state import (
    JOB_DTYPE,
    NEVER,
    ClusterState,
    Snapshots,
    StepResult,
    empty_observation,
    empty_state,
    rules_of,
    scales_of,
)

# Streams of a seed from here on are the engine's; workloads spawn theirs from 0.
WAKE_STREAM = 1000


class ClusterEngine:
    """E clusters with the same rules and fleet, each with its own jobs.

    Attributes:
        state: the arrays of all clusters.
        observation: what policies see of them, always up to date.
        result: what the last step gave; overwritten by the next.
        num_ended: how many episodes the last step ended.
    """

    def __init__(
        self, config: ClusterConfig, num_clusters: int = 1, fleet: Fleet | None = None
    ) -> None:
        self.config = config
        self.fleet = build_fleet(config.fleet) if fleet is None else fleet
        self.rules = rules_of(config, self.fleet)
        self._shape = (num_clusters,)
        self._fleet_arrays = self.fleet.arrays
        self._scales = scales_of(self.fleet)
        self.state: ClusterState = empty_state(config, self.fleet, num_clusters)
        self.observation = empty_observation(config, num_clusters)
        self.num_ended = 0
        self.result = StepResult(
            reward=np.zeros(num_clusters),
            cost=np.zeros(num_clusters),
            elapsed_ticks=np.zeros(num_clusters, np.int64),
            is_truncated=np.ones(num_clusters, np.bool_),
        )
        self._show_fleet()
        self._collect()

    @property
    def num_clusters(self) -> int:
        """E."""
        return len(self.state.clusters)

    @property
    def mask(self) -> NDArray[np.int8]:
        """(E, A) 1 where an action is legal now."""
        return self.observation.action_mask

    @property
    def wait_action(self) -> int:
        """The action that ends the tick."""
        return self.config.num_actions - 1

    def reset(
        self,
        tables: Sequence[JobTable],
        which: ArrayLike | None = None,
        *,
        wake_delays: Sequence[int] | None = None,
    ) -> None:
        """Start episodes: cluster `which[i]` gets `tables[i]`; all clusters when None.

        Args:
            wake_delays: ticks that waking takes, one for each table; the config's if None.
        """
        chosen = (
            np.arange(self.num_clusters) if which is None else np.asarray(which, dtype=np.int64)
        )
        if len(tables) != len(chosen):
            raise InvalidJobsError(
                f"{len(tables)} job tables for {len(chosen)} clusters; expected one for each."
            )
        if wake_delays is None:
            wake_delays = [self.config.wake_delay_ticks] * len(tables)
        if len(wake_delays) != len(tables) or min(wake_delays, default=0) < 0:
            raise ConfigError(
                f"wake_delays={wake_delays!r} for {len(tables)} job tables; expected one for each, "
                "of at least 0 ticks."
            )
        for e, table in zip(chosen.tolist(), tables, strict=True):
            self._load(e, table)
        self.state.clusters["wake_delay_ticks"][chosen] = wake_delays
        reset_clusters(self.rules, self._fleet_arrays, self.state, chosen)
        show_clusters(self.rules, self._scales, self.state, chosen, self.observation)
        self.result.is_truncated[chosen] = False

    def load(self, given: Snapshots) -> None:
        """Put the first clusters into given states; the others are over and do nothing."""
        most = int(given.job_counts.sum(axis=1).max(initial=0))
        if most > self.state.jobs.shape[1]:
            self._grow(most)
        clusters = self.state.clusters
        clusters["num_jobs"] = 0
        which = np.arange(len(given.tick))
        reset_clusters(self.rules, self._fleet_arrays, self.state, which)
        load_snapshots(self.rules, self._fleet_arrays, self.state, given)
        clusters["tick"][len(which) :] = self.config.episode_ticks
        show_clusters(self.rules, self._scales, self.state, which, self.observation)

    def branch(self, source: ClusterEngine, rows: NDArray[np.int64], of: NDArray[np.int64]) -> None:
        """Put clusters `rows` into the states, future arrivals included, of clusters `of` there.

        Args:
            source: with the same rules and fleet; may be this one.
        """
        if source.config != self.config:
            raise ConfigError("branch: the clusters have other rules; expected the same config.")
        num_jobs = int(source.state.clusters["num_jobs"][of].max(initial=0))
        if num_jobs > self.state.jobs.shape[1]:
            self._grow(num_jobs)
        for name in self.state._fields:
            own, others = (_as_bytes(getattr(one, name)) for one in (self.state, source.state))
            if name in ("jobs", "demand"):  # the rest of a row is unused
                own, others = own[:, :num_jobs], others[:, :num_jobs]
            own[rows] = others[of]
        for name in self.observation._fields:
            getattr(self.observation, name)[rows] = getattr(source.observation, name)[of]
        self.result.is_truncated[rows] = source.result.is_truncated[of]

    def end(self, rows: NDArray[np.int64]) -> None:
        """Let the episodes of some clusters be over; steps leave them alone from now on."""
        self.state.clusters["tick"][rows] = self.config.episode_ticks
        self.result.is_truncated[rows] = True

    def step(self, actions: ArrayLike) -> StepResult:
        """Carry out one decision in each cluster."""
        self.num_ended = step_unpacked(self.rules, self._checked(actions), *self._arrays)
        return self.result

    def power_at(self, load: float) -> NDArray[np.float64]:
        """(N,) watts of each server, awake, at the same share `load` of its CPU."""
        power_w = np.zeros(self.fleet.num_servers)
        power_at(self.rules, self._fleet_arrays, load, power_w)
        return power_w

    def _checked(self, actions: ArrayLike) -> NDArray[np.int64]:
        array = np.asarray(actions)
        if array.dtype == np.int64 and array.shape == self._shape and array.flags.c_contiguous:
            return array
        if array.shape != (self.num_clusters,) or array.dtype.kind not in "iu":
            raise InvalidActionError(
                f"actions have shape {array.shape} and type {array.dtype}; "
                f"expected whole numbers of shape ({self.num_clusters},)."
            )
        return np.ascontiguousarray(array, dtype=np.int64)

    def _load(self, e: int, table: JobTable) -> None:
        """Copy a job table into the rows of cluster e, and set its deadlines."""
        if table.num_resources != self.fleet.num_resources:
            raise InvalidJobsError(
                f"Jobs demand {table.num_resources} resources, but the fleet has "
                f"{self.fleet.num_resources}: {', '.join(self.fleet.resources)}."
            )
        num_jobs = len(table)
        if num_jobs > self.state.jobs.shape[1]:
            self._grow(num_jobs)
        jobs = self.state.jobs[e]
        jobs["arrival"][:num_jobs] = table.arrival_tick
        jobs["duration"][:num_jobs] = table.duration_ticks
        jobs["start_by"][:num_jobs] = start_by(self.config, table)
        self.state.demand[e, :num_jobs] = table.demand
        self.state.clusters["num_jobs"][e] = num_jobs
        self.state.clusters["time_of_day_s"][e] = table.time_of_day_s
        self.state.clusters["day_gain_s"][e] = table.day_gain_s(self.config.tick_s)

    def _grow(self, num_jobs: int) -> None:
        """Make room for longer job tables, and a quarter more so that this stays rare."""
        length = num_jobs + num_jobs // 4
        old = self.state
        jobs = records((self.num_clusters, length), JOB_DTYPE)
        demand = np.zeros((self.num_clusters, length, self.fleet.num_resources))
        jobs[:, : old.jobs.shape[1]] = old.jobs
        demand[:, : old.demand.shape[1]] = old.demand
        self.state = old._replace(jobs=jobs, demand=demand)
        self._collect()

    def _collect(self) -> None:
        """Line up what every step hands to its kernel."""
        self._arrays = (
            *self._fleet_arrays,
            *self._scales,
            *self.state,
            *self.observation,
            *self.result,
        )

    def _show_fleet(self) -> None:
        """Write the features that never change."""
        fleet, servers = self.fleet, self.observation.servers
        first, last = fleet.num_resources, 2 * fleet.num_resources
        power_w = np.stack([fleet.idle_w, fleet.max_w, self.power_at(0.5)], axis=1)
        servers[:, :, first:last] = fleet.capacity / fleet.capacity.max(axis=0)
        servers[:, :, last : last + 3] = power_w / fleet.max_w.max()


def _as_bytes(array: NDArray[Any]) -> NDArray[Any]:
    """Return records as plain bytes in the same memory: numpy copies them several times as fast."""
    if array.dtype.names is None:
        return array
    return array.view(np.uint8).reshape(*array.shape, array.dtype.itemsize)


def wake_delay_of(config: ClusterConfig, seed: int) -> int:
    """Return the ticks that waking takes in the episode of a seed."""
    shortest, longest = config.wake_delay_ticks, config.wake_delay_max_ticks
    if longest is None:
        return shortest
    stream = np.random.SeedSequence(seed, spawn_key=(WAKE_STREAM,))
    return int(np.random.default_rng(stream).integers(shortest, longest, endpoint=True))


def start_by(config: ClusterConfig, table: JobTable) -> NDArray[np.int64]:
    """(J,) last tick at which the start of each job is in time."""
    slack = slack_ticks(config, table.duration_ticks)
    return np.asarray(np.minimum(table.arrival_tick + slack, NEVER))


def slack_ticks(config: ClusterConfig, duration_ticks: NDArray[np.integer]) -> NDArray[np.int64]:
    """(J,) ticks that jobs of these durations may wait; NEVER where there is no limit."""
    slack = np.full(len(duration_ticks), NEVER, dtype=np.int64)
    if config.sla_stretch is not None:
        # Rounded first: (1.6 - 1) * 5 is a hair above 3 in floats, and its ceiling would be 4.
        stretch = np.rint((config.sla_stretch - 1.0) * duration_ticks * 1e9) / 1e9
        slack = np.maximum(1, np.ceil(stretch)).astype(np.int64)
    if config.sla_latency_ticks is not None:
        slack = np.minimum(slack, config.sla_latency_ticks)
    return slack
