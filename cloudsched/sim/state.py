"""The state of E clusters as data: records and arrays that kernels read and write.

Per-cluster, per-server and per-job scalars live in record arrays, so that a kernel says
`server.mode` and takes six arrays instead of forty.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cloudsched.config import ClusterConfig
from cloudsched.sim.fleet import Fleet
from cloudsched.sim.records import records

ACTIVE, WAKING, ASLEEP = 0, 1, 2
MODE_NAMES = ("active", "waking", "asleep")

NONE = -1  # end of a linked list, a job not started, a server not chosen
NEVER = 2**31 - 1  # a deadline that never passes

# Arrival rates are averaged over these horizons, in ticks (see `_arrive` in the kernels).
RATE_HORIZONS = (5, 30, 200)
# How far ahead a server's `releasing` looks, in ticks.
RELEASE_HORIZON = 5

# The first lines are what every decision touches: together, they share a cache line or two.
CLUSTER_DTYPE = np.dtype(
    [
        # the clock and the servers
        ("tick", np.int64),
        ("decisions_in_tick", np.int64),
        ("decisions", np.int64),
        ("power_w", np.float64),  # of all servers, kept exact
        ("num_awake", np.int64),  # ACTIVE or WAKING
        ("sleep_requests", np.int64),
        ("wake_requests", np.int64),
        ("wake_delay_ticks", np.int64),  # of this episode
        # the queue and running jobs
        ("queue_head", np.int64),
        ("queue_length", np.int64),
        ("num_late", np.int64),  # queued jobs whose `start_by` has passed
        ("num_running", np.int64),
        ("started", np.int64),
        ("cpu_used", np.float64),  # of all servers, kept exact
        # arrivals
        ("next_job", np.int64),  # first job that has not arrived yet
        ("num_jobs", np.int64),  # rows of the job table in use
        ("new_violations", np.int64),  # since the last tick was paid for
        ("arrival_rate", np.float64, (len(RATE_HORIZONS),)),  # jobs a tick
        ("work_rate", np.float64, (len(RATE_HORIZONS),)),  # CPU x ticks arrived, a tick
        ("work_square", np.float64),  # the same, squared, over the slowest horizon
        ("time_of_day_s", np.float64),  # at tick 0
        ("day_gain_s", np.float64),  # by which the time of day runs ahead of the ticks, each tick
        # counters of the episode
        ("energy_j", np.float64),
        ("cpu_ticks", np.float64),  # CPU in use, summed over ticks
        ("awake_ticks", np.int64),
        ("late_job_ticks", np.int64),
        ("arrived", np.int64),
        ("completed", np.int64),
        ("violations", np.int64),
        ("rejected", np.int64),
        ("unplaceable", np.int64),  # the part of `rejected` that fits on no server
        ("dropped", np.int64),
        ("illegal", np.int64),
    ],
    align=True,
)

SERVER_DTYPE = np.dtype(
    [
        ("power_w", np.float64),
        ("releasing", np.float64),  # CPU that its jobs give back within RELEASE_HORIZON
        ("mode", np.int32),
        ("wake_left", np.int32),  # ticks until a WAKING server is ACTIVE
        ("num_running", np.int32),
        ("first_running", np.int32),  # head of the list of its jobs, through `next_running`
        ("next_end", np.int32),  # tick of the next completion; NEVER without jobs
        ("last_end", np.int32),  # tick of the last completion; meaningless without jobs
        ("idle_since", np.int32),  # tick since which it is ACTIVE without jobs
    ],
    align=True,
)

JOB_DTYPE = np.dtype(
    [
        ("arrival", np.int32),
        ("duration", np.int32),
        ("start_by", np.int32),  # last tick at which a start is in time
        ("start", np.int32),  # NONE until it starts
        ("server", np.int32),  # NONE until it starts
        ("next_running", np.int32),  # on the same server
        ("next_ending", np.int32),  # at the same tick
    ],
    align=True,
)


class ClusterState(NamedTuple):
    """State of E clusters; `J` is the length of the job tables, `Q` of the queue buffers."""

    clusters: NDArray[np.void]  # (E,) of CLUSTER_DTYPE
    servers: NDArray[np.void]  # (E, N) of SERVER_DTYPE
    free: NDArray[np.float64]  # (E, N, R) capacity not in use
    jobs: NDArray[np.void]  # (E, J) of JOB_DTYPE
    demand: NDArray[np.float64]  # (E, J, R)
    queue: NDArray[np.int32]  # (E, Q) job rows, in window order from queue_head on
    queued: NDArray[np.float64]  # (E, R) demand of all queued jobs
    ending: NDArray[np.int32]  # (E, T + 6) head of the list of jobs that end at a tick


class Observation(NamedTuple):
    """What policies see of E clusters; `cloudsched.envs.observation` lists the features."""

    servers: NDArray[np.float32]  # (E, N, 2R + 12)
    jobs: NDArray[np.float32]  # (E, K, R + 4)
    context: NDArray[np.float32]  # (E, R + 15)
    action_mask: NDArray[np.int8]  # (E, A) 1 where an action is legal


# Whole numbers are squashed by these scales; N stands for the number of servers.
SQUASH_TIME, SQUASH_RUNNING, SQUASH_WAKE, SQUASH_BY_FLEET = 0, 1, 2, 3
TIME_SCALE = 30.0  # ticks
RUNNING_SCALE = 8.0  # jobs on a server
WAKE_SCALE = 5.0  # ticks
SQUASHED_LENGTH = 1024


class Scales(NamedTuple):
    """What features are divided by, and a table that spares most of the divisions."""

    capacity: NDArray[np.float64]  # (2, R) of the largest server, and of the fleet
    squash_scale: NDArray[np.float64]  # (4,) by SQUASH_TIME ... SQUASH_BY_FLEET
    squashed: NDArray[np.float32]  # (4, SQUASHED_LENGTH) x / (x + scale) of whole numbers x


class StepResult(NamedTuple):
    """What one step gave each cluster."""

    reward: NDArray[np.float64]  # (E,)
    cost: NDArray[np.float64]  # (E,)
    elapsed_ticks: NDArray[np.int64]  # (E,) 0 or 1
    is_truncated: NDArray[np.bool_]  # (E,) the episode's last tick has ended, or none has begun


class Snapshots(NamedTuple):
    """States of S clusters in plain numbers; times are relative to now."""

    tick: NDArray[np.int64]  # (S,)
    decisions_in_tick: NDArray[np.int64]  # (S,)
    wake_delay: NDArray[np.int64]  # (S,)
    time_of_day_s: NDArray[np.float64]  # (S,) now
    context: NDArray[np.float64]  # (S, 2 * 3 + 1) arrival rates, work rates, mean square of work
    servers: NDArray[np.int64]  # (S, N, 3) mode, ticks until awake, ticks without a job
    job_counts: NDArray[np.int64]  # (S, 3) running, queued, arriving with the next tick
    # All jobs, cluster after cluster, in that order: (J, 4), columns
    #   running: server, ticks left, -, -
    #   queued and arriving: NONE, duration, ticks waited, ticks until the last start in time
    jobs: NDArray[np.int64]
    demand: NDArray[np.float64]  # (J, R)


RULES_DTYPE = np.dtype(
    [
        ("episode_ticks", np.int64),
        ("tick_s", np.float64),
        ("sleep", np.bool_),
        ("standby_factor", np.float64),
        ("wake_power_factor", np.float64),
        ("drop_expired", np.bool_),
        ("queue_capacity", np.int64),
        ("visible_jobs", np.int64),
        ("is_laxity_order", np.bool_),
        ("decisions_per_tick", np.int64),
        ("wait_only_when_stuck", np.bool_),
        ("alpha", np.float64),
        ("beta", np.float64),
        ("late_penalty", np.float64),
        ("toggle_penalty", np.float64),
        ("illegal_penalty", np.float64),
        ("cost_late_rate", np.float64),
        ("total_max_w", np.float64),
    ],
    align=True,
)


def rules_of(config: ClusterConfig, fleet: Fleet) -> NDArray[np.void]:
    """Collect what kernels need of a config: (1,) of RULES_DTYPE, cheap to pass at every step."""
    rules = records(1, RULES_DTYPE)
    derived = {
        "is_laxity_order": config.window_order == "laxity",
        "total_max_w": fleet.max_w.sum(),
    }
    for name in RULES_DTYPE.names or ():
        if name in derived:
            rules[name] = derived[name]
        else:
            rules[name] = getattr(config if hasattr(config, name) else config.reward, name)
    return rules


def empty_state(config: ClusterConfig, fleet: Fleet, num_clusters: int) -> ClusterState:
    """Allocate the state of clusters that have no jobs yet; reset fills it."""
    shape = (num_clusters, fleet.num_servers)
    num_resources = fleet.num_resources
    clusters = records(num_clusters, CLUSTER_DTYPE)
    clusters["tick"] = config.episode_ticks  # over, so that steps leave them alone
    return ClusterState(
        clusters=clusters,
        servers=records(shape, SERVER_DTYPE),
        free=np.zeros((*shape, num_resources)),
        jobs=records((num_clusters, 0), JOB_DTYPE),
        demand=np.zeros((num_clusters, 0, num_resources)),
        # Twice the capacity: the queue moves right as jobs leave its head, and is moved back
        # only when it reaches the end.
        queue=np.zeros((num_clusters, 2 * config.queue_capacity), np.int32),
        queued=np.zeros((num_clusters, num_resources)),
        ending=np.full((num_clusters, config.episode_ticks + RELEASE_HORIZON + 1), NONE, np.int32),
    )


def feature_shapes(
    num_servers: int, visible_jobs: int, num_resources: int
) -> tuple[tuple[int, int], tuple[int, int], tuple[int]]:
    """Return the shapes of `servers`, `jobs` and `context` of one cluster."""
    return (
        (num_servers, 2 * num_resources + 12),
        (visible_jobs, num_resources + 4),
        (num_resources + 15,),
    )


def empty_observation(config: ClusterConfig, num_clusters: int) -> Observation:
    """Allocate what policies see of clusters that have not been reset yet."""
    shapes = feature_shapes(config.num_servers, config.visible_jobs, config.num_resources)
    servers, jobs, context = (np.zeros((num_clusters, *shape), np.float32) for shape in shapes)
    mask = np.zeros((num_clusters, config.num_actions), np.int8)
    return Observation(servers, jobs, context, mask)


def scales_of(fleet: Fleet) -> Scales:
    """Collect what the features of a fleet are divided by."""
    scale = np.array([TIME_SCALE, RUNNING_SCALE, WAKE_SCALE, fleet.num_servers])
    whole = np.arange(SQUASHED_LENGTH, dtype=np.float64)
    return Scales(
        capacity=np.stack([fleet.capacity.max(axis=0), fleet.total_capacity]),
        squash_scale=scale,
        squashed=(whole / (whole + scale[:, None])).astype(np.float32),
    )
