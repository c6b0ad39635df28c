"""The dynamics of the cluster and what a policy sees of it: compiled loops over E clusters.

A step is one decision. Placements and toggles take no time; `wait`, an illegal action, or the last
decision that a tick allows ends the tick, in this order:

1. the tick's energy is charged at the power after all decisions;
2. queued jobs whose `start_by` is this tick become violations (and leave, if so ruled);
3. late jobs still in the queue are counted;
4. reward and cost are paid;
5. time moves on: jobs complete, waking servers come up, the next tick's jobs arrive.

Each change of the state is followed at once by the change of mask and observation that it brings
(the functions named `_show_...`; `cloudsched.envs.observation` lists the features), while the
cluster is in the processor's cache. Loops over servers avoid branches on what a server does, which
is hard to predict: a wrong guess costs the processor more than the arithmetic.

Kernels allocate nothing, draw nothing and raise nothing. They share this file because numba's cache
does not notice a change in another one. The naive twin is `cloudsched.sim.reference`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cloudsched.sim.fleet import FleetArrays
from cloudsched.sim.jobs import GRID
from cloudsched.sim.state import (
    ACTIVE,
    ASLEEP,
    NEVER,
    NONE,
    RATE_HORIZONS,
    RELEASE_HORIZON,
    SQUASH_BY_FLEET,
    SQUASH_RUNNING,
    SQUASH_TIME,
    SQUASH_WAKE,
    SQUASHED_LENGTH,
    WAKING,
    ClusterState,
    Observation,
    Scales,
    Snapshots,
    StepResult,
)

INVERSE_GRID = 1.0 / GRID
NUM_HORIZONS = len(RATE_HORIZONS)
DAY_S = 86_400.0

# Without allocations there is no need to count references, which would cost a fifth of a step.
# Parts become part of their callers: handing them all arrays would cost more than what they do.
OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False}
kernel = njit(cache=True, nogil=True, **OPTIONS)
part = njit(forceinline=True, **OPTIONS)


@part
def server_power(rules, fleet, n, mode, free_cpu):  # type: ignore[no-untyped-def]
    """Return the draw of server n in watts, on the grid: the one power formula."""
    power = fleet.power[n]
    if mode == ASLEEP:
        watts = rules.standby_factor * power.idle_w
    elif mode == WAKING:
        watts = rules.wake_power_factor * power.idle_w
    else:
        load = (fleet.capacity[n, 0] - free_cpu) / fleet.capacity[n, 0]
        if power.exponent > 0.0:
            watts = power.idle_w
            if load > 0.0:  # spares most servers the power function
                watts += (power.max_w - power.idle_w) * load**power.exponent
        else:
            position = load * 10.0
            left = min(int(position), 9)
            watts_left = fleet.curve_w[n, left]
            watts = watts_left + (fleet.curve_w[n, left + 1] - watts_left) * (position - left)
    return math.floor(watts * INVERSE_GRID + 0.5) * GRID


@kernel
def power_at(
    all_rules: NDArray[np.void], fleet: FleetArrays, load: float, out_power_w: NDArray[np.float64]
) -> None:
    """Write the draw of each server, awake, at the same share `load` of its CPU.

    Args:
        out_power_w: (N,) overwritten.
    """
    rules = all_rules[0]
    for n in range(fleet.capacity.shape[0]):
        free_cpu = fleet.capacity[n, 0] * (1.0 - load)
        out_power_w[n] = server_power(rules, fleet, n, ACTIVE, free_cpu)


@part
def _refresh_power(rules, fleet, state, e, n):  # type: ignore[no-untyped-def]
    cluster = state.clusters[e]
    server = state.servers[e, n]
    watts = server_power(rules, fleet, n, server.mode, state.free[e, n, 0])
    cluster.power_w += watts - server.power_w
    server.power_w = watts


@part
def _fits_empty(fleet, state, e, j, n):  # type: ignore[no-untyped-def]
    """Return whether job j could run on server n if nothing else did."""
    for r in range(state.demand.shape[2]):
        if state.demand[e, j, r] > fleet.capacity[n, r]:
            return False
    return True


@kernel
def reset_clusters(
    all_rules: NDArray[np.void],
    fleet: FleetArrays,
    state: ClusterState,
    which: NDArray[np.int64],
) -> None:
    """Put the clusters `which` at tick 0 of the job tables they hold, all servers ACTIVE."""
    rules = all_rules[0]
    num_servers, num_resources = fleet.capacity.shape
    for i in range(which.shape[0]):
        e = which[i]
        cluster = state.clusters[e]
        cluster.tick = 0
        cluster.decisions_in_tick = 0
        cluster.next_job = 0
        cluster.queue_head = 0
        cluster.queue_length = 0
        cluster.num_late = 0
        cluster.new_violations = 0
        for h in range(NUM_HORIZONS):
            cluster.arrival_rate[h] = 0.0
            cluster.work_rate[h] = 0.0
        cluster.work_square = 0.0
        cluster.power_w = 0.0
        cluster.cpu_used = 0.0
        cluster.num_awake = num_servers
        cluster.num_running = 0
        cluster.arrived = 0
        cluster.started = 0
        cluster.completed = 0
        cluster.rejected = 0
        cluster.unplaceable = 0
        cluster.dropped = 0
        cluster.violations = 0
        cluster.late_job_ticks = 0
        cluster.sleep_requests = 0
        cluster.wake_requests = 0
        cluster.illegal = 0
        cluster.decisions = 0
        cluster.energy_j = 0.0
        cluster.cpu_ticks = 0.0
        cluster.awake_ticks = 0
        for r in range(num_resources):
            state.queued[e, r] = 0.0
        for n in range(num_servers):
            server = state.servers[e, n]
            server.power_w = 0.0
            server.releasing = 0.0
            server.mode = ACTIVE
            server.wake_left = 0
            server.num_running = 0
            server.first_running = NONE
            server.next_end = NEVER
            server.last_end = 0
            server.idle_since = 0
            for r in range(num_resources):
                state.free[e, n, r] = fleet.capacity[n, r]
            _refresh_power(rules, fleet, state, e, n)
        for j in range(cluster.num_jobs):
            state.jobs[e, j].start = NONE
            state.jobs[e, j].server = NONE
            state.jobs[e, j].next_running = NONE
            state.jobs[e, j].next_ending = NONE
        for t in range(state.ending.shape[1]):
            state.ending[e, t] = NONE
        _arrive(rules, fleet, state, e)


@kernel
def step_clusters(
    all_rules: NDArray[np.void],
    fleet: FleetArrays,
    scales: Scales,
    state: ClusterState,
    actions: NDArray[np.int64],
    seen: Observation,
    out: StepResult,
) -> int:
    """Carry out one decision in each cluster; return how many episodes it ended.

    Args:
        actions: (E,) any value; what the mask does not allow counts as illegal.
        seen: mask and features before the step; brought up to date.
        out: overwritten.
    """
    rules = all_rules[0]
    num_envs, num_servers = state.servers.shape
    num_placements = rules.visible_jobs * num_servers
    wait = seen.action_mask.shape[1] - 1
    num_ended = 0
    for e in range(num_envs):
        cluster = state.clusters[e]
        out.reward[e] = 0.0
        out.cost[e] = 0.0
        out.elapsed_ticks[e] = 0
        out.is_truncated[e] = cluster.tick >= rules.episode_ticks
        if cluster.tick >= rules.episode_ticks:
            continue
        action = actions[e]
        cluster.decisions += 1
        cluster.decisions_in_tick += 1
        is_legal = 0 <= action <= wait and seen.action_mask[e, action] != 0
        if not is_legal:
            cluster.illegal += 1
            out.reward[e] -= rules.illegal_penalty
            action = wait
        if action < num_placements:
            k, n = action // num_servers, action % num_servers
            _place(rules, fleet, state, e, k, n)
            _show_placement(rules, scales, state, seen, e, k, n)
        elif action < wait:
            n = action - num_placements
            if _toggle(rules, fleet, state, e, n) == ASLEEP:
                out.reward[e] -= rules.toggle_penalty * 15.0 / num_servers
            _show_toggle(rules, scales, state, seen, e, n)
        if action == wait or cluster.decisions_in_tick >= rules.decisions_per_tick:
            _end_tick(rules, fleet, scales, state, seen, e, out)
            _show_tick(rules, scales, state, seen, e)
            out.elapsed_ticks[e] = 1
            out.is_truncated[e] = cluster.tick >= rules.episode_ticks
            num_ended += cluster.tick >= rules.episode_ticks
    return num_ended


@kernel
def step_unpacked(all_rules, actions, *arrays):  # type: ignore[no-untyped-def]
    """Call `step_clusters` with the arrays of all its tuples one after another.

    Numba takes loose arrays over from Python in a third of the time that tuples of them need,
    which at 64 clusters is a tenth of a step.
    """
    fleet = FleetArrays(arrays[0], arrays[1], arrays[2])
    scales = Scales(arrays[3], arrays[4], arrays[5])
    state = ClusterState(
        arrays[6],
        arrays[7],
        arrays[8],
        arrays[9],
        arrays[10],
        arrays[11],
        arrays[12],
        arrays[13],
    )
    seen = Observation(arrays[14], arrays[15], arrays[16], arrays[17])
    result = StepResult(arrays[18], arrays[19], arrays[20], arrays[21])
    return step_clusters(all_rules, fleet, scales, state, actions, seen, result)


@kernel
def show_clusters(
    all_rules: NDArray[np.void],
    scales: Scales,
    state: ClusterState,
    which: NDArray[np.int64],
    seen: Observation,
) -> None:
    """Write mask and features of the clusters `which` anew, except those that never change."""
    rules = all_rules[0]
    for i in range(which.shape[0]):
        e = which[i]
        for n in range(state.servers.shape[1]):
            _show_load(scales, state, seen, e, n)
            _show_mode(scales, state, seen, e, n)
        delay = state.clusters[e].wake_delay_ticks
        seen.context[e, state.free.shape[2] + 12] = _squash_whole(scales, SQUASH_WAKE, delay)
        _show_tick(rules, scales, state, seen, e)


@part
def _place(rules, fleet, state, e, k, n):  # type: ignore[no-untyped-def]
    """Start the job in slot k on server n."""
    cluster = state.clusters[e]
    server = state.servers[e, n]
    head = cluster.queue_head
    j = state.queue[e, head + k]
    for i in range(head + k, head, -1):
        state.queue[e, i] = state.queue[e, i - 1]
    cluster.queue_head += 1
    cluster.queue_length -= 1

    job = state.jobs[e, j]
    cluster.num_late -= job.start_by < cluster.tick
    job.start = cluster.tick
    job.server = n
    job.next_running = server.first_running
    end = cluster.tick + job.duration
    if server.num_running == 0:
        server.last_end = end
    else:
        server.last_end = max(server.last_end, end)
    server.next_end = min(server.next_end, end)
    server.first_running = j
    server.num_running += 1
    for r in range(state.demand.shape[2]):
        state.free[e, n, r] -= state.demand[e, j, r]
        state.queued[e, r] -= state.demand[e, j, r]
    if end <= cluster.tick + RELEASE_HORIZON:
        server.releasing += state.demand[e, j, 0]
    elif end < state.ending.shape[1]:
        job.next_ending = state.ending[e, end]
        state.ending[e, end] = j
    cluster.cpu_used += state.demand[e, j, 0]
    cluster.started += 1
    cluster.num_running += 1
    _refresh_power(rules, fleet, state, e, n)


@part
def _toggle(rules, fleet, state, e, n):  # type: ignore[no-untyped-def]
    """Put server n to sleep, or wake it; return its new mode."""
    cluster = state.clusters[e]
    server = state.servers[e, n]
    if server.mode == ACTIVE:
        server.mode = ASLEEP
        cluster.sleep_requests += 1
        cluster.num_awake -= 1
    else:
        cluster.wake_requests += 1
        cluster.num_awake += 1
        if cluster.wake_delay_ticks == 0:
            server.mode = ACTIVE
            server.idle_since = cluster.tick
        else:
            server.mode = WAKING
            server.wake_left = cluster.wake_delay_ticks
    _refresh_power(rules, fleet, state, e, n)
    return server.mode


@part
def _end_tick(rules, fleet, scales, state, seen, e, out):  # type: ignore[no-untyped-def]
    """Pay for the tick, then move to the next one."""
    cluster = state.clusters[e]
    num_servers = state.servers.shape[1]
    cluster.energy_j += cluster.power_w * rules.tick_s
    cluster.cpu_ticks += cluster.cpu_used
    cluster.awake_ticks += cluster.num_awake

    num_late = _pass_deadlines(rules, state, e)
    cluster.num_late = num_late
    cluster.late_job_ticks += num_late
    out.reward[e] -= (
        rules.alpha * cluster.power_w / rules.total_max_w
        + rules.beta * cluster.new_violations / num_servers
        + rules.late_penalty * num_late / num_servers
    )
    out.cost[e] = cluster.new_violations + rules.cost_late_rate * num_late
    cluster.new_violations = 0

    cluster.tick += 1
    cluster.decisions_in_tick = 0
    now = cluster.tick
    for n in range(num_servers):
        server = state.servers[e, n]
        if server.next_end == now:
            _complete(rules, fleet, state, e, n)
            _show_load(scales, state, seen, e, n)
        elif server.mode == WAKING:
            server.wake_left -= 1
            if server.wake_left == 0:
                server.mode = ACTIVE
                server.idle_since = now
                _refresh_power(rules, fleet, state, e, n)
            _show_mode(scales, state, seen, e, n)
    _foresee_releases(scales, state, seen, e)
    if now < rules.episode_ticks:
        _arrive(rules, fleet, state, e)


@part
def _pass_deadlines(rules, state, e):  # type: ignore[no-untyped-def]
    """Count this tick's violations, drop expired jobs if so ruled; return how many stay late."""
    cluster = state.clusters[e]
    end = cluster.queue_head + cluster.queue_length
    num_late = cluster.num_late
    if rules.is_laxity_order:
        # Late jobs come first in the queue; those that are due now stand right behind them.
        due = cluster.queue_head + num_late
        while due < end and state.jobs[e, state.queue[e, due]].start_by == cluster.tick:
            due += 1
        num_due = due - cluster.queue_head - num_late
        if rules.drop_expired and num_due > 0:
            for i in range(due - num_due, due):
                _forget(state, e, state.queue[e, i])
            for i in range(due - 1, cluster.queue_head + num_due - 1, -1):
                state.queue[e, i] = state.queue[e, i - num_due]
            cluster.queue_head += num_due
        else:
            num_late += num_due
    else:
        num_due = 0
        num_late = 0
        kept = cluster.queue_head
        for i in range(cluster.queue_head, end):
            j = state.queue[e, i]
            start_by = state.jobs[e, j].start_by
            num_due += start_by == cluster.tick
            if rules.drop_expired and start_by == cluster.tick:
                _forget(state, e, j)
                continue
            num_late += start_by <= cluster.tick
            state.queue[e, kept] = j
            kept += 1
    cluster.violations += num_due
    cluster.new_violations += num_due
    return num_late


@part
def _forget(state, e, j):  # type: ignore[no-untyped-def]
    """Count job j, which leaves the queue without a start."""
    cluster = state.clusters[e]
    cluster.dropped += 1
    cluster.queue_length -= 1
    for r in range(state.demand.shape[2]):
        state.queued[e, r] -= state.demand[e, j, r]


@part
def _complete(rules, fleet, state, e, n):  # type: ignore[no-untyped-def]
    """End the jobs of server n that are due now."""
    cluster = state.clusters[e]
    server = state.servers[e, n]
    now = cluster.tick
    server.next_end = NEVER
    previous = NONE
    j = server.first_running
    while j != NONE:
        job = state.jobs[e, j]
        following = job.next_running
        end = job.start + job.duration
        if end == now:
            for r in range(state.demand.shape[2]):
                state.free[e, n, r] += state.demand[e, j, r]
            cluster.cpu_used -= state.demand[e, j, 0]
            server.releasing -= state.demand[e, j, 0]
            cluster.completed += 1
            cluster.num_running -= 1
            server.num_running -= 1
            if previous == NONE:
                server.first_running = following
            else:
                state.jobs[e, previous].next_running = following
        else:
            server.next_end = min(server.next_end, end)
            previous = j
        j = following
    if server.num_running == 0:
        server.idle_since = now
    _refresh_power(rules, fleet, state, e, n)


@part
def _foresee_releases(scales, state, seen, e):  # type: ignore[no-untyped-def]
    """Add the jobs whose end has just come into the horizon to what their servers release."""
    j = state.ending[e, state.clusters[e].tick + RELEASE_HORIZON]
    while j != NONE:
        job = state.jobs[e, j]
        state.servers[e, job.server].releasing += state.demand[e, j, 0]
        _show_load(scales, state, seen, e, job.server)
        j = job.next_ending


@part
def _arrive(rules, fleet, state, e):  # type: ignore[no-untyped-def]
    """Queue or reject the jobs of this tick, and update the arrival rates."""
    cluster = state.clusters[e]
    num_servers = fleet.capacity.shape[0]
    num_arrivals = 0
    work = 0.0
    while cluster.next_job < cluster.num_jobs:
        j = cluster.next_job
        job = state.jobs[e, j]
        if job.arrival > cluster.tick:
            break
        cluster.next_job += 1
        num_arrivals += 1
        work += state.demand[e, j, 0] * job.duration
        is_placeable = False
        for n in range(num_servers):
            if _fits_empty(fleet, state, e, j, n):
                is_placeable = True
                break
        if is_placeable and cluster.queue_length < rules.queue_capacity:
            _enqueue(rules, state, e, j)
        else:
            cluster.rejected += 1
            cluster.violations += 1
            cluster.new_violations += 1
            if not is_placeable:
                cluster.unplaceable += 1
    cluster.arrived += num_arrivals
    plain_gain = 1.0 / (cluster.tick + 1)
    for h in range(NUM_HORIZONS):
        # A plain mean until a horizon has passed, exponential forgetting from then on.
        gain = max(1.0 / RATE_HORIZONS[h], plain_gain)
        cluster.arrival_rate[h] += gain * (num_arrivals - cluster.arrival_rate[h])
        cluster.work_rate[h] += gain * (work - cluster.work_rate[h])
    cluster.work_square += gain * (work * work - cluster.work_square)  # the slowest gain


@part
def _enqueue(rules, state, e, j):  # type: ignore[no-untyped-def]
    """Insert job j in window order, behind its equals."""
    cluster = state.clusters[e]
    if cluster.queue_head + cluster.queue_length == state.queue.shape[1]:
        for i in range(cluster.queue_length):
            state.queue[e, i] = state.queue[e, cluster.queue_head + i]
        cluster.queue_head = 0
    i = cluster.queue_head + cluster.queue_length
    if rules.is_laxity_order:
        start_by = state.jobs[e, j].start_by
        while i > cluster.queue_head:
            before = state.queue[e, i - 1]
            if state.jobs[e, before].start_by <= start_by:
                break
            state.queue[e, i] = before
            i -= 1
    state.queue[e, i] = j
    cluster.queue_length += 1
    for r in range(state.demand.shape[2]):
        state.queued[e, r] += state.demand[e, j, r]


@kernel
def load_snapshots(
    all_rules: NDArray[np.void],
    fleet: FleetArrays,
    state: ClusterState,
    given: Snapshots,
) -> None:
    """Put the first S clusters, which have just been reset without jobs, into given states.

    Jobs get onto servers and into the queue by the same steps as in an episode.
    """
    rules = all_rules[0]
    num_servers, num_resources = fleet.capacity.shape
    row = 0
    for e in range(given.tick.shape[0]):
        cluster = state.clusters[e]
        cluster.tick = given.tick[e]
        cluster.time_of_day_s = given.time_of_day_s[e] - cluster.tick * rules.tick_s
        cluster.num_awake = 0
        num_running, num_queued, num_arriving = given.job_counts[e]
        cluster.num_jobs = num_running + num_queued + num_arriving
        cluster.next_job = num_running + num_queued
        for n in range(num_servers):
            state.servers[e, n].idle_since = cluster.tick - given.servers[e, n, 2]
        for j in range(cluster.num_jobs):
            job = state.jobs[e, j]
            job.start = NONE
            job.server = NONE
            job.next_running = NONE
            job.next_ending = NONE
            job.duration = given.jobs[row, 1]
            job.arrival = cluster.tick - given.jobs[row, 2]
            job.start_by = NEVER
            if given.jobs[row, 3] < NEVER:
                job.start_by = cluster.tick + given.jobs[row, 3]
            for r in range(num_resources):
                state.demand[e, j, r] = given.demand[row, r]
            if j < cluster.next_job:
                _enqueue(rules, state, e, j)
            if j < num_running:
                _place(rules, fleet, state, e, 0, given.jobs[row, 0])
            elif j < cluster.next_job:
                cluster.num_late += job.start_by < cluster.tick
            else:
                job.arrival = cluster.tick + 1
            row += 1
        for n in range(num_servers):
            server = state.servers[e, n]
            server.mode = given.servers[e, n, 0]
            server.wake_left = given.servers[e, n, 1]
            cluster.num_awake += server.mode != ASLEEP
            if server.mode != ACTIVE:
                _refresh_power(rules, fleet, state, e, n)
        for h in range(NUM_HORIZONS):
            cluster.arrival_rate[h] = given.context[e, h]
            cluster.work_rate[h] = given.context[e, NUM_HORIZONS + h]
        cluster.work_square = given.context[e, 2 * NUM_HORIZONS]
        cluster.wake_delay_ticks = given.wake_delay[e]
        cluster.decisions_in_tick = given.decisions_in_tick[e]
        cluster.started = 0


@part
def _show_placement(rules, scales, state, seen, e, k, n):  # type: ignore[no-untyped-def]
    """The job in slot k has started on server n."""
    num_servers = state.servers.shape[1]
    num_slots = rules.visible_jobs
    # The jobs behind the placed one move up a slot; one comes into view, or a slot becomes empty.
    last = min(num_slots - 1, state.clusters[e].queue_length)
    for a in range(k * num_servers, last * num_servers):
        seen.action_mask[e, a] = seen.action_mask[e, a + num_servers]
    for slot in range(k, last):
        for f in range(seen.jobs.shape[2]):
            seen.jobs[e, slot, f] = seen.jobs[e, slot + 1, f]
    _show_slot(scales, state, seen, e, last)
    _show_load(scales, state, seen, e, n)
    _show_times(scales, state, seen, e, n)
    _show_choices(rules, state, seen, e, n)
    _show_queue(scales, state, seen, e)
    _show_power(rules, state, seen, e)


@part
def _show_toggle(rules, scales, state, seen, e, n):  # type: ignore[no-untyped-def]
    """Server n has been put to sleep or woken."""
    _show_mode(scales, state, seen, e, n)
    _show_times(scales, state, seen, e, n)
    _show_choices(rules, state, seen, e, n)
    _show_power(rules, state, seen, e)


@part
def _show_tick(rules, scales, state, seen, e):  # type: ignore[no-untyped-def]
    """A tick has begun; what its events did to single servers has been shown with them."""
    num_servers = state.servers.shape[1]
    num_slots = rules.visible_jobs
    toggles = num_slots * num_servers
    for n in range(num_servers):
        _show_times(scales, state, seen, e, n)
    if rules.sleep:
        for n in range(num_servers):
            seen.action_mask[e, toggles + n] = _can_toggle(state.servers[e, n])
    for k in range(num_slots):
        _show_slot(scales, state, seen, e, k)
    _show_wait(rules, state, seen, e)
    _show_queue(scales, state, seen, e)
    _show_arrivals(rules, scales, state, seen, e)
    _show_power(rules, state, seen, e)


@part
def _squash(value, scale):  # type: ignore[no-untyped-def]
    return value / (abs(value) + scale)


@part
def _squash_whole(scales, row, value):  # type: ignore[no-untyped-def]
    """Squash a whole number of at least 0: read it from the table, if it is not too large."""
    if value < SQUASHED_LENGTH:
        return scales.squashed[row, value]
    return np.float32(value / (value + scales.squash_scale[row]))


@part
def _show_load(scales, state, seen, e, n):  # type: ignore[no-untyped-def]
    """Write the features of server n that change with its jobs."""
    server = state.servers[e, n]
    num_resources = state.free.shape[2]
    for r in range(num_resources):
        seen.servers[e, n, r] = state.free[e, n, r] / scales.capacity[0, r]
    f = 2 * num_resources
    seen.servers[e, n, f + 7] = _squash_whole(scales, SQUASH_RUNNING, server.num_running)
    seen.servers[e, n, f + 11] = server.releasing / scales.capacity[0, 0]


@part
def _show_mode(scales, state, seen, e, n):  # type: ignore[no-untyped-def]
    """Write the features of server n that change as it sleeps and wakes."""
    server = state.servers[e, n]
    f = 2 * state.free.shape[2]
    seen.servers[e, n, f + 3] = server.mode == ACTIVE
    seen.servers[e, n, f + 4] = server.mode == WAKING
    seen.servers[e, n, f + 5] = server.mode == ASLEEP
    seen.servers[e, n, f + 6] = _squash_whole(scales, SQUASH_WAKE, server.wake_left)


@part
def _show_times(scales, state, seen, e, n):  # type: ignore[no-untyped-def]
    """Write the features of server n that change with every tick."""
    server = state.servers[e, n]
    now = state.clusters[e].tick
    # Products with 0 or 1 instead of branches.
    is_busy = np.int64(server.num_running > 0)
    is_idle = np.int64(server.mode == ACTIVE) * (1 - is_busy)
    to_next = is_busy * (server.next_end - now)
    to_last = is_busy * max(0, server.last_end - now)
    idle = is_idle * (now - server.idle_since)
    f = 2 * state.free.shape[2]
    seen.servers[e, n, f + 8] = _squash_whole(scales, SQUASH_TIME, to_next)
    seen.servers[e, n, f + 9] = _squash_whole(scales, SQUASH_TIME, to_last)
    seen.servers[e, n, f + 10] = _squash_whole(scales, SQUASH_TIME, idle)


@part
def _show_slot(scales, state, seen, e, k):  # type: ignore[no-untyped-def]
    """Write the features of the job in slot k, and on which servers it may start."""
    cluster = state.clusters[e]
    num_servers, num_resources = state.free.shape[1], state.free.shape[2]
    first = k * num_servers
    if k >= cluster.queue_length:
        if seen.jobs[e, k, num_resources + 3] != 0.0:  # else it is shown as empty already
            for f in range(seen.jobs.shape[2]):
                seen.jobs[e, k, f] = 0.0
            for n in range(num_servers):
                seen.action_mask[e, first + n] = 0
        return
    j = state.queue[e, cluster.queue_head + k]
    job = state.jobs[e, j]
    now = cluster.tick
    for r in range(num_resources):
        share = state.demand[e, j, r] / scales.capacity[0, r]
        seen.jobs[e, k, r] = min(1.0, share)
    f = num_resources
    seen.jobs[e, k, f] = _squash_whole(scales, SQUASH_TIME, job.duration)
    seen.jobs[e, k, f + 1] = _squash_whole(scales, SQUASH_TIME, now - job.arrival)
    if job.start_by == NEVER:
        seen.jobs[e, k, f + 2] = 1.0
    elif job.start_by >= now:
        seen.jobs[e, k, f + 2] = _squash_whole(scales, SQUASH_TIME, job.start_by - now)
    else:
        seen.jobs[e, k, f + 2] = -_squash_whole(scales, SQUASH_TIME, now - job.start_by)
    seen.jobs[e, k, f + 3] = 1.0
    for n in range(num_servers):
        seen.action_mask[e, first + n] = _can_start(state, e, j, n)


@part
def _show_choices(rules, state, seen, e, n):  # type: ignore[no-untyped-def]
    """Write which actions server n allows."""
    cluster = state.clusters[e]
    num_servers = state.servers.shape[1]
    num_slots = rules.visible_jobs
    for k in range(min(num_slots, cluster.queue_length)):
        j = state.queue[e, cluster.queue_head + k]
        seen.action_mask[e, k * num_servers + n] = _can_start(state, e, j, n)
    if rules.sleep:
        toggle = num_slots * num_servers + n
        seen.action_mask[e, toggle] = _can_toggle(state.servers[e, n])
    _show_wait(rules, state, seen, e)


@part
def _show_wait(rules, state, seen, e):  # type: ignore[no-untyped-def]
    """Write whether waiting is legal."""
    wait = seen.action_mask.shape[1] - 1
    seen.action_mask[e, wait] = 1
    if rules.wait_only_when_stuck:
        for a in range(rules.visible_jobs * state.servers.shape[1]):
            if seen.action_mask[e, a] != 0:
                seen.action_mask[e, wait] = 0
                break


@part
def _can_start(state, e, j, n):  # type: ignore[no-untyped-def]
    """Return 1 if job j may start on server n now, else 0: the one rule for placements."""
    fits = np.int8(state.servers[e, n].mode == ACTIVE)
    for r in range(state.free.shape[2]):
        fits &= np.int8(state.demand[e, j, r] <= state.free[e, n, r])
    return fits


@part
def _can_toggle(server):  # type: ignore[no-untyped-def]
    """Return 1 if a server may be put to sleep or woken now, else 0."""
    is_idle = np.int8(server.mode == ACTIVE) & np.int8(server.num_running == 0)
    return is_idle | np.int8(server.mode == ASLEEP)


@part
def _show_queue(scales, state, seen, e):  # type: ignore[no-untyped-def]
    cluster = state.clusters[e]
    num_resources = state.free.shape[2]
    seen.context[e, 0] = _squash_whole(scales, SQUASH_BY_FLEET, cluster.queue_length)
    for r in range(num_resources):
        seen.context[e, 1 + r] = _squash(state.queued[e, r] / scales.capacity[1, r], 1.0)
    late = _squash_whole(scales, SQUASH_BY_FLEET, cluster.num_late)
    seen.context[e, num_resources + 13] = late


@part
def _show_arrivals(rules, scales, state, seen, e):  # type: ignore[no-untyped-def]
    """Write the rates of arrivals and the time of day."""
    cluster = state.clusters[e]
    num_servers = float(state.servers.shape[1])
    f = state.free.shape[2] + 1
    for h in range(NUM_HORIZONS):
        seen.context[e, f + h] = _squash(cluster.arrival_rate[h], num_servers)
        work = cluster.work_rate[h] / scales.capacity[1, 0]
        seen.context[e, f + NUM_HORIZONS + h] = _squash(work, 1.0)
    work = math.sqrt(cluster.work_square) / scales.capacity[1, 0]
    seen.context[e, f + 13] = _squash(work, 1.0)
    time_s = cluster.time_of_day_s + cluster.tick * (rules.tick_s + cluster.day_gain_s)
    angle = 2.0 * math.pi * ((time_s / DAY_S) % 1.0)
    seen.context[e, f + 2 * NUM_HORIZONS] = math.sin(angle)
    seen.context[e, f + 2 * NUM_HORIZONS + 1] = math.cos(angle)


@part
def _show_power(rules, state, seen, e):  # type: ignore[no-untyped-def]
    """Write the servers awake, their power, and the decisions taken in this tick."""
    cluster = state.clusters[e]
    f = state.free.shape[2] + 9
    seen.context[e, f] = cluster.num_awake / float(state.servers.shape[1])
    seen.context[e, f + 1] = min(1.0, cluster.power_w / rules.total_max_w)
    seen.context[e, f + 2] = cluster.decisions_in_tick / rules.decisions_per_tick
