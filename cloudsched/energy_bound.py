"""A lower bound on energy: no schedule that gives the same service can use less.

*Same service*: it starts in time every job that this episode started in time, and does at least as
much CPU work by the end. The bound relaxes everything else. Jobs may be cut into any pieces, paused
and moved for free; memory does not bind; servers sleep and wake in no time. What remains is one
curve: the cumulative CPU work C(t), which

- is at most H(t), the work done if every job started on arrival,
- is at least L(t), the work done if every job that was in time started at its deadline,
- ends at the work that was done.

The least power at which a fleet can run load U is at least f(U), the convex envelope of its power
curves with sleep. For convex f the cheapest C is the taut string between L and H, whatever f is, so
the bound is the sum of f over the string's slopes. The schedule that was measured is itself one of
those C, hence its energy is never below the bound.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cloudsched.sim.engine import ClusterEngine
from cloudsched.sim.fleet import Fleet
from cloudsched.sim.jobs import GRID
from cloudsched.sim.state import NONE

NUM_TANGENTS = 256


def energy_bound_j(engine: ClusterEngine, e: int) -> float:
    """Return the bound for what cluster e has done so far, in joules."""
    ticks = int(engine.state.clusters["tick"][e])
    if ticks == 0:
        return 0.0
    lowest, highest = work_tube(engine, e)
    load = taut_string(lowest, highest)
    config = engine.config
    # A server that is always waking may draw even less than one that sleeps.
    lowest_factor = min(config.standby_factor, config.wake_power_factor) if config.sleep else 1.0
    loads, watts = power_envelope(engine.fleet, lowest_factor)
    return float(np.interp(load, loads, watts).sum() * config.tick_s)


def work_tube(engine: ClusterEngine, e: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return L and H, (T + 1,) each: the least and most CPU work done by the start of each tick."""
    cluster = engine.state.clusters[e]
    ticks, arrived = int(cluster["tick"]), int(cluster["arrived"])
    change = np.zeros((3, ticks + 1))
    _cpu_changes(engine.state.jobs[e, :arrived], engine.state.demand[e, :arrived, 0], change)
    work = np.zeros((3, ticks + 1))
    work[:, 1:] = np.cumsum(np.cumsum(change[:, :ticks], axis=1), axis=1)
    lowest, highest, done = work
    lowest[-1] = done[-1]
    return lowest, np.minimum(highest, done[-1])


@njit(cache=True)
def _cpu_changes(
    jobs: NDArray[np.void], cpu: NDArray[np.float64], out_change: NDArray[np.float64]
) -> None:
    """Add each job's CPU where it begins to run and take it off where it ends.

    Args:
        out_change: (3, T + 1) for jobs in time starting at their deadline, for all jobs starting on
            arrival, and for started jobs as they ran; the last column takes what lies beyond.
    """
    last = out_change.shape[1] - 1
    for j in range(jobs.shape[0]):
        job = jobs[j]
        out_change[1, min(job.arrival, last)] += cpu[j]
        out_change[1, min(job.arrival + job.duration, last)] -= cpu[j]
        if job.start != NONE:
            out_change[2, min(job.start, last)] += cpu[j]
            out_change[2, min(job.start + job.duration, last)] -= cpu[j]
            if job.start <= job.start_by:
                out_change[0, min(job.start_by, last)] += cpu[j]
                out_change[0, min(np.int64(job.start_by) + job.duration, last)] -= cpu[j]


@njit(cache=True)
def taut_string(lowest: NDArray[np.float64], highest: NDArray[np.float64]) -> NDArray[np.float64]:
    """(T,) slopes of the shortest curve from 0 that stays between `lowest` and `highest`.

    Args:
        lowest: (T + 1,) not above `highest`; both end at the same value.
    """
    ticks = len(lowest) - 1
    slope = np.zeros(ticks)
    here, height = 0, 0.0
    while here < ticks:
        low_slope, high_slope = -np.inf, np.inf
        low_at, high_at = here, here
        knot, knot_height = ticks, highest[ticks]
        for t in range(here + 1, ticks + 1):
            to_low = (lowest[t] - height) / (t - here)
            to_high = (highest[t] - height) / (t - here)
            if to_low > high_slope:
                knot, knot_height = high_at, highest[high_at]
                break
            if to_high < low_slope:
                knot, knot_height = low_at, lowest[low_at]
                break
            if to_low >= low_slope:
                low_slope, low_at = to_low, t
            if to_high <= high_slope:
                high_slope, high_at = to_high, t
        slope[here:knot] = (knot_height - height) / (knot - here)
        here, height = knot, knot_height
    return slope


@lru_cache(maxsize=16)
def power_envelope(
    fleet: Fleet, standby_factor: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the corners of f: loads (rising from 0) and the watts that none can undercut there.

    Each server's curve becomes its convex envelope together with the point "asleep"; the cheapest
    way to share a load takes the pieces of all servers in the order of their slope.
    """
    lengths, slopes, standby_w = [], [], 0.0
    for n in range(fleet.num_servers):
        load, watts = _below_curve(fleet, n)
        watts[0] = min(watts[0], standby_factor * fleet.idle_w[n])
        load, watts = _lower_hull(load, watts)
        standby_w += watts[0]
        lengths.append(np.diff(load) * fleet.capacity[n, 0])
        slopes.append(np.diff(watts) / lengths[-1])
    length, slope = np.concatenate(lengths), np.concatenate(slopes)
    order = np.argsort(slope, kind="stable")
    loads = np.concatenate([[0.0], np.cumsum(length[order])])
    rise = np.concatenate([[0.0], np.cumsum((length * slope)[order])])
    # The simulator rounds each server's watts to the grid.
    return loads, standby_w + rise - fleet.num_servers * GRID


def _below_curve(fleet: Fleet, n: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return corners of a piecewise linear curve that is nowhere above server n's power."""
    exponent = fleet.exponent[n]
    if exponent == 0.0:
        return np.linspace(0.0, 1.0, fleet.curve_w.shape[1]), fleet.curve_w[n].copy()
    span = fleet.max_w[n] - fleet.idle_w[n]
    ends = np.array([0.0, 1.0])
    if exponent <= 1.0:
        return ends, fleet.idle_w[n] + span * ends  # concave: above the chord between its ends
    # Convex: above each of its tangents. Corners are where neighbouring tangents meet.
    at = np.linspace(0.0, 1.0, NUM_TANGENTS)
    value, slope = at**exponent, exponent * at ** (exponent - 1.0)
    intercept = value - slope * at
    corner = -np.diff(intercept) / np.diff(slope)
    corner_value = slope[:-1] * corner + intercept[:-1]
    load = np.concatenate([[0.0], corner, [1.0]])
    return load, fleet.idle_w[n] + span * np.concatenate([[0.0], corner_value, [1.0]])


def _lower_hull(
    x: NDArray[np.float64], y: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the corners of the lower convex hull of points sorted by x."""
    kept: list[int] = []
    for i in range(len(x)):
        while len(kept) >= 2:
            a, b = kept[-2], kept[-1]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(i)
    return x[kept], y[kept]
