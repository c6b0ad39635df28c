"""The measures of an episode: pure functions of a simulator's state.

A policy that starves jobs can look good on power and on the wait of those it did start, so the
shares of jobs and of work served stand beside every other measure, and jobs that still wait at the
end count with the wait they have had.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import njit
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


def episode_metrics(engine: ClusterEngine) -> dict[str, NDArray[np.float64]]:
    """Return each measure of `METRICS`, (E,) each."""
    chosen = np.arange(engine.num_clusters)
    bound_j = np.array([energy_bound_j(engine, int(e)) for e in chosen])
    measures = online_metrics(engine, chosen)
    measures["energy_bound_kwh"] = bound_j / JOULES_PER_KWH
    return {name: measures[name] for name in METRICS}


def online_metrics(
    engine: ClusterEngine, chosen: NDArray[np.int64]
) -> dict[str, NDArray[np.float64]]:
    """Return the measures for the chosen clusters, without the bound, which training can spare."""
    cluster = engine.state.clusters[chosen]
    ticks = np.maximum(1, cluster["tick"])
    served = dict(zip(SERVICE, zip(*_services(engine, chosen), strict=True), strict=True))
    measures: dict[str, Any] = {
        "episode_return": episode_return(engine)[chosen],
        "mean_power_w": cluster["energy_j"] / (ticks * engine.config.tick_s),
        "energy_kwh": cluster["energy_j"] / JOULES_PER_KWH,
        "sla_violation_rate": cluster["violations"] / np.maximum(1, cluster["arrived"]),
        "utilisation": cluster["cpu_ticks"] / (ticks * engine.fleet.total_capacity[0]),
        "awake_share": cluster["awake_ticks"] / (ticks * engine.fleet.num_servers),
        "toggles": cluster["sleep_requests"] + cluster["wake_requests"],
    }
    for name in METRICS:
        if name not in measures and name != "energy_bound_kwh":
            is_counter = name in (cluster.dtype.names or ())
            measures[name] = cluster[name] if is_counter else served[name]
    return {name: np.asarray(values, dtype=np.float64) for name, values in measures.items()}


def episode_return(engine: ClusterEngine) -> NDArray[np.float64]:
    """(E,) sum of the rewards so far, undiscounted, from what they were paid for."""
    clusters, reward = engine.state.clusters, engine.config.reward
    num_servers = engine.fleet.num_servers
    total: NDArray[np.float64] = -(
        reward.alpha * clusters["energy_j"] / engine.config.tick_s / engine.fleet.max_w.sum()
        + reward.beta * (clusters["violations"] - clusters["new_violations"]) / num_servers
        + reward.late_penalty * clusters["late_job_ticks"] / num_servers
        + reward.toggle_penalty * clusters["sleep_requests"] * 15.0 / num_servers
        + reward.illegal_penalty * clusters["illegal"]
    )
    return total


def _services(
    engine: ClusterEngine, chosen: NDArray[np.int64]
) -> Iterator[tuple[float, float, float, float, float]]:
    state = engine.state
    for e in chosen:
        cluster = state.clusters[e]
        arrived, head = int(cluster["arrived"]), int(cluster["queue_head"])
        queued = state.queue[e, head : head + int(cluster["queue_length"])]
        yield _service(
            state.jobs[e, :arrived], state.demand[e, :arrived], queued, int(cluster["tick"])
        )


SERVICE = ("jobs_served", "work_served", "wait_mean_ticks", "wait_p95_ticks", "bounded_slowdown")


@njit(cache=True)
def _service(
    jobs: NDArray[np.void], demand: NDArray[np.float64], queued: NDArray[np.int32], now: int
) -> tuple[float, float, float, float, float]:
    """Return the measures of one cluster that look at every job, in the order of `SERVICE`.

    Waits count of jobs that started and of those still queued, not of rejected or dropped ones.

    Args:
        jobs: (J,) those that have arrived.
        queued: rows of those that wait.
    """
    waits = np.empty(len(jobs) + len(queued), np.int64)
    num_started = 0
    work_started = 0.0
    work = 0.0
    slowdown = 0.0
    for j in range(len(jobs)):
        work += demand[j, 0] * jobs[j].duration
        if jobs[j].start != NONE:
            waits[num_started] = jobs[j].start - jobs[j].arrival
            work_started += demand[j, 0] * jobs[j].duration
            slowdown += _bounded_slowdown(waits[num_started], jobs[j].duration)
            num_started += 1
    num_waits = num_started
    for i in range(len(queued)):
        job = jobs[queued[i]]
        waits[num_waits] = now - job.arrival
        slowdown += _bounded_slowdown(waits[num_waits], job.duration)
        num_waits += 1
    jobs_served = num_started / len(jobs) if len(jobs) > 0 else 1.0
    work_served = work_started / work if work > 0.0 else 1.0
    if num_waits == 0:
        return jobs_served, work_served, 0.0, 0.0, 1.0
    ordered = np.sort(waits[:num_waits])
    position = 0.95 * (num_waits - 1)
    left = int(position)
    right = min(left + 1, num_waits - 1)
    p95 = ordered[left] + (ordered[right] - ordered[left]) * (position - left)
    return jobs_served, work_served, ordered.mean(), p95, slowdown / num_waits


@njit(inline="always")
def _bounded_slowdown(wait, duration):  # type: ignore[no-untyped-def]
    return max(1.0, (wait + duration) / max(duration, SLOWDOWN_BOUND_TICKS))
