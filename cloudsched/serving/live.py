"""A cluster whose state the service keeps: events change it, decisions follow from it.

Pure functions on a record that can be stored: nothing here waits, stores or knows of Ray. A tick is
carried out by the simulator's own kernels, so waking, deadlines, energy, arrivals and rejections
follow the one set of rules.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from cloudsched.config import ClusterConfig
from cloudsched.serving import schemas
from cloudsched.serving.errors import ConflictError, UnprocessableError
from cloudsched.serving.planner import MAX_START
from cloudsched.serving.service import FleetDesk
from cloudsched.serving.shield import ShieldSettings
from cloudsched.serving.snapshots import MODES
from cloudsched.serving.wire import struct_of
from cloudsched.sim.engine import slack_ticks
from cloudsched.sim.fleet import Fleet
from cloudsched.sim.jobs import on_grid
from cloudsched.sim.state import ACTIVE, NEVER, NONE, RATE_HORIZONS, Snapshots

FAILED = "failed"
NUM_RATES = 2 * len(RATE_HORIZONS) + 1  # as in `Snapshots.context`
FAR = schemas.MAX_TICKS

DecisionRequest = struct_of(schemas.DecisionRequest)
ClusterView = struct_of(schemas.ClusterView)
Server = struct_of(schemas.Server)
RunningJob = struct_of(schemas.RunningJob)
QueuedJob = struct_of(schemas.QueuedJob)
SlaWindow = struct_of(schemas.SlaWindow)

COUNTERS = (
    "arrived", "started", "completed", "rejected", "dropped", "violations", "late_job_ticks",
    "requeued", "sleep_requests", "wake_requests", "decisions", "energy_kwh",
)  # fmt: skip


class Job(msgspec.Struct):
    """A job that waits or runs; ticks are the cluster's own."""

    demand: list[float]
    duration: int
    arrival: int
    start_by: int
    server: int = NONE
    end: int = 0  # when it is expected to end


class LiveServer(msgspec.Struct):
    """One server."""

    mode: str = "active"
    wake_left: int = 0
    idle_since: int = 0


class LiveCluster(msgspec.Struct):
    """Everything about one cluster."""

    id: str
    fleet: Any  # the document of a fleet, or the name of one
    servers: list[LiveServer]
    time_of_day_s: float  # at tick 0
    tick: int = -1  # the first tick event begins tick 0
    decisions_in_tick: int = 0
    queue: dict[str, Job] = {}  # in window order
    running: dict[str, Job] = {}
    rates: list[float] = msgspec.field(default_factory=lambda: [0.0] * NUM_RATES)
    mid_tick_arrivals: int = 0  # not in the rates yet
    mid_tick_work: float = 0.0
    last_server: int = NONE
    counters: dict[str, float] = {}
    window: list[tuple[int, int]] = []  # arrivals and violations of the last ticks
    is_shielded: bool = False
    has_waited: bool = False  # in this tick


class Changes(msgspec.Struct):
    """What some events did besides changing the state."""

    rejected: list[str] = []
    requeued: list[str] = []


encode_live = msgspec.msgpack.Encoder().encode
decode_live = msgspec.msgpack.Decoder(LiveCluster).decode


def new_cluster(request: Any, fleet: Fleet) -> LiveCluster:
    """Return the state of a cluster that nothing has happened to: all servers active and idle."""
    return LiveCluster(
        id=request.id,
        fleet=msgspec.to_builtins(request.fleet),
        servers=[LiveServer() for _ in range(fleet.num_servers)],
        time_of_day_s=request.time_of_day_s,
        counters=dict.fromkeys(COUNTERS, 0),
    )


def apply_events(
    live: LiveCluster, events: Sequence[Any], desk: FleetDesk, shield: ShieldSettings
) -> tuple[LiveCluster, Changes]:
    """Return the state after some events; the one given stays as it is.

    Raises:
        ConflictError: an event cannot have happened in this state.
    """
    live, changes = copy.deepcopy(live), Changes()
    for tick, some in _by_tick(events):
        if tick is not None:
            _begin_tick(live, some, desk, shield, changes)
            some = [e for e in some if _kind(e) not in ("arrival", "completion")]
        for event in some:
            _apply_now(live, event, desk, changes)
    return live, changes


def decision_request(live: LiveCluster, desk: FleetDesk, alternatives: int) -> Any:
    """Return the state as the document that the stateless call takes."""
    tick = live.tick
    return DecisionRequest(
        cluster=live.id,
        servers=[
            Server(
                mode=server.mode,
                wake_left=server.wake_left,
                idle_ticks=min(max(0, tick - server.idle_since), FAR),
            )
            for server in live.servers
        ],
        running=[
            RunningJob(server=job.server, demand=job.demand, ticks_left=_ticks_left(job, tick))
            for job in live.running.values()
        ],
        queue=[
            QueuedJob(
                id=name,
                demand=job.demand,
                duration=job.duration,
                waited=min(tick - job.arrival, FAR),
                laxity=_laxity(job, tick),
            )
            for name, job in live.queue.items()
        ],
        time_of_day_s=live.time_of_day_s + tick * desk.config.tick_s,
        decisions_in_tick=live.decisions_in_tick,
        arrival_rates=live.rates[:3],
        work_rates=live.rates[3:6],
        work_square=live.rates[6],
        last_server=live.last_server,
        sla_window=_window(live),
        max_decisions=desk.config.decisions_per_tick - live.decisions_in_tick,
        alternatives=alternatives,
    )


def has_decisions_left(live: LiveCluster, desk: FleetDesk) -> bool:
    """Return whether the rules allow another decision in this tick."""
    return live.decisions_in_tick < desk.config.decisions_per_tick


def apply_reply(live: LiveCluster, reply: Any, config: ClusterConfig) -> None:
    """Carry out what the policy decided."""
    for decision in reply.decisions:
        server = live.servers[decision.server]
        if decision.kind == "place":
            job = live.queue.pop(decision.job)
            job.server, job.end = decision.server, live.tick + job.duration
            live.running[decision.job] = job
            live.counters["started"] += 1
        elif decision.kind == "sleep":
            server.mode = "asleep"
            live.counters["sleep_requests"] += 1
        else:
            server.mode = "waking" if config.wake_delay_ticks else "active"
            server.wake_left, server.idle_since = config.wake_delay_ticks, live.tick
            live.counters["wake_requests"] += 1
    num_decisions = len(reply.decisions)
    live.decisions_in_tick += num_decisions
    live.counters["decisions"] += num_decisions
    live.last_server = reply.last_server
    live.has_waited = True
    live.is_shielded = any(note.reason == "sla_cap" for note in reply.interventions)


def view_of(live: LiveCluster, version: int, desk: FleetDesk) -> Any:
    """Return the state as a document for people."""
    return ClusterView(
        id=live.id,
        version=version,
        tick=live.tick,
        time_of_day_s=(live.time_of_day_s + live.tick * desk.config.tick_s) % 86_400.0,
        resources=list(desk.fleet.resources),
        servers=[
            Server(mode=s.mode, wake_left=s.wake_left, idle_ticks=max(0, live.tick - s.idle_since))
            for s in live.servers
        ],
        running={name: job.server for name, job in live.running.items()},
        queue=list(live.queue),
        is_shielded=live.is_shielded,
        counters={**live.counters, "violations_in_window": sum(v for _, v in live.window)},
    )


def _kind(event: Any) -> str:
    return str(type(event).__struct_config__.tag)


def _by_tick(events: Sequence[Any]) -> Iterable[tuple[Any, list[Any]]]:
    """Cut events into what came before the first tick, and each tick with what began it."""
    tick: Any = None
    some: list[Any] = []
    for event in events:
        if _kind(event) == "tick":
            if tick is not None or some:
                yield tick, some
            tick, some = event, []
        else:
            some.append(event)
    yield tick, some


def _apply_now(live: LiveCluster, event: Any, desk: FleetDesk, changes: Changes) -> None:
    """Apply an event that happened while a tick runs."""
    kind = _kind(event)
    if kind == "arrival":
        job = _job_of(live, event, desk)
        live.mid_tick_arrivals += 1
        live.mid_tick_work += job.demand[0] * job.duration
        live.counters["arrived"] += 1
        is_placeable = bool((np.array(job.demand) <= desk.fleet.capacity).all(axis=1).any())
        if is_placeable and len(live.queue) < desk.config.queue_capacity:
            live.queue[event.job] = job
            _reorder(live, desk)
        else:
            live.counters["rejected"] += 1
            live.counters["violations"] += 1
            changes.rejected.append(event.job)
    elif kind == "completion":
        job = _running(live, event)
        del live.running[event.job]
        live.counters["completed"] += 1
        _note_idle(live, job.server)
    else:
        server = _server(live, event)
        if kind == "server_failed":
            if server.mode == FAILED:
                raise ConflictError(f"event {event.id!r}: server {event.server} has failed before.")
            server.mode, server.wake_left = FAILED, 0
            lost = [name for name, job in live.running.items() if job.server == event.server]
            for name in lost:
                job = live.running.pop(name)
                job.server = NONE
                live.queue[name] = job
            live.counters["requeued"] += len(lost)
            live.counters["started"] -= len(lost)
            changes.requeued += lost
            _reorder(live, desk)
        else:
            if server.mode != FAILED:
                raise ConflictError(f"event {event.id!r}: server {event.server} has not failed.")
            server.mode, server.idle_since = "active", live.tick


def _begin_tick(
    live: LiveCluster,
    some: Sequence[Any],
    desk: FleetDesk,
    shield: ShieldSettings,
    changes: Changes,
) -> None:
    """End the tick and begin the next, with the completions and arrivals that came with it."""
    ended = _ended(live, some)
    arriving: dict[str, Job] = {}
    for event in some:
        if _kind(event) == "arrival":
            if event.job in arriving:
                raise ConflictError(f"event {event.id!r}: job {event.job!r} arrived before.")
            arriving[event.job] = _job_of(live, event, desk, tick=live.tick + 1)
    planner = desk.planner(1)
    planner.load(_snapshot(live, ended, arriving, desk))
    engine = planner.engine
    engine.step(np.array([engine.wait_action]))

    cluster = engine.state.clusters[0]
    names = [*live.running, *live.queue, *arriving]
    jobs = {**live.running, **live.queue, **arriving}
    head, length = int(cluster["queue_head"]), int(cluster["queue_length"])
    queued = [names[j] for j in engine.state.queue[0, head : head + length]]
    changes.rejected += [name for name in arriving if name not in set(queued)]
    live.queue = {name: jobs[name] for name in queued}
    live.tick += 1
    live.decisions_in_tick = 0
    live.has_waited = False
    for name in ended:
        job = live.running.pop(name)
        _note_idle(live, job.server)
    for server, record in zip(live.servers, engine.state.servers[0], strict=True):
        if server.mode == "waking":
            server.wake_left = int(record["wake_left"])
            if record["mode"] == ACTIVE:
                server.mode, server.idle_since = "active", live.tick
    for name in ("arrived", "completed", "rejected", "dropped", "violations", "late_job_ticks"):
        live.counters[name] += int(cluster[name])
    if live.tick > 0:
        live.counters["energy_kwh"] += float(cluster["energy_j"]) / 3.6e6
    live.rates = [
        *cluster["arrival_rate"].tolist(),
        *cluster["work_rate"].tolist(),
        float(cluster["work_square"]),
    ]
    _count_mid_tick(live)
    arrived = len(arriving) + live.mid_tick_arrivals
    live.window.append((arrived, int(cluster["violations"])))
    live.window = live.window[-shield.window_ticks :]
    live.mid_tick_arrivals, live.mid_tick_work = 0, 0.0


def _count_mid_tick(live: LiveCluster) -> None:
    """Add what arrived while the last tick ran to the rates, with this tick's gain."""
    for h, horizon in enumerate(RATE_HORIZONS):
        gain = max(1.0 / horizon, 1.0 / (live.tick + 1))
        live.rates[h] += gain * live.mid_tick_arrivals
        live.rates[len(RATE_HORIZONS) + h] += gain * live.mid_tick_work
    live.rates[-1] += gain * live.mid_tick_work**2


def _ended(live: LiveCluster, some: Sequence[Any]) -> list[str]:
    ended: list[str] = []
    for event in some:
        if _kind(event) == "completion":
            _running(live, event)
            if event.job in ended:
                raise ConflictError(f"event {event.id!r}: job {event.job!r} has ended before.")
            ended.append(event.job)
    return ended


def _snapshot(
    live: LiveCluster, ended: Sequence[str], arriving: dict[str, Job], desk: FleetDesk
) -> Snapshots:
    """Return the state for the kernels; jobs that did not end when expected go on."""
    tick = min(live.tick, MAX_START)
    rows: list[tuple[int, int, int, int]] = []
    for name, job in live.running.items():
        left = 1 if name in ended else max(2, _ticks_left(job, live.tick))
        rows.append((job.server, left, 0, NEVER))
    rows += [
        (NONE, job.duration, live.tick - job.arrival, _laxity(job, live.tick))
        for job in (*live.queue.values(), *arriving.values())
    ]
    jobs = [*live.running.values(), *live.queue.values(), *arriving.values()]
    return Snapshots(
        tick=np.array([tick], np.int64),
        decisions_in_tick=np.zeros(1, np.int64),
        wake_delay=np.array([desk.config.wake_delay_ticks], np.int64),
        time_of_day_s=np.array([live.time_of_day_s + live.tick * desk.config.tick_s]),
        context=np.array([live.rates], np.float64),
        servers=np.array(
            [[(MODES[s.mode], s.wake_left, live.tick - s.idle_since) for s in live.servers]],
            np.int64,
        ),
        job_counts=np.array([[len(live.running), len(live.queue), len(arriving)]], np.int64),
        jobs=np.array(rows, np.int64).reshape(-1, 4),
        demand=np.array([j.demand for j in jobs], np.float64).reshape(-1, desk.fleet.num_resources),
    )


def _job_of(live: LiveCluster, event: Any, desk: FleetDesk, tick: int | None = None) -> Job:
    if event.job in live.running or event.job in live.queue:
        raise ConflictError(f"event {event.id!r}: job {event.job!r} is already in the cluster.")
    if len(event.demand) != desk.fleet.num_resources:
        raise UnprocessableError(
            f"event {event.id!r}: demand={event.demand!r} for the {desk.fleet.num_resources} "
            "resources of the fleet."
        )
    arrival = live.tick if tick is None else tick
    slack = int(slack_ticks(desk.config, np.array([event.duration]))[0])
    return Job(
        demand=on_grid(event.demand).tolist(),
        duration=event.duration,
        arrival=arrival,
        start_by=NEVER if slack == NEVER else arrival + slack,
    )


def _running(live: LiveCluster, event: Any) -> Job:
    job = live.running.get(event.job)
    if job is None:
        state = "waits in the queue" if event.job in live.queue else "is not in the cluster"
        raise ConflictError(
            f"event {event.id!r}: job {event.job!r} cannot complete, for it {state}."
        )
    return job


def _server(live: LiveCluster, event: Any) -> LiveServer:
    if event.server >= len(live.servers):
        raise ConflictError(
            f"event {event.id!r}: there is no server {event.server}; the last one is "
            f"{len(live.servers) - 1}."
        )
    server: LiveServer = live.servers[event.server]
    return server


def _note_idle(live: LiveCluster, server: int) -> None:
    if not any(job.server == server for job in live.running.values()):
        live.servers[server].idle_since = live.tick


def _reorder(live: LiveCluster, desk: FleetDesk) -> None:
    """Bring the queue into window order; equals keep theirs."""
    if desk.config.window_order == "laxity":
        live.queue = dict(sorted(live.queue.items(), key=lambda item: item[1].start_by))


def _ticks_left(job: Job, tick: int) -> int:
    return min(max(1, job.end - tick), FAR)


def _laxity(job: Job, tick: int) -> int:
    return FAR if job.start_by == NEVER else max(job.start_by - tick, -FAR)


def _window(live: LiveCluster) -> Any:
    return SlaWindow(
        arrived=sum(arrived for arrived, _ in live.window),
        violations=sum(violations for _, violations in live.window),
        is_tripped=live.is_shielded,
    )
