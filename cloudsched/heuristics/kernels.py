"""One compiled decision of a heuristic, read from observations and masks alone."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cloudsched.envs.observation import TIME_SCALE, Columns
from cloudsched.heuristics.parameters import HEADROOM, IDLE_TIMEOUT, UTILISATION_BAND

CURVE_STEPS = 64
ENERGY_SCALE = 1.0 / (300.0 * 30.0)  # brings watt-ticks to order one
POWER_SCALE = 1.0 / 300.0
RESERVE_RAMP = 10.0  # ticks of laxity over which a job comes to use what is kept in reserve


class FleetTable(NamedTuple):
    """What a heuristic knows of the fleet besides the observation."""

    curve_w: NDArray[np.float64]  # (N, CURVE_STEPS + 1) watts over load
    server_worth: NDArray[np.float64]  # (R,) what one mean server offers, in observation units
    dearness: NDArray[np.float64]  # (N,) as `dearness_of` has it


def dearness_of(full_w: NDArray[np.float64], cpu: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (N,) each server's place in the order of watts a CPU at full load, from 0 to 1.

    Args:
        full_w: (N,) watts at full load.
        cpu: (N,) capacity.
    """
    return np.argsort(np.argsort(full_w / cpu, kind="stable")) / len(cpu)


@njit(cache=True, nogil=True, error_model="numpy")
def decide(
    fleet: FleetTable,
    at: Columns,
    parameters: NDArray[np.void],
    servers: NDArray[np.float32],
    jobs: NDArray[np.float32],
    context: NDArray[np.float32],
    mask: NDArray[np.int8],
    last_server: NDArray[np.int64],
    out_actions: NDArray[np.int64],
) -> None:
    """Write one action for each cluster.

    Args:
        parameters: (E,) of PARAMETER_DTYPE, or (1,) for all clusters.
        last_server: (E,) the server that round robin used last; updated.
        out_actions: (E,) overwritten.
    """
    num_envs, num_servers = servers.shape[0], servers.shape[1]
    num_slots = jobs.shape[1]
    wait = mask.shape[1] - 1
    has_sleep = wait > num_slots * num_servers
    for e in range(num_envs):
        p = parameters[e if parameters.shape[0] > 1 else 0]
        action = _placement(fleet, at, p, servers, jobs, mask, last_server, e)
        if action < 0 and has_sleep:
            if p.sleep == HEADROOM:
                action = _headroom(fleet, at, p, servers, jobs, context, mask, e)
            elif p.sleep == IDLE_TIMEOUT:
                action = _idle_timeout(fleet, at, p, servers, jobs, context, mask, e)
            elif p.sleep == UTILISATION_BAND:
                action = _utilisation_band(fleet, at, p, servers, jobs, context, mask, e)
        if action < 0:
            action = wait
        elif action < num_slots * num_servers:
            last_server[e] = action % num_servers
        out_actions[e] = action


@njit(inline="always")
def _unsquash(value):  # type: ignore[no-untyped-def]
    """Return the ticks behind a squashed time; a deadline that never passes is very far."""
    if abs(value) >= 0.999999:
        return 1e9
    return math.floor(TIME_SCALE * value / (1.0 - abs(value)) + 0.5)


@njit(cache=True, error_model="numpy")
def _placement(fleet, at, p, servers, jobs, mask, last_server, e):  # type: ignore[no-untyped-def]
    """Return the placement to make now, or -1."""
    num_slots = jobs.shape[1]
    must_place = mask[e, mask.shape[1] - 1] == 0
    spare = _spare(fleet, at, servers, e) if p.reserve > 0.0 and not must_place else np.inf
    previous_key = -np.inf
    previous_slot = -1
    for _ in range(min(num_slots, int(p.scan_depth))):
        # The next job in order: the lowest key behind the previous one; slots break ties.
        slot = -1
        key = np.inf
        for k in range(num_slots):
            if jobs[e, k, jobs.shape[2] - 1] == 0.0:
                break
            candidate = _order_key(at, p, jobs, e, k)
            is_behind = candidate > previous_key or (
                candidate == previous_key and k > previous_slot
            )
            if is_behind and candidate < key:
                slot = k
                key = candidate
        if slot < 0:
            return -1
        previous_key = key
        previous_slot = slot
        leisure = _unsquash(jobs[e, slot, at.laxity]) - p.reserve_laxity
        if spare < p.reserve * min(1.0, leisure / RESERVE_RAMP):
            continue
        server = _best_server(fleet, at, p, servers, jobs, mask, last_server, e, slot, must_place)
        if server >= 0:
            return slot * servers.shape[1] + server
    if must_place:
        for a in range(num_slots * servers.shape[1]):
            if mask[e, a] != 0:
                return a
    return -1


@njit(cache=True, error_model="numpy")
def _spare(fleet, at, servers, e):  # type: ignore[no-untyped-def]
    """Return the free capacity of active servers in the scarcest resource, in servers' worth."""
    spare = np.inf
    for r in range(at.duration):
        free = 0.0
        for n in range(servers.shape[1]):
            free += servers[e, n, at.is_active] * servers[e, n, r]
        spare = min(spare, free / fleet.server_worth[r])
    return spare


@njit(inline="always")
def _order_key(at, p, jobs, e, k):  # type: ignore[no-untyped-def]
    num_resources = at.duration
    size = 0.0
    for r in range(num_resources):
        size += jobs[e, k, r]
    return (
        p.order_wait * _unsquash(jobs[e, k, at.wait])
        + p.order_duration * _unsquash(jobs[e, k, at.duration])
        + p.order_laxity * _unsquash(jobs[e, k, at.laxity])
        + p.order_size * size / num_resources
    )


@njit(cache=True, error_model="numpy")
def _best_server(fleet, at, p, servers, jobs, mask, last_server, e, k, must_place):  # type: ignore[no-untyped-def]
    """Return the legal server with the lowest score for the job in slot k, or -1."""
    num_servers = servers.shape[1]
    num_resources = at.duration
    duration = _unsquash(jobs[e, k, at.duration])
    is_held = _unsquash(jobs[e, k, at.laxity]) > p.hold_laxity and not must_place
    best = -1
    best_score = np.inf
    for n in range(num_servers):
        if mask[e, k * num_servers + n] == 0:
            continue
        to_last = _unsquash(servers[e, n, at.last_end])
        is_idle = to_last == 0.0
        if is_idle and is_held:
            continue
        leftover = 0.0
        alignment = 0.0
        for r in range(num_resources):
            leftover += servers[e, n, r] - jobs[e, k, r]
            alignment += servers[e, n, r] * jobs[e, k, r]
        capacity = servers[e, n, num_resources]
        load = 1.0 - servers[e, n, 0] / capacity
        watts = _watts(fleet, n, load + jobs[e, k, 0] / capacity) - _watts(fleet, n, load)
        extension = fleet.curve_w[n, 0] * max(0.0, duration - to_last)
        score = (
            p.place_index * n / num_servers
            + p.place_cycle * ((n - last_server[e] - 1) % num_servers) / num_servers
            + p.place_leftover * leftover / num_resources
            + p.place_alignment * alignment
            + p.place_power * watts * POWER_SCALE
            + p.place_energy * watts * duration * ENERGY_SCALE
            + p.place_extension * extension * ENERGY_SCALE
            + p.place_idle * is_idle
            + (p.place_dear + p.place_dear_long * jobs[e, k, at.duration]) * fleet.dearness[n]
        )
        if score < best_score:
            best = n
            best_score = score
    return best


@njit(inline="always")
def _watts(fleet, n, load):  # type: ignore[no-untyped-def]
    position = min(max(load, 0.0), 1.0) * CURVE_STEPS
    left = min(int(position), CURVE_STEPS - 1)
    watts = fleet.curve_w[n, left]
    return watts + (fleet.curve_w[n, left + 1] - watts) * (position - left)


@njit(inline="always")
def _rank(fleet, p, servers, at, n, e):  # type: ignore[no-untyped-def]
    """Return how dear server n's capacity is: the low ones wake first and sleep last."""
    watts = fleet.curve_w[n, CURVE_STEPS] + p.idle_bias * fleet.curve_w[n, 0]
    return watts / servers[e, n, at.duration]


@njit(cache=True, error_model="numpy")
def _cheapest_asleep(fleet, at, p, servers, mask, e):  # type: ignore[no-untyped-def]
    """Return the toggle that wakes the most efficient sleeping server, or -1."""
    num_servers = servers.shape[1]
    toggles = mask.shape[1] - 1 - num_servers
    best = -1
    best_rank = np.inf
    for n in range(num_servers):
        if servers[e, n, at.is_asleep] == 1.0:
            rank = _rank(fleet, p, servers, at, n, e)
            if rank < best_rank:
                best = toggles + n
                best_rank = rank
    return best


@njit(cache=True, error_model="numpy")
def _wake_for_stuck(fleet, at, p, servers, jobs, mask, e, max_laxity):  # type: ignore[no-untyped-def]
    """Return the toggle that wakes a server for a job that fits nowhere, or -1.

    Without this a job larger than every gap would wait for ever beside plenty of free capacity. One
    server wakes at a time, and only one that can hold the job when it comes up.
    """
    num_servers = servers.shape[1]
    num_resources = at.duration
    toggles = mask.shape[1] - 1 - num_servers
    for n in range(num_servers):
        if servers[e, n, at.is_waking] == 1.0:
            return -1
    for k in range(jobs.shape[1]):
        if jobs[e, k, jobs.shape[2] - 1] == 0.0:
            break
        if _unsquash(jobs[e, k, at.laxity]) > max_laxity:
            continue
        best = -1
        best_rank = np.inf
        for n in range(num_servers):
            if mask[e, k * num_servers + n] != 0:
                best = -1
                break
            is_candidate = servers[e, n, at.is_asleep] == 1.0
            for r in range(num_resources):
                is_candidate = is_candidate and jobs[e, k, r] <= servers[e, n, num_resources + r]
            if is_candidate:
                rank = _rank(fleet, p, servers, at, n, e)
                if rank < best_rank:
                    best = toggles + n
                    best_rank = rank
        if best >= 0:
            return best
    return -1


@njit(cache=True, error_model="numpy")
def _headroom(fleet, at, p, servers, jobs, context, mask, e):  # type: ignore[no-untyped-def]
    """Keep use + constant + square-root staffing awake, with hysteresis."""
    num_servers = servers.shape[1]
    num_resources = at.duration
    toggles = mask.shape[1] - 1 - num_servers
    # The least capacity beyond need over the resources, in servers' worth.
    surplus = np.inf
    for r in range(num_resources):
        worth = fleet.server_worth[r]
        used = 0.0
        awake = 0.0
        releasing = 0.0
        for n in range(num_servers):
            if servers[e, n, at.is_asleep] == 0.0:
                capacity = servers[e, n, num_resources + r]
                awake += capacity / worth
                used += (capacity - servers[e, n, r]) / worth
                releasing += servers[e, n, at.releasing] / fleet.server_worth[0]
        queued = context[e, at.queued + r]
        queued = num_servers * queued / (1.0 - min(queued, 0.999999))
        urgent = 0.0
        for k in range(jobs.shape[1]):
            if _unsquash(jobs[e, k, at.laxity]) <= p.urgent_ticks:
                urgent += jobs[e, k, r] / worth
        fast = _rate(context, at, e, 0) * num_servers
        middle = _rate(context, at, e, 1) * num_servers
        slow = _rate(context, at, e, 2) * num_servers
        need = (
            used
            + p.headroom_constant
            + p.headroom_root * math.sqrt(max(used, 0.0))
            + p.headroom_queued * queued
            + p.headroom_urgent * urgent
            + p.headroom_rate * (middle - used)
            + p.headroom_trend * (fast - slow)
            - p.headroom_release * releasing
        )
        surplus = min(surplus, awake - need)
    if surplus < 0.0:
        return _cheapest_asleep(fleet, at, p, servers, mask, e)
    best = _wake_for_stuck(fleet, at, p, servers, jobs, mask, e, p.urgent_ticks)
    if best >= 0:
        return best
    best_rank = -np.inf
    for n in range(num_servers):
        if servers[e, n, at.is_active] == 0.0 or mask[e, toggles + n] == 0:
            continue
        if _unsquash(servers[e, n, at.idle_ticks]) < p.min_idle_ticks:
            continue
        largest = 0.0
        for r in range(num_resources):
            largest = max(largest, servers[e, n, num_resources + r] / fleet.server_worth[r])
        rank = _rank(fleet, p, servers, at, n, e)
        if surplus - largest >= max(p.hysteresis, 0.0) and rank > best_rank:
            best = toggles + n
            best_rank = rank
    return best


@njit(inline="always")
def _rate(context, at, e, h):  # type: ignore[no-untyped-def]
    """Return the work arriving a tick over horizon h, as a share of the fleet's CPU."""
    squashed = context[e, at.work_rate + h]
    return squashed / (1.0 - min(squashed, 0.999999))


@njit(cache=True, error_model="numpy")
def _idle_timeout(fleet, at, p, servers, jobs, context, mask, e):  # type: ignore[no-untyped-def]
    """Wake for jobs that wait; put a server to sleep after a timeout, but keep some spare."""
    num_servers = servers.shape[1]
    toggles = mask.shape[1] - 1 - num_servers
    waking = 0.0
    num_idle = 0
    for n in range(num_servers):
        if servers[e, n, at.is_waking] == 1.0:
            waking += servers[e, n, at.duration] / fleet.server_worth[0]
            num_idle += 1
        elif servers[e, n, at.is_active] == 1.0 and mask[e, toggles + n] != 0:
            num_idle += 1
    queued = context[e, at.queued]
    queued = num_servers * queued / (1.0 - min(queued, 0.999999))
    if (context[e, 0] > 0.0 and queued > waking) or num_idle < p.spare_servers:
        return _cheapest_asleep(fleet, at, p, servers, mask, e)
    best = _wake_for_stuck(fleet, at, p, servers, jobs, mask, e, np.inf)
    if best >= 0 or num_idle <= p.spare_servers:
        return best
    best_rank = -np.inf
    for n in range(num_servers):
        if servers[e, n, at.is_active] == 1.0 and mask[e, toggles + n] != 0:
            rank = _rank(fleet, p, servers, at, n, e)
            if _unsquash(servers[e, n, at.idle_ticks]) >= p.timeout_ticks and rank > best_rank:
                best = toggles + n
                best_rank = rank
    return best


@njit(cache=True, error_model="numpy")
def _utilisation_band(fleet, at, p, servers, jobs, context, mask, e):  # type: ignore[no-untyped-def]
    """Keep the use of the awake capacity between two marks."""
    num_servers = servers.shape[1]
    num_resources = at.duration
    toggles = mask.shape[1] - 1 - num_servers
    awake = 0.0
    used = 0.0
    for n in range(num_servers):
        if servers[e, n, at.is_asleep] == 0.0:
            awake += servers[e, n, num_resources]
            used += servers[e, n, num_resources] - servers[e, n, 0]
    queued = context[e, at.queued]
    wanted = used + num_servers * fleet.server_worth[0] * queued / (1.0 - min(queued, 0.999999))
    if wanted > p.band_high * awake:
        return _cheapest_asleep(fleet, at, p, servers, mask, e)
    best = _wake_for_stuck(fleet, at, p, servers, jobs, mask, e, np.inf)
    if best >= 0 or used >= p.band_low * awake:
        return best
    best_rank = -np.inf
    for n in range(num_servers):
        left = awake - servers[e, n, num_resources]
        if servers[e, n, at.is_active] == 1.0 and mask[e, toggles + n] != 0:
            rank = _rank(fleet, p, servers, at, n, e)
            if wanted <= p.band_high * left and rank > best_rank:
                best = toggles + n
                best_rank = rank
    return best
