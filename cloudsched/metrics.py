"""The measures of an episode: pure functions of a simulator's state.

A policy that starves jobs can look good on power and on the wait of those it did start, so the
shares of jobs and of work served stand beside every other measure, and jobs that still wait at the
end count with the wait they have had.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cloudsched.energy_bound import energy_bound_j
from cloudsched.sim.engine import ClusterEngine
from cloudsched.sim.records import records
from cloudsched.sim.state import NONE, ClusterState

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

ONLINE_METRICS = tuple(name for name in METRICS if name != "energy_bound_kwh")
MEASURE_DTYPE = np.dtype([(name, np.float64) for name in ONLINE_METRICS], align=True)


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
    measures = measure_clusters(engine, chosen)
    return {name: measures[name] for name in ONLINE_METRICS}


def measure_clusters(engine: ClusterEngine, chosen: NDArray[np.int64]) -> NDArray[np.void]:
    """Return a record of MEASURE_DTYPE for each chosen cluster."""
    measures = records(len(chosen), MEASURE_DTYPE)
    measure(engine.rules, engine.state, engine.fleet.total_capacity[0], chosen, measures)
    return measures


def episode_return(engine: ClusterEngine) -> NDArray[np.float64]:
    """(E,) sum of the rewards so far, undiscounted, from what they were paid for."""
    returns = np.empty(engine.num_clusters)
    sum_rewards(engine.rules, engine.state, returns)
    return returns


@njit(cache=True, error_model="numpy")
def sum_rewards(
    all_rules: NDArray[np.void], state: ClusterState, out_returns: NDArray[np.float64]
) -> None:
    """Write the return of each cluster.

    Args:
        out_returns: (E,) overwritten.
    """
    for e in range(len(out_returns)):
        out_returns[e] = _return(all_rules[0], state.clusters[e], state.servers.shape[1])


@njit(cache=True, error_model="numpy")
def measure(
    all_rules: NDArray[np.void],
    state: ClusterState,
    total_cpu: float,
    chosen: NDArray[np.int64],
    out: NDArray[np.void],
) -> None:
    """Write the measures of the chosen clusters.

    Args:
        total_cpu: of the fleet.
        out: of MEASURE_DTYPE, one for each chosen cluster; overwritten.
    """
    rules = all_rules[0]
    num_servers = state.servers.shape[1]
    for i in range(len(chosen)):
        e = chosen[i]
        cluster = state.clusters[e]
        row = out[i]
        ticks = max(1, cluster.tick)
        row.episode_return = _return(rules, cluster, num_servers)
        row.mean_power_w = cluster.energy_j / (ticks * rules.tick_s)
        row.energy_kwh = cluster.energy_j / JOULES_PER_KWH
        row.sla_violation_rate = cluster.violations / max(1, cluster.arrived)
        row.utilisation = cluster.cpu_ticks / (ticks * total_cpu)
        row.awake_share = cluster.awake_ticks / (ticks * num_servers)
        row.arrived = cluster.arrived
        row.completed = cluster.completed
        row.rejected = cluster.rejected
        row.dropped = cluster.dropped
        row.violations = cluster.violations
        row.toggles = cluster.sleep_requests + cluster.wake_requests
        row.illegal = cluster.illegal
        row.decisions = cluster.decisions
        queue = state.queue[e, cluster.queue_head : cluster.queue_head + cluster.queue_length]
        jobs = state.jobs[e, : cluster.arrived]
        served = _service(jobs, state.demand[e], queue, cluster.tick)
        row.jobs_served, row.work_served = served[0], served[1]
        row.wait_mean_ticks, row.wait_p95_ticks = served[2], served[3]
        row.bounded_slowdown = served[4]


@njit(inline="always")
def _return(rules, cluster, num_servers):  # type: ignore[no-untyped-def]
    return -(
        rules.alpha * cluster.energy_j / rules.tick_s / rules.total_max_w
        + rules.beta * (cluster.violations - cluster.new_violations) / num_servers
        + rules.late_penalty * cluster.late_job_ticks / num_servers
        + rules.toggle_penalty * cluster.sleep_requests * 15.0 / num_servers
        + rules.illegal_penalty * cluster.illegal
    )


@njit(cache=True)
def _service(
    jobs: NDArray[np.void], demand: NDArray[np.float64], queued: NDArray[np.int32], now: int
) -> tuple[float, float, float, float, float]:
    """Return what a look at every job tells of one cluster.

    Shares of jobs and of work served, mean and 95th percentile of the wait, bounded slowdown.
    Waits count of jobs that started and of those still queued, not of rejected or dropped ones.

    Args:
        jobs: those that have arrived.
        demand: (J, R) of them, and perhaps of others behind them.
        queued: rows of those that wait.
    """
    longest = 0
    for j in range(len(jobs)):
        if jobs[j].start != NONE:
            longest = max(longest, jobs[j].start - jobs[j].arrival)
    for i in range(len(queued)):
        longest = max(longest, now - jobs[queued[i]].arrival)
    num_waiting = np.zeros(longest + 1, np.int64)  # by how long they waited
    num_started = 0
    work_started = 0.0
    total_wait = 0
    work = 0.0
    slowdown = 0.0
    for j in range(len(jobs)):
        work += demand[j, 0] * jobs[j].duration
        if jobs[j].start != NONE:
            wait = jobs[j].start - jobs[j].arrival
            num_waiting[wait] += 1
            total_wait += wait
            work_started += demand[j, 0] * jobs[j].duration
            slowdown += _bounded_slowdown(wait, jobs[j].duration)
            num_started += 1
    num_waits = num_started + len(queued)
    for i in range(len(queued)):
        job = jobs[queued[i]]
        wait = now - job.arrival
        num_waiting[wait] += 1
        total_wait += wait
        slowdown += _bounded_slowdown(wait, job.duration)
    jobs_served = num_started / len(jobs) if len(jobs) > 0 else 1.0
    work_served = work_started / work if work > 0.0 else 1.0
    if num_waits == 0:
        return jobs_served, work_served, 0.0, 0.0, 1.0
    position = 0.95 * (num_waits - 1)
    left = _at_rank(num_waiting, int(position))
    right = _at_rank(num_waiting, min(int(position) + 1, num_waits - 1))
    p95 = left + (right - left) * (position - int(position))
    return jobs_served, work_served, total_wait / num_waits, p95, slowdown / num_waits


@njit(inline="always")
def _at_rank(counts, rank):  # type: ignore[no-untyped-def]
    """Return the value of this rank, from 0 on, among whole numbers given by their counts."""
    value = 0
    passed = counts[0]
    while passed <= rank:
        value += 1
        passed += counts[value]
    return value


@njit(inline="always")
def _bounded_slowdown(wait, duration):  # type: ignore[no-untyped-def]
    return max(1.0, (wait + duration) / max(duration, SLOWDOWN_BOUND_TICKS))
