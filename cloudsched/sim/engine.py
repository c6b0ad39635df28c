"""The simulator of E clusters: checks what comes in, then calls the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cloudsched.config import ClusterConfig
from cloudsched.errors import InvalidActionError, InvalidJobsError
from cloudsched.sim.fleet import Fleet, build_fleet
from cloudsched.sim.jobs import JobTable
from cloudsched.sim.kernels import power_at, reset_clusters, step_unpacked, update_mask
from cloudsched.sim.records import records
from cloudsched.sim.state import (
    JOB_DTYPE,
    NEVER,
    UNCHANGED,
    ClusterState,
    StepResult,
    empty_state,
    rules_of,
)


class ClusterEngine:
    """E clusters with the same rules and fleet, each with its own jobs.

    Attributes:
        state: the arrays of all clusters.
        mask: (E, A) int8, what is legal now.
        result: what the last step gave; overwritten by the next.
    """

    def __init__(
        self, config: ClusterConfig, num_clusters: int = 1, fleet: Fleet | None = None
    ) -> None:
        self.config = config
        self.fleet = build_fleet(config.fleet) if fleet is None else fleet
        self.rules = rules_of(config, self.fleet)
        self._shape = (num_clusters,)
        self.fleet_arrays = self.fleet.arrays
        self.state: ClusterState = empty_state(config, self.fleet, num_clusters)
        self.mask: NDArray[np.int8] = np.zeros((num_clusters, config.num_actions), np.int8)
        self.result = StepResult(
            reward=np.zeros(num_clusters),
            cost=np.zeros(num_clusters),
            elapsed_ticks=np.zeros(num_clusters, np.int64),
            is_truncated=np.zeros(num_clusters, np.bool_),
        )

    @property
    def num_clusters(self) -> int:
        """E."""
        return len(self.state.clusters)

    @property
    def wait_action(self) -> int:
        """The action that ends the tick."""
        return self.config.num_actions - 1

    def reset(self, tables: Sequence[JobTable], which: ArrayLike | None = None) -> None:
        """Start episodes: cluster `which[i]` gets `tables[i]`; all clusters when None."""
        chosen = (
            np.arange(self.num_clusters) if which is None else np.asarray(which, dtype=np.int64)
        )
        if len(tables) != len(chosen):
            raise InvalidJobsError(
                f"{len(tables)} job tables for {len(chosen)} clusters; expected one for each."
            )
        for e, table in zip(chosen.tolist(), tables, strict=True):
            self._load(e, table)
        self.state.clusters["change"] = UNCHANGED
        reset_clusters(self.rules, self.fleet_arrays, self.state, chosen)
        update_mask(self.rules, self.state, self.mask)

    def step(self, actions: ArrayLike) -> StepResult:
        """Carry out one decision in each cluster."""
        checked = self._checked(actions)
        step_unpacked(self.rules, self.mask, checked, *self.fleet_arrays, *self.state, *self.result)
        return self.result

    def power_at(self, load: float) -> NDArray[np.float64]:
        """(N,) watts of each server, awake, at the same share `load` of its CPU."""
        power_w = np.zeros(self.fleet.num_servers)
        power_at(self.rules, self.fleet_arrays, load, power_w)
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

    def _grow(self, num_jobs: int) -> None:
        """Make room for longer job tables, and a quarter more so that this stays rare."""
        length = num_jobs + num_jobs // 4
        old = self.state
        jobs = records((self.num_clusters, length), JOB_DTYPE)
        demand = np.zeros((self.num_clusters, length, self.fleet.num_resources))
        jobs[:, : old.jobs.shape[1]] = old.jobs
        demand[:, : old.demand.shape[1]] = old.demand
        self.state = old._replace(jobs=jobs, demand=demand)


def start_by(config: ClusterConfig, table: JobTable) -> NDArray[np.int64]:
    """(J,) last tick at which the start of each job is in time."""
    slack = np.full(len(table), NEVER, dtype=np.int64)
    if config.sla_stretch is not None:
        # Rounded first: (1.6 - 1) * 5 is a hair above 3 in floats, and its ceiling would be 4.
        stretch = np.round((config.sla_stretch - 1.0) * table.duration_ticks, 9)
        slack = np.maximum(1, np.ceil(stretch)).astype(np.int64)
    if config.sla_latency_ticks is not None:
        slack = np.minimum(slack, config.sla_latency_ticks)
    return np.asarray(np.minimum(table.arrival_tick + slack, NEVER))
