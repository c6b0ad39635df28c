"""From the documents of some clusters of one fleet to the simulator's arrays.

Lists are joined and checked as wholes: one step of Python for each field of a cluster, none for
each server or job of a document in columns. Numbers are checked here whichever way they came: JSON
has had its limits checked before, messages of gRPC have not.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import Any, NoReturn

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cloudsched.config import ClusterConfig
from cloudsched.serving import schemas
from cloudsched.serving.errors import UnprocessableError
from cloudsched.serving.planner import place_of
from cloudsched.sim.engine import slack_ticks
from cloudsched.sim.fleet import Fleet
from cloudsched.sim.jobs import MAX_DEMAND, on_grid
from cloudsched.sim.state import ACTIVE, ASLEEP, NEVER, NONE, WAKING, Snapshots

UNSAID = 2**40  # a laxity that the SLA of the rules shall give

# A failed server takes no jobs and obeys no toggle, just like one that is waking. The names are
# those of JSON, the numbers those of gRPC.
MODES = {
    "active": ACTIVE, "waking": WAKING, "asleep": ASLEEP, "failed": WAKING,
    0: ACTIVE, 1: WAKING, 2: ASLEEP, 3: WAKING,
}  # fmt: skip
ASLEEP_NAMES = ("asleep", 2)

MAX_TICKS = schemas.MAX_TICKS
NO_FAULT, TICKS, DEMAND, OUTSIDE, NOT_ACTIVE = range(5)
FAULTS = {
    TICKS: f"a number of ticks is below its least, 0 or 1, or above {MAX_TICKS}",
    DEMAND: f"a demand is not a number from 0 to {MAX_DEMAND:.0f}",
}

Refuse = Callable[[str], NoReturn]


def snapshots_of(requests: Sequence[Any], config: ClusterConfig, fleet: Fleet) -> Snapshots:
    """Turn the documents of S clusters of one fleet into arrays.

    Raises:
        UnprocessableError: one of them does not fit the fleet or itself.
    """
    num_servers, num_resources = fleet.num_servers, fleet.num_resources
    modes: list[int] = []
    wake_left: list[int] = []
    idle_ticks: list[int] = []
    server: list[int] = []
    ticks: list[int] = []
    waited: list[int] = []
    laxity: list[int] = []
    demand: list[float] = []
    counts: list[int] = []
    context: list[float] = []
    for e, request in enumerate(requests):

        def refuse(fault: str, e: int = e) -> NoReturn:
            raise UnprocessableError(f"{place_of(e, len(requests))}{fault}")

        servers, running, queue = request.servers, request.running, request.queue
        if type(servers) is list:
            num_given = len(servers)
            modes += [MODES[s.mode] for s in servers]
            wake_left += [s.wake_left for s in servers]
            idle_ticks += [s.idle_ticks for s in servers]
        else:
            num_given = len(servers.mode)
            modes += map(MODES.__getitem__, servers.mode)
            wake_left += _column("servers.wake_left", servers.wake_left, num_given, 0, refuse)
            idle_ticks += _column("servers.idle_ticks", servers.idle_ticks, num_given, 0, refuse)
        if not num_given:
            modes += repeat(ACTIVE, num_servers)
            wake_left += repeat(0, num_servers)
            idle_ticks += repeat(0, num_servers)
        elif num_given != num_servers:
            refuse(
                f"{num_given} servers for a fleet of {num_servers}; expected one for each, or "
                "none at all."
            )
        if type(running) is list:
            num_running = len(running)
            server += [job.server for job in running]
            ticks += [job.ticks_left for job in running]
            demand += _joined([job.demand for job in running], num_resources, refuse)
        else:
            num_running = len(running.server)
            server += running.server
            ticks += _column("running.ticks_left", running.ticks_left, num_running, None, refuse)
            demand += _flat("running", running.demand, num_running, num_resources, refuse)
        waited += repeat(0, num_running)
        laxity += repeat(NEVER, num_running)
        if type(queue) is list:
            names = [job.id for job in queue]
            ticks += [job.duration for job in queue]
            waited += [job.waited for job in queue]
            laxity += [UNSAID if job.laxity is None else job.laxity for job in queue]
            demand += _joined([job.demand for job in queue], num_resources, refuse)
        else:
            names = queue.id
            ticks += _column("queue.duration", queue.duration, len(names), None, refuse)
            waited += _column("queue.waited", queue.waited, len(names), 0, refuse)
            laxity += _column("queue.laxity", queue.laxity, len(names), UNSAID, refuse)
            demand += _flat("queue", queue.demand, len(names), num_resources, refuse)
        num_queued = len(names)
        if num_queued > config.queue_capacity:
            refuse(f"{num_queued} jobs in a queue of {config.queue_capacity}.")
        if num_queued > 1 and len(set(names)) != num_queued:
            refuse("two jobs in the queue have the same id.")
        server += repeat(NONE, num_queued)
        counts += (num_running, num_queued, 0)
        context += request.arrival_rates or (0.0, 0.0, 0.0)
        context += request.work_rates or (0.0, 0.0, 0.0)
        context.append(request.work_square)
    num_clusters = len(requests)
    jobs = _integers(server, ticks, waited, laxity)
    servers_array = _integers(modes, wake_left, idle_ticks)
    job_counts = _integers(counts).reshape(-1, 3)
    demands = _floats(demand).reshape(-1, num_resources)
    fault, e, n = _first_fault(jobs, demands, job_counts, servers_array, num_servers)
    if fault != NO_FAULT:
        where = place_of(e, num_clusters)
        if fault in FAULTS:
            raise UnprocessableError(f"{where}{FAULTS[fault]}.")
        why = f"the last one is {num_servers - 1}" if fault == OUTSIDE else "it is not active"
        raise UnprocessableError(f"{where}a job runs on server {n}; {why}.")
    is_unsaid = jobs[:, 3] == UNSAID
    if is_unsaid.any():
        slack = slack_ticks(config, jobs[is_unsaid, 1])
        jobs[is_unsaid, 3] = np.where(slack == NEVER, NEVER, slack - jobs[is_unsaid, 2])
    return Snapshots(
        tick=np.zeros(num_clusters, np.int64),
        decisions_in_tick=np.array([r.decisions_in_tick for r in requests], np.int64),
        wake_delay=np.full(num_clusters, config.wake_delay_ticks, np.int64),
        time_of_day_s=np.array([r.time_of_day_s for r in requests], np.float64),
        context=_floats(context).reshape(num_clusters, -1),
        servers=servers_array.reshape(num_clusters, num_servers, 3),
        job_counts=job_counts,
        jobs=jobs,
        demand=on_grid(demands),
    )


def names_of(queue: Any) -> list[str]:
    """Return the ids of the jobs in a queue, in either form."""
    return [job.id for job in queue] if type(queue) is list else queue.id


def is_asleep(servers: Any, n: int) -> bool:
    """Return whether server n is asleep by a document, in either form."""
    if type(servers) is list:
        return bool(servers) and servers[n].mode == "asleep"
    return bool(servers.mode) and servers.mode[n] in ASLEEP_NAMES


@njit(cache=True)
def _first_fault(
    jobs: NDArray[np.int64],
    demands: NDArray[np.float64],
    job_counts: NDArray[np.int64],
    servers: NDArray[np.int64],
    num_servers: int,
) -> tuple[int, int, int]:
    """Return what is wrong first, in which cluster, and on which server a job runs that may not."""
    job = 0
    for e in range(len(job_counts)):
        for n in range(e * num_servers, (e + 1) * num_servers):
            if (
                min(servers[n, 1], servers[n, 2]) < 0
                or max(servers[n, 1], servers[n, 2]) > MAX_TICKS
            ):
                return TICKS, e, NONE
        num_running = job_counts[e, 0]
        for i in range(num_running + job_counts[e, 1]):
            server, ticks, waited, laxity = jobs[job]
            if not (1 <= ticks <= MAX_TICKS and 0 <= waited <= MAX_TICKS):
                return TICKS, e, NONE
            if i >= num_running and laxity != UNSAID and abs(laxity) > MAX_TICKS:
                return TICKS, e, NONE
            for amount in demands[job]:
                if not 0.0 <= amount <= MAX_DEMAND:  # NaN is in no range
                    return DEMAND, e, NONE
            if i < num_running and not 0 <= server < num_servers:
                return OUTSIDE, e, server
            if i < num_running and servers[e * num_servers + server, 0] != ACTIVE:
                return NOT_ACTIVE, e, server
            job += 1
    return NO_FAULT, 0, NONE


def _column(
    name: str, values: list[int], length: int, default: int | None, refuse: Refuse
) -> Iterable[int]:
    """Return a column; one that may be left out is filled with its default."""
    if len(values) == length:
        return values
    if values or default is None:
        refuse(f"{name} has {len(values)} entries; expected {length}.")
    return repeat(default, length)


def _joined(rows: list[list[float]], num_resources: int, refuse: Refuse) -> Iterable[float]:
    """Return demands one after another."""
    if rows and set(map(len, rows)) != {num_resources}:
        wrong = next(row for row in rows if len(row) != num_resources)
        refuse(f"demand={wrong!r}: expected {num_resources} numbers.")
    return chain.from_iterable(rows)


def _flat(
    name: str, values: list[float], num_jobs: int, num_resources: int, refuse: Refuse
) -> list[float]:
    if len(values) != num_jobs * num_resources:
        refuse(
            f"{name}.demand has {len(values)} numbers for {num_jobs} jobs; expected "
            f"{num_resources} for each."
        )
    return values


def _integers(*columns: list[int]) -> NDArray[np.int64]:
    """Return lists of one length as the columns of an array."""
    table = np.empty((len(columns[0]), len(columns)), np.int64)
    for i, column in enumerate(columns):
        table[:, i] = _packed(column, "q", np.int64)
    return table


def _floats(values: list[float]) -> NDArray[np.float64]:
    return _packed(values, "d", np.float64)


def _packed(values: list[Any], code: str, kind: Any) -> NDArray[Any]:
    """Return a list as an array, in a fifth of the time that `np.array` needs."""
    room = bytearray(8 * len(values))
    struct.pack_into(f"{len(values)}{code}", room, 0, *values)
    return np.frombuffer(room, kind)
