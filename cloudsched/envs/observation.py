"""What a policy sees: the one encoder of cluster state into features.

All features are float32 in [-1, 1]; nothing reveals the future. R is the number of resources,
`squash(x, s)` is x / (x + s), and `largest` is the largest value in the fleet.

| `servers` (N, 2R + 12)      |                                                              |
|-----------------------------|--------------------------------------------------------------|
| 0 .. R                      | free capacity / largest capacity                             |
| R .. 2R                     | capacity / largest capacity                                  |
| 2R, 2R+1, 2R+2              | watts idle, at full load, at half load / largest full load   |
| 2R+3, 2R+4, 2R+5            | is active, is waking, is asleep                              |
| 2R+6                        | ticks until awake / wake delay                               |
| 2R+7                        | running jobs, squash 8                                       |
| 2R+8, 2R+9                  | ticks to the next and to the last completion, squash 30      |
| 2R+10                       | ticks active without a job, squash 30                        |
| 2R+11                       | CPU given back within 5 ticks / largest capacity             |

| `jobs` (K, R + 4)           | all zero where the slot is empty                             |
|-----------------------------|--------------------------------------------------------------|
| 0 .. R                      | demand / largest capacity                                    |
| R, R+1, R+2                 | duration, wait, laxity (signed), squash 30                   |
| R+3                         | 1: there is a job                                            |

| `context` (R + 12,)         |                                                              |
|-----------------------------|--------------------------------------------------------------|
| 0                           | queue length, squash N                                       |
| 1 .. R+1                    | queued demand / fleet capacity, squash 1                     |
| R+1, R+2, R+3               | jobs arriving a tick over 5, 30, 200 ticks, squash N         |
| R+4, R+5, R+6               | CPU work arriving a tick / fleet CPU, same horizons, squash 1|
| R+7, R+8                    | sine and cosine of the time of day                           |
| R+9                         | share of servers awake                                       |
| R+10                        | power / power of the fleet at full load                      |
| R+11                        | decisions taken in this tick / decisions allowed             |
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cloudsched.sim.engine import ClusterEngine
from cloudsched.sim.state import (
    ACTIVE,
    ASLEEP,
    NEVER,
    PLACED,
    RATE_HORIZONS,
    TICKED,
    UNCHANGED,
    WAKING,
    ClusterState,
)

ENCODER_VERSION = 1

TIME_SCALE = 30.0  # ticks
RUNNING_SCALE = 8.0  # jobs on a server
DAY_S = 86_400.0
NUM_HORIZONS = len(RATE_HORIZONS)


class Scales(NamedTuple):
    """What features are divided by."""

    largest_capacity: NDArray[np.float64]  # (R,)
    total_capacity: NDArray[np.float64]  # (R,)


class Observation(NamedTuple):
    """The arrays of E observations."""

    servers: NDArray[np.float32]  # (E, N, 2R + 12)
    jobs: NDArray[np.float32]  # (E, K, R + 4)
    context: NDArray[np.float32]  # (E, R + 12)


class ObservationEncoder:
    """Keeps the observation of an engine's clusters up to date.

    Args:
        engine: whose state is encoded; call `update` after each of its steps and resets.
    """

    def __init__(self, engine: ClusterEngine) -> None:
        self._engine = engine
        fleet, config = engine.fleet, engine.config
        self._scales = Scales(
            largest_capacity=fleet.capacity.max(axis=0),
            total_capacity=fleet.total_capacity,
        )
        shapes = feature_shapes(fleet.num_servers, config.visible_jobs, fleet.num_resources)
        self.arrays = Observation(
            *(np.zeros((engine.num_clusters, *shape), np.float32) for shape in shapes)
        )
        # The columns that never change are written once, here; `encode` leaves them alone.
        power_w = np.stack([fleet.idle_w, fleet.max_w, engine.power_at(0.5)], axis=1)
        first, last = fleet.num_resources, 2 * fleet.num_resources
        self.arrays.servers[:, :, first:last] = fleet.capacity / self._scales.largest_capacity
        self.arrays.servers[:, :, last : last + 3] = power_w / fleet.max_w.max()

    def update(self) -> None:
        """Encode what the last step or reset changed."""
        engine = self._engine
        encode_unpacked(engine.rules, *self._scales, *engine.state, *self.arrays)


def feature_shapes(
    num_servers: int, visible_jobs: int, num_resources: int
) -> tuple[tuple[int, int], tuple[int, int], tuple[int]]:
    """Return the shapes of `servers`, `jobs` and `context` of one cluster."""
    return (
        (num_servers, 2 * num_resources + 12),
        (visible_jobs, num_resources + 4),
        (num_resources + 12,),
    )


class Columns(NamedTuple):
    """Where some features stand, for those who read them by name."""

    is_active: int
    is_waking: int
    is_asleep: int
    last_end: int
    idle_ticks: int
    releasing: int
    duration: int
    wait: int
    laxity: int
    queued: int
    work_rate: int


def columns(num_resources: int) -> Columns:
    """Return the columns for R resources."""
    servers, context = 2 * num_resources, num_resources + 1
    return Columns(
        is_active=servers + 3,
        is_waking=servers + 4,
        is_asleep=servers + 5,
        last_end=servers + 9,
        idle_ticks=servers + 10,
        releasing=servers + 11,
        duration=num_resources,
        wait=num_resources + 1,
        laxity=num_resources + 2,
        queued=1,
        work_rate=context + 3,
    )


@njit(cache=True, nogil=True, error_model="numpy")
def encode(
    all_rules: NDArray[np.void],
    scales: Scales,
    state: ClusterState,
    out: Observation,
) -> None:
    """Write the features of what changed in each cluster since the last call."""
    rules = all_rules[0]
    num_envs, num_servers = state.servers.shape
    num_slots = rules.visible_jobs
    for e in range(num_envs):
        cluster = state.clusters[e]
        if cluster.change == UNCHANGED:
            continue
        if cluster.change == TICKED:
            for n in range(num_servers):
                _encode_server(rules, scales, state, e, n, out.servers)
            for k in range(num_slots):
                _encode_slot(scales, state, e, k, out.jobs)
        else:
            n = cluster.changed_server
            _encode_server(rules, scales, state, e, n, out.servers)
            if cluster.change == PLACED:
                for k in range(cluster.changed_slot, num_slots - 1):
                    for f in range(out.jobs.shape[2]):
                        out.jobs[e, k, f] = out.jobs[e, k + 1, f]
                _encode_slot(scales, state, e, num_slots - 1, out.jobs)
        _encode_context(rules, scales, state, e, out.context)


@njit(cache=True, nogil=True, error_model="numpy")
def encode_unpacked(all_rules, *arrays):  # type: ignore[no-untyped-def]
    """Call `encode` with loose arrays, as `cloudsched.sim.kernels.step_unpacked` does and why."""
    scales = Scales(arrays[0], arrays[1])
    state = ClusterState(
        arrays[2],
        arrays[3],
        arrays[4],
        arrays[5],
        arrays[6],
        arrays[7],
        arrays[8],
        arrays[9],
    )
    encode(all_rules, scales, state, Observation(arrays[10], arrays[11], arrays[12]))


@njit(inline="always")
def _squash(value, scale):  # type: ignore[no-untyped-def]
    return value / (abs(value) + scale)


@njit(inline="always")
def _encode_server(rules, scales, state, e, n, out):  # type: ignore[no-untyped-def]
    server = state.servers[e, n]
    now = state.clusters[e].tick
    num_resources = state.demand.shape[2]
    for r in range(num_resources):
        out[e, n, r] = state.free[e, n, r] / scales.largest_capacity[r]
    # Products with 0 or 1 instead of branches: which servers are busy is hard to predict, and a
    # wrong guess costs the processor more than the arithmetic.
    is_busy = 1.0 * (server.num_running > 0)
    is_active = 1.0 * (server.mode == ACTIVE)
    f = 2 * num_resources
    out[e, n, f + 3] = is_active
    out[e, n, f + 4] = 1.0 * (server.mode == WAKING)
    out[e, n, f + 5] = 1.0 * (server.mode == ASLEEP)
    out[e, n, f + 6] = server.wake_left / max(1, rules.wake_delay_ticks)
    out[e, n, f + 7] = _squash(float(server.num_running), RUNNING_SCALE)
    out[e, n, f + 8] = is_busy * _squash(float(server.next_end - now), TIME_SCALE)
    out[e, n, f + 9] = is_busy * _squash(float(max(0, server.last_end - now)), TIME_SCALE)
    is_idle = is_active * (1.0 - is_busy)
    out[e, n, f + 10] = is_idle * _squash(float(now - server.idle_since), TIME_SCALE)
    out[e, n, f + 11] = server.releasing / scales.largest_capacity[0]


@njit(inline="always")
def _encode_slot(scales, state, e, k, out):  # type: ignore[no-untyped-def]
    cluster = state.clusters[e]
    if k >= cluster.queue_length:
        for f in range(out.shape[2]):
            out[e, k, f] = 0.0
        return
    j = state.queue[e, cluster.queue_head + k]
    job = state.jobs[e, j]
    num_resources = state.demand.shape[2]
    for r in range(num_resources):
        out[e, k, r] = min(1.0, state.demand[e, j, r] / scales.largest_capacity[r])
    out[e, k, num_resources] = _squash(float(job.duration), TIME_SCALE)
    out[e, k, num_resources + 1] = _squash(float(cluster.tick - job.arrival), TIME_SCALE)
    out[e, k, num_resources + 2] = 1.0
    if job.start_by != NEVER:
        out[e, k, num_resources + 2] = _squash(float(job.start_by - cluster.tick), TIME_SCALE)
    out[e, k, num_resources + 3] = 1.0


@njit(inline="always")
def _encode_context(rules, scales, state, e, out):  # type: ignore[no-untyped-def]
    cluster = state.clusters[e]
    num_servers = float(state.servers.shape[1])
    num_resources = state.demand.shape[2]
    out[e, 0] = _squash(float(cluster.queue_length), num_servers)
    for r in range(num_resources):
        out[e, 1 + r] = _squash(state.queued[e, r] / scales.total_capacity[r], 1.0)
    f = num_resources + 1
    if cluster.change == TICKED:
        for h in range(NUM_HORIZONS):
            out[e, f + h] = _squash(cluster.arrival_rate[h], num_servers)
            work = cluster.work_rate[h] / scales.total_capacity[0]
            out[e, f + NUM_HORIZONS + h] = _squash(work, 1.0)
        time_s = cluster.time_of_day_s + cluster.tick * rules.tick_s
        angle = 2.0 * math.pi * ((time_s / DAY_S) % 1.0)
        out[e, f + 2 * NUM_HORIZONS] = math.sin(angle)
        out[e, f + 2 * NUM_HORIZONS + 1] = math.cos(angle)
    f += 2 * NUM_HORIZONS + 2
    out[e, f] = cluster.num_awake / num_servers
    out[e, f + 1] = min(1.0, cluster.power_w / rules.total_max_w)
    out[e, f + 2] = cluster.decisions_in_tick / rules.decisions_per_tick
