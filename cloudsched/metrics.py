"""The measures of an episode: pure functions of a simulator's state.

A policy that starves jobs can look good on power and on the wait of those it did start, so the shares
of jobs and of work served stand beside every other measure, and jobs that still wait at the end
count with the wait they have had.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloudsched.energy_bound import energy_bound_j
from cloudsched.sim.engine import ClusterEngine
from cloudsched.sim.state import NONE

JOULES_PER_KWH = 3.6e6
SLOWDOWN_BOUND_TICKS = 10  # shorter jobs count as this long, or they would dominate the mean

METRICS: dict[str, str] = {
    "episode_return": "sum of rewards, undiscounted",
    "mean_power_w": "mean draw of the whole fleet, in watts",
    "energy_kwh": "energy of the episode",
    "energy_bound_kwh": "energy that no schedule of the same service can undercut",
    "sla_violation_rate": "violations / jobs arrived",
    "jobs_served": "share of arrived jobs that started",
    "work_served": "share of arrived CPU work (CPU x duration) whose jobs started",
    "wait_mean_ticks": "mean wait of jobs that started or still wait",
    "wait_p95_ticks": "95th percentile of the same",
    "bounded_slowdown": "mean of (wait + duration) / max(duration, 10 ticks), at least 1",
    "utilisation": "CPU in use / CPU of the fleet, over time",
    "awake_share": "share of servers awake, over time",
    "arrived": "jobs that arrived",
    "completed": "jobs that finished",
    "rejected": "jobs turned away: queue full, or larger than any server",
    "dropped": "jobs that left the queue at their deadline",
    "violations": "SLA violations",
    "toggles": "requests to sleep and to wake",
    "illegal": "illegal actions",
    "decisions": "decisions taken",
}


def episode_metrics(
    engine: ClusterEngine, which: NDArray[np.int64] | None = None
) -> dict[str, NDArray[np.float64]]:
    """Return each measure of `METRICS` for the chosen clusters (all when None), as arrays."""
    chosen = np.arange(engine.num_clusters) if which is None else which
    rows = [_cluster_metrics(engine, int(e)) for e in chosen]
    return {name: np.array([row[name] for row in rows], dtype=np.float64) for name in METRICS}


def episode_return(engine: ClusterEngine) -> NDArray[np.float64]:
    """(E,) sum of the rewards so far, undiscounted, from what they were paid for."""
    clusters, reward = engine.state.clusters, engine.config.reward
    num_servers = engine.fleet.num_servers
    total: NDArray[np.float64] = -(
        reward.alpha * clusters["energy_j"] / engine.config.tick_s / engine.rules.total_max_w
        + reward.beta * (clusters["violations"] - clusters["new_violations"]) / num_servers
        + reward.late_penalty * clusters["late_job_ticks"] / num_servers
        + reward.toggle_penalty * clusters["sleep_requests"] * 15.0 / num_servers
        + reward.illegal_penalty * clusters["illegal"]
    )
    return total


def _cluster_metrics(engine: ClusterEngine, e: int) -> dict[str, float]:
    cluster = engine.state.clusters[e]
    config = engine.config
    num_servers = engine.fleet.num_servers
    ticks = max(1, int(cluster["tick"]))
    arrived = int(cluster["arrived"])
    jobs = engine.state.jobs[e, :arrived]
    demand = engine.state.demand[e, :arrived]
    energy_j = float(cluster["energy_j"])
    has_started = jobs["start"] != NONE
    work = demand[:, 0] * jobs["duration"]
    wait = _waits(engine, e)
    toggles = int(cluster["sleep_requests"]) + int(cluster["wake_requests"])
    return {
        "episode_return": float(episode_return(engine)[e]),
        "mean_power_w": energy_j / (ticks * config.tick_s),
        "energy_kwh": energy_j / JOULES_PER_KWH,
        "energy_bound_kwh": energy_bound_j(engine, e) / JOULES_PER_KWH,
        "sla_violation_rate": _share(int(cluster["violations"]), arrived, empty=0.0),
        "jobs_served": _share(int(has_started.sum()), arrived, empty=1.0),
        "work_served": _share(float(work[has_started].sum()), float(work.sum()), empty=1.0),
        "wait_mean_ticks": float(wait.mean()) if len(wait) else 0.0,
        "wait_p95_ticks": float(np.percentile(wait, 95)) if len(wait) else 0.0,
        "bounded_slowdown": _bounded_slowdown(engine, e),
        "utilisation": float(cluster["cpu_ticks"]) / (ticks * engine.fleet.total_capacity[0]),
        "awake_share": float(cluster["awake_ticks"]) / (ticks * num_servers),
        "arrived": arrived,
        "completed": int(cluster["completed"]),
        "rejected": int(cluster["rejected"]),
        "dropped": int(cluster["dropped"]),
        "violations": int(cluster["violations"]),
        "toggles": toggles,
        "illegal": int(cluster["illegal"]),
        "decisions": int(cluster["decisions"]),
    }


def _share(part: float, whole: float, *, empty: float) -> float:
    return part / whole if whole > 0 else empty


def _measured_jobs(engine: ClusterEngine, e: int) -> NDArray[Any]:
    """Return the jobs whose wait counts: started, or still in the queue."""
    cluster = engine.state.clusters[e]
    head, length = int(cluster["queue_head"]), int(cluster["queue_length"])
    queued = engine.state.queue[e, head : head + length]
    jobs = engine.state.jobs[e, : int(cluster["arrived"])]
    return np.concatenate([jobs[jobs["start"] != NONE], jobs[queued]])


def _waits(engine: ClusterEngine, e: int) -> NDArray[np.int64]:
    jobs = _measured_jobs(engine, e)
    until = np.where(jobs["start"] != NONE, jobs["start"], engine.state.clusters["tick"][e])
    return until - jobs["arrival"]


def _bounded_slowdown(engine: ClusterEngine, e: int) -> float:
    jobs = _measured_jobs(engine, e)
    if not len(jobs):
        return 1.0
    time = _waits(engine, e) + jobs["duration"]
    return float(np.maximum(1.0, time / np.maximum(jobs["duration"], SLOWDOWN_BOUND_TICKS)).mean())
