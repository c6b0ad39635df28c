"""What a picture of one cluster shows: its state as plain numbers, for text and image alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cloudsched.sim.engine import ClusterEngine
from cloudsched.sim.fleet import Fleet
from cloudsched.sim.state import ACTIVE, ASLEEP, NEVER, WAKING

# Fleets with more models are drawn as one group: bands of one or two servers tell nothing.
MAX_GROUPS = 4
DAY_S = 86_400


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job that waits in a visible slot."""

    row: int  # in the job table
    demand: tuple[float, ...]  # (R,)
    duration_ticks: int
    wait_ticks: int
    laxity_ticks: int | None  # left to start in time, below 0 when late; None without a deadline
    slack_left: float  # share of the time from arrival to deadline that is left, 0 when late

    @property
    def is_late(self) -> bool:
        """Whether the last tick for a start in time has passed."""
        return self.laxity_ticks is not None and self.laxity_ticks < 0


class ServerGroup(NamedTuple):
    """Servers that are drawn together under one heading."""

    title: str
    servers: NDArray[np.int64]
    drawn: NDArray[np.int64]  # every one of them, or in large fleets every second, third ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """One cluster at one moment."""

    fleet: Fleet
    tick: int
    episode_ticks: int
    clock: str  # time of day as hours:minutes
    power_w: float
    energy_kwh: float
    queue_length: int
    num_late: int  # in the whole queue
    num_running: int
    completed: int
    violations: int
    rejected: int
    num_slots: int  # K
    jobs: tuple[QueuedJob, ...]  # at most K
    mode: NDArray[np.int32]  # (N,)
    wake_left: NDArray[np.int32]  # (N,)
    wake_delay_ticks: int
    server_jobs: NDArray[np.int32]  # (N,) running
    server_w: NDArray[np.float64]  # (N,)
    use: NDArray[np.float64]  # (N, R) shares of the capacity, 0 to 1

    @property
    def full_w(self) -> float:
        """Watts of the whole fleet at full load."""
        return float(self.fleet.max_w.sum())

    @property
    def power_share(self) -> float:
        """Power as a share of the fleet's at full load."""
        return self.power_w / self.full_w

    def summary(self, servers: NDArray[np.int64]) -> str:
        """Say in a few words what some of the servers do."""
        mode = self.mode[servers]
        active = servers[mode == ACTIVE]
        words = [
            f"{len(active):,} active",
            f"{np.count_nonzero(mode == WAKING):,} waking",
            f"{np.count_nonzero(mode == ASLEEP):,} asleep",
        ]
        if len(active):
            words.append(f"active CPU {self.use[active, 0].mean():.0%}")
        return ", ".join(words)


def take_snapshot(engine: ClusterEngine, e: int) -> Snapshot:
    """Read cluster e as it is now."""
    state, config, fleet = engine.state, engine.config, engine.fleet
    cluster = state.clusters[e]
    servers = state.servers[e]
    tick, head = int(cluster["tick"]), int(cluster["queue_head"])
    queue = state.queue[e, head : head + int(cluster["queue_length"])]
    time_s = cluster["time_of_day_s"] + tick * (config.tick_s + cluster["day_gain_s"])
    minutes = int(time_s % DAY_S) // 60
    return Snapshot(
        fleet=fleet,
        tick=tick,
        episode_ticks=config.episode_ticks,
        clock=f"{minutes // 60:02d}:{minutes % 60:02d}",
        power_w=float(cluster["power_w"]),
        energy_kwh=float(cluster["energy_j"]) / 3.6e6,
        queue_length=len(queue),
        num_late=int(np.count_nonzero(state.jobs[e]["start_by"][queue] < tick)),
        num_running=int(cluster["num_running"]),
        completed=int(cluster["completed"]),
        violations=int(cluster["violations"]),
        rejected=int(cluster["rejected"]),
        num_slots=config.visible_jobs,
        jobs=tuple(_queued_job(engine, e, int(j)) for j in queue[: config.visible_jobs]),
        mode=servers["mode"].copy(),
        wake_left=servers["wake_left"].copy(),
        wake_delay_ticks=int(cluster["wake_delay_ticks"]),
        server_jobs=servers["num_running"].copy(),
        server_w=servers["power_w"].copy(),
        use=np.clip(1.0 - state.free[e] / fleet.capacity, 0.0, 1.0),
    )


def server_groups(fleet: Fleet, max_servers: int) -> list[ServerGroup]:
    """Group servers by model, the most efficient first.

    Args:
        max_servers: larger fleets are thinned out when drawn, and the titles say so.
    """
    step = -(-fleet.num_servers // max_servers)
    models = np.array(fleet.models)
    names = np.unique(models)
    if len(names) > MAX_GROUPS:
        parts = {f"{len(names)} models": np.arange(fleet.num_servers)}
    else:
        watts_per_cpu = fleet.max_w / fleet.capacity[:, 0]
        parts = {str(name): np.flatnonzero(models == name) for name in names}
        parts = dict(sorted(parts.items(), key=lambda part: watts_per_cpu[part[1]].mean()))
    note = f" (1 in {step} drawn)" if step > 1 else ""
    return [
        ServerGroup(title=short_model(name, 20) + note, servers=part, drawn=part[::step])
        for name, part in parts.items()
    ]


def short_model(model: str, max_length: int) -> str:
    """Shorten a product name to its last words, which tell machines apart."""
    words = model.split(" (")[0].split()
    while len(words) > 1 and (len(" ".join(words)) > max_length or words[0].endswith((".", ","))):
        words.pop(0)
    return " ".join(words)[:max_length]


def _queued_job(engine: ClusterEngine, e: int, j: int) -> QueuedJob:
    job = engine.state.jobs[e, j]
    tick = int(engine.state.clusters["tick"][e])
    arrival, start_by = int(job["arrival"]), int(job["start_by"])
    has_deadline = start_by != NEVER
    left = max(0.0, (start_by - tick) / max(1, start_by - arrival))
    return QueuedJob(
        row=j,
        demand=tuple(engine.state.demand[e, j].tolist()),
        duration_ticks=int(job["duration"]),
        wait_ticks=tick - arrival,
        laxity_ticks=start_by - tick if has_deadline else None,
        slack_left=left if has_deadline else 1.0,
    )
