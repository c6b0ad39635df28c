"""What a cluster has before it: numbers of its state that tell what it will cost from now on."""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cloudsched.heuristics.kernels import dearness_of
from cloudsched.sim.engine import ClusterEngine
from cloudsched.sim.state import ACTIVE, ASLEEP, NONE, ClusterState

NUM_CLASSES = 3
"""Servers are counted in classes, from those with the fewest watts a CPU to the dearest."""

NAMES = (
    *("queued_work", "queued_jobs", "late_jobs", "queued_jobs_squared", "late_jobs_squared"),
    *("queued_cpu", "idle_servers"),
    *(f"{what}_{c}" for c in range(NUM_CLASSES) for what in ("awake", "used", "free", "life")),
    *(f"running_work_{c}" for c in range(NUM_CLASSES)),
    *("no_room_for_a_half", "no_room_for_two", "no_room_for_six"),
)
"""Work is CPU times ticks; `life` is the ticks until a server's last job ends; `no_room…` falls
from one to zero as servers awake have room for a half, two or six mean servers' worth of CPU: what
arrives next may come in bursts, and the last bit of room is worth more than the first."""
SQUARED_UNIT = 50.0  # jobs; brings squares to the size of the other numbers
ROOMS = (0.5, 2.0, 6.0)  # mean servers' worth
_CLASS, _RUNNING, _ROOM = 7, 7 + 4 * NUM_CLASSES, 7 + 5 * NUM_CLASSES


class Outlook:
    """Reads the outlook of some clusters of an engine."""

    def __init__(self, engine: ClusterEngine) -> None:
        self._engine = engine
        fleet = engine.fleet
        dearness = dearness_of(engine.power_at(1.0), fleet.capacity[:, 0])
        self._class = np.minimum(NUM_CLASSES * dearness, NUM_CLASSES - 1).astype(np.int64)
        self._cpu = fleet.capacity[:, 0].copy()

    def __call__(self, which: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return (clusters, numbers) as `NAMES` lists them."""
        out = np.zeros((len(which), len(NAMES)))
        read_outlook(self._engine.state, self._class, self._cpu, which, out)
        return out


@njit(cache=True, nogil=True, error_model="numpy")
def read_outlook(
    state: ClusterState,
    server_class: NDArray[np.int64],
    cpu: NDArray[np.float64],
    which: NDArray[np.int64],
    out: NDArray[np.float64],
) -> None:
    """Write the outlook of the clusters `which`.

    Args:
        server_class: (N,) of each server.
        cpu: (N,) capacity.
        out: (clusters, numbers) zero; overwritten.
    """
    for i in range(which.shape[0]):
        e = which[i]
        cluster = state.clusters[e]
        now = cluster.tick
        row = out[i]
        room = 0.0
        for q in range(cluster.queue_head, cluster.queue_head + cluster.queue_length):
            j = state.queue[e, q]
            row[0] += state.jobs[e, j].duration * state.demand[e, j, 0]
            row[5] += state.demand[e, j, 0]
        row[1] = cluster.queue_length
        row[2] = cluster.num_late
        row[3] = row[1] * row[1] / SQUARED_UNIT
        row[4] = row[2] * row[2] / SQUARED_UNIT
        for n in range(state.servers.shape[1]):
            server = state.servers[e, n]
            if server.mode == ASLEEP:
                continue
            c = server_class[n]
            place = _CLASS + 4 * c
            row[place] += 1.0
            row[place + 1] += cpu[n] - state.free[e, n, 0]
            room += state.free[e, n, 0]
            if server.mode == ACTIVE:
                row[place + 2] += state.free[e, n, 0]
            if server.num_running == 0:
                row[6] += 1.0
                continue
            row[place + 3] += max(0, server.last_end - now)
            j = server.first_running
            while j != NONE:
                job = state.jobs[e, j]
                left = max(0, job.start + job.duration - now)
                row[_RUNNING + c] += left * state.demand[e, j, 0]
                j = job.next_running
        room *= cpu.shape[0] / cpu.sum()
        for r in range(len(ROOMS)):
            row[_ROOM + r] = math.exp(-room / ROOMS[r])
