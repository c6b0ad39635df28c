"""The dynamics of the cluster: compiled loops over E clusters.

A step is one decision. Placements and toggles take no time; `wait`, an illegal action, or the last
decision that a tick allows ends the tick, in this order:

1. the tick's energy is charged at the power after all decisions;
2. queued jobs whose `start_by` is this tick become violations (and leave, if so ruled);
3. late jobs still in the queue are counted;
4. reward and cost are paid;
5. time moves on: jobs complete, waking servers come up, the next tick's jobs arrive.

Kernels allocate nothing, draw nothing and raise nothing. They share this file because numba's cache
does not notice a change in another one. The naive twin is `cloudsched.sim.reference`.
"""

from __future__ import annotations

import math

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
    PLACED,
    RATE_HORIZONS,
    RELEASE_HORIZON,
    TICKED,
    TOGGLED,
    UNCHANGED,
    WAKING,
    ClusterState,
    StepResult,
)

INVERSE_GRID = 1.0 / GRID
NUM_HORIZONS = len(RATE_HORIZONS)


@njit(inline="always")
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
            watts = power.idle_w + (power.max_w - power.idle_w) * load**power.exponent
        else:
            position = load * 10.0
            left = min(int(position), 9)
            watts_left = fleet.curve_w[n, left]
            watts = watts_left + (fleet.curve_w[n, left + 1] - watts_left) * (position - left)
    return math.floor(watts * INVERSE_GRID + 0.5) * GRID


@njit(cache=True, nogil=True, error_model="numpy")
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


@njit(inline="always")
def _refresh_power(rules, fleet, state, e, n):  # type: ignore[no-untyped-def]
    cluster = state.clusters[e]
    server = state.servers[e, n]
    watts = server_power(rules, fleet, n, server.mode, state.free[e, n, 0])
    cluster.power_w += watts - server.power_w
    server.power_w = watts


@njit(inline="always")
def _fits_empty(fleet, state, e, j, n):  # type: ignore[no-untyped-def]
    """Return whether job j could run on server n if nothing else did."""
    for r in range(state.demand.shape[2]):
        if state.demand[e, j, r] > fleet.capacity[n, r]:
            return False
    return True


@njit(cache=True, nogil=True, error_model="numpy")
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
        cluster.new_violations = 0
        for h in range(NUM_HORIZONS):
            cluster.arrival_rate[h] = 0.0
            cluster.work_rate[h] = 0.0
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
        cluster.change = TICKED


@njit(cache=True, nogil=True, error_model="numpy")
def step_clusters(
    all_rules: NDArray[np.void],
    fleet: FleetArrays,
    state: ClusterState,
    mask: NDArray[np.int8],
    actions: NDArray[np.int64],
    out: StepResult,
) -> None:
    """Carry out one decision in each cluster and bring `mask` up to date.

    Args:
        mask: (E, A) what is legal before the step; overwritten with what is legal after it.
        actions: (E,) any value; what the mask does not allow counts as illegal.
        out: overwritten.
    """
    rules = all_rules[0]
    num_envs, num_servers = state.servers.shape
    num_placements = rules.visible_jobs * num_servers
    wait = mask.shape[1] - 1
    for e in range(num_envs):
        cluster = state.clusters[e]
        out.reward[e] = 0.0
        out.cost[e] = 0.0
        out.elapsed_ticks[e] = 0
        out.is_truncated[e] = cluster.tick >= rules.episode_ticks
        cluster.change = UNCHANGED
        if cluster.tick >= rules.episode_ticks:
            continue
        action = actions[e]
        cluster.decisions += 1
        cluster.decisions_in_tick += 1
        is_legal = 0 <= action <= wait and mask[e, action] != 0
        if not is_legal:
            cluster.illegal += 1
            out.reward[e] -= rules.illegal_penalty
            action = wait
        if action < num_placements:
            _place(rules, fleet, state, e, action // num_servers, action % num_servers)
        elif action < wait:
            if _toggle(rules, fleet, state, e, action - num_placements) == ASLEEP:
                out.reward[e] -= rules.toggle_penalty * 15.0 / num_servers
        if action == wait or cluster.decisions_in_tick >= rules.decisions_per_tick:
            _end_tick(rules, fleet, state, e, out)
            out.elapsed_ticks[e] = 1
            out.is_truncated[e] = cluster.tick >= rules.episode_ticks
            cluster.change = TICKED
    update_mask(all_rules, state, mask)


@njit(cache=True, nogil=True, error_model="numpy")
def step_unpacked(all_rules, mask, actions, *arrays):  # type: ignore[no-untyped-def]
    """Call `step_clusters` with the arrays of fleet, state and result one after another.

    Numba takes loose arrays over from Python in a third of the time that tuples of them need,
    which at 64 clusters is a tenth of a step.
    """
    fleet = FleetArrays(arrays[0], arrays[1], arrays[2])
    state = ClusterState(
        arrays[3],
        arrays[4],
        arrays[5],
        arrays[6],
        arrays[7],
        arrays[8],
        arrays[9],
        arrays[10],
    )
    result = StepResult(arrays[11], arrays[12], arrays[13], arrays[14])
    step_clusters(all_rules, fleet, state, mask, actions, result)


@njit(cache=True, nogil=True, error_model="numpy")
def update_mask(all_rules: NDArray[np.void], state: ClusterState, mask: NDArray[np.int8]) -> None:
    """Bring the mask up to date with what the last step changed: the one rule of legality.

    Args:
        mask: (E, A) legal actions before the step; overwritten.
    """
    rules = all_rules[0]
    num_envs, num_servers = state.servers.shape
    num_slots = rules.visible_jobs
    toggles = num_slots * num_servers
    wait = mask.shape[1] - 1
    for e in range(num_envs):
        cluster = state.clusters[e]
        change = cluster.change
        if change == TICKED:
            for k in range(num_slots):
                _mask_slot(state, mask, e, k)
            if rules.sleep:
                for n in range(num_servers):
                    mask[e, toggles + n] = _can_toggle(state.servers[e, n])
        elif change == PLACED or change == TOGGLED:
            n = cluster.changed_server
            if change == PLACED:
                # The jobs behind the placed one move up a slot, and one comes into view.
                for a in range(cluster.changed_slot * num_servers, toggles - num_servers):
                    mask[e, a] = mask[e, a + num_servers]
                _mask_slot(state, mask, e, num_slots - 1)
            for k in range(num_slots):
                mask[e, k * num_servers + n] = _can_place(state, e, k, n)
            if rules.sleep:
                mask[e, toggles + n] = _can_toggle(state.servers[e, n])
        if change != UNCHANGED:
            mask[e, wait] = 1
            if rules.wait_only_when_stuck:
                for a in range(toggles):
                    if mask[e, a] != 0:
                        mask[e, wait] = 0
                        break


@njit(inline="always")
def _can_toggle(server):  # type: ignore[no-untyped-def]
    return np.int8(server.mode == ASLEEP or (server.mode == ACTIVE and server.num_running == 0))


@njit(inline="always")
def _can_place(state, e, k, n):  # type: ignore[no-untyped-def]
    cluster = state.clusters[e]
    if k >= cluster.queue_length or state.servers[e, n].mode != ACTIVE:
        return np.int8(0)
    j = state.queue[e, cluster.queue_head + k]
    for r in range(state.demand.shape[2]):
        if state.demand[e, j, r] > state.free[e, n, r]:
            return np.int8(0)
    return np.int8(1)


@njit(inline="always")
def _mask_slot(state, mask, e, k):  # type: ignore[no-untyped-def]
    """Write what slot k allows on every server."""
    num_servers = state.servers.shape[1]
    for n in range(num_servers):
        mask[e, k * num_servers + n] = _can_place(state, e, k, n)


@njit(inline="always")
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
    cluster.change = PLACED
    cluster.changed_slot = k
    cluster.changed_server = n


@njit(inline="always")
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
        if rules.wake_delay_ticks == 0:
            server.mode = ACTIVE
            server.idle_since = cluster.tick
        else:
            server.mode = WAKING
            server.wake_left = rules.wake_delay_ticks
    _refresh_power(rules, fleet, state, e, n)
    cluster.change = TOGGLED
    cluster.changed_server = n
    return server.mode


@njit(inline="always")
def _end_tick(rules, fleet, state, e, out):  # type: ignore[no-untyped-def]
    """Pay for the tick, then move to the next one."""
    cluster = state.clusters[e]
    num_servers = state.servers.shape[1]
    cluster.energy_j += cluster.power_w * rules.tick_s
    cluster.cpu_ticks += cluster.cpu_used
    cluster.awake_ticks += cluster.num_awake

    num_late = _pass_deadlines(rules, state, e)
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
        elif server.mode == WAKING:
            server.wake_left -= 1
            if server.wake_left == 0:
                server.mode = ACTIVE
                server.idle_since = now
                _refresh_power(rules, fleet, state, e, n)
    _foresee_releases(state, e)
    if now < rules.episode_ticks:
        _arrive(rules, fleet, state, e)


@njit(inline="always")
def _pass_deadlines(rules, state, e):  # type: ignore[no-untyped-def]
    """Count this tick's violations, drop expired jobs if so ruled; return how many stay late."""
    cluster = state.clusters[e]
    num_late = 0
    kept = cluster.queue_head
    for i in range(cluster.queue_head, cluster.queue_head + cluster.queue_length):
        j = state.queue[e, i]
        start_by = state.jobs[e, j].start_by
        if start_by == cluster.tick:
            cluster.violations += 1
            cluster.new_violations += 1
            if rules.drop_expired:
                cluster.dropped += 1
                for r in range(state.demand.shape[2]):
                    state.queued[e, r] -= state.demand[e, j, r]
                continue
        elif rules.is_laxity_order and start_by > cluster.tick:
            # Everything behind is due later still; only a drop moved anything.
            if kept == i:
                kept = cluster.queue_head + cluster.queue_length
                break
        if start_by <= cluster.tick:
            num_late += 1
        state.queue[e, kept] = j
        kept += 1
    cluster.queue_length = kept - cluster.queue_head
    return num_late


@njit(inline="always")
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


@njit(inline="always")
def _foresee_releases(state, e):  # type: ignore[no-untyped-def]
    """Add the jobs whose end has just come into the horizon to what their servers release."""
    j = state.ending[e, state.clusters[e].tick + RELEASE_HORIZON]
    while j != NONE:
        job = state.jobs[e, j]
        state.servers[e, job.server].releasing += state.demand[e, j, 0]
        j = job.next_ending


@njit(inline="always")
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
    for h in range(NUM_HORIZONS):
        # A plain mean until a horizon has passed, exponential forgetting from then on.
        gain = max(1.0 / RATE_HORIZONS[h], 1.0 / (cluster.tick + 1))
        cluster.arrival_rate[h] += gain * (num_arrivals - cluster.arrival_rate[h])
        cluster.work_rate[h] += gain * (work - cluster.work_rate[h])


@njit(inline="always")
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
