"""The one rule by which every workload meets the load that it was asked for.

Demands and durations are never scaled; the rate of arrivals is, so that in the busiest resource

    max over r of  rate * E[demand_r * duration_ticks] / total_capacity_r  =  load.

A job that fits on no server is rejected at arrival. It counts as no work in the expectation, so
that the load which the cluster can really feel meets the target.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cloudsched.errors import ConfigError
from cloudsched.sim.fleet import Fleet
from cloudsched.sim.jobs import on_grid
from cloudsched.workload.base import FloatArray, TickArray

MAX_LOAD = 10.0

# Sampled workloads take their expectation over this many jobs, drawn with a fixed seed: an error of
# 0.3 % for the default synthetic jobs.
REFERENCE_JOBS = 2**17
REFERENCE_SEED = 20110501


def arrivals_per_tick(
    demand: FloatArray, duration_ticks: TickArray, *, fleet: Fleet, load: float
) -> float:
    """Return the rate at which jobs like these offer `load` to the fleet.

    Args:
        demand: (J, R) of a sample of jobs.
        duration_ticks: (J,) of the same jobs.
    """
    work = float(offered_work(demand, duration_ticks, fleet=fleet).mean(axis=0).max())
    if work <= 0.0:
        biggest = fleet.capacity.max(axis=0).tolist()
        raise ConfigError(
            f"No job of this workload fits on a server or takes any capacity (biggest server: "
            f"{biggest}, smallest job: {demand.min(axis=0).tolist()}); use larger servers or "
            "smaller demands."
        )
    return load / work


def offered_work(demand: FloatArray, duration_ticks: TickArray, *, fleet: Fleet) -> FloatArray:
    """Return (J, R): ticks for which each job would fill the whole fleet; 0 if it fits nowhere."""
    work = demand * duration_ticks[:, None] / fleet.total_capacity
    work[~is_placeable(demand, fleet)] = 0.0
    return work


def is_placeable(demand: FloatArray, fleet: Fleet) -> NDArray[np.bool_]:
    """Return (J,): whether a job fits on at least one empty server."""
    rounded = on_grid(demand)
    fits = np.zeros(len(demand), dtype=np.bool_)
    for capacity in _largest_servers(fleet.capacity):
        fits |= (rounded <= capacity).all(axis=1)
    return fits


def _largest_servers(capacity: FloatArray) -> list[FloatArray]:
    """Return the capacities that no other server has at least as much of in every resource."""
    kinds = np.unique(capacity, axis=0)
    largest: list[FloatArray] = []
    for kind in kinds[np.argsort(-kinds.sum(axis=1), kind="stable")]:
        if not any((kind <= other).all() for other in largest):
            largest.append(kind)
    return largest
