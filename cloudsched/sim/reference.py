"""One cluster in plain Python: the oracle of the kernels' tests and the yardstick of the benchmark.

The simulator as one explains it on a whiteboard. Power, legality, mask, observation and counts are
worked out anew whenever they are asked for. Float operations come in the same order as in the
kernels, so that the two agree bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cloudsched.config import ClusterConfig
from cloudsched.errors import ConfigError, InvalidJobsError
from cloudsched.sim.fleet import Fleet, build_fleet
from cloudsched.sim.jobs import JobTable
from cloudsched.sim.state import ACTIVE, ASLEEP, NEVER, NONE, RATE_HORIZONS, RELEASE_HORIZON, WAKING


class ReferenceStep(NamedTuple):
    """What one step gave."""

    reward: float
    cost: float
    elapsed_ticks: int
    is_truncated: bool


@dataclass(eq=False, slots=True)
class Job:
    """A job from its arrival to its end."""

    arrival: int
    duration: int
    demand: list[float]  # (R,)
    start_by: int  # last tick at which a start is in time
    start: int = NONE
    server: int = NONE

    @property
    def end(self) -> int:
        """First tick at which it no longer runs."""
        return self.start + self.duration


@dataclass(eq=False, slots=True)
class Server:
    """A server: what it is, and what it is doing."""

    capacity: list[float]  # (R,)
    idle_w: float
    max_w: float
    exponent: float  # 0 where `curve_w` is measured
    curve_w: list[float]  # (11,) at 0, 10 ... 100 % load
    mode: int = ACTIVE
    wake_left: int = 0  # ticks until a WAKING server is ACTIVE
    idle_since: int = 0  # tick since which it is ACTIVE without jobs
    running: list[Job] = field(default_factory=list)
    free: list[float] = field(init=False)  # (R,)

    def __post_init__(self) -> None:
        self.free = list(self.capacity)

    @property
    def cpu_used(self) -> float:
        """CPU that its jobs hold."""
        return self.capacity[0] - self.free[0]


class ReferenceCluster:
    """One cluster, to be `reset` with jobs and then stepped; the rules are in DESIGN section 3.

    Counters carry the names of the fields of `cloudsched.sim.state.CLUSTER_DTYPE`.
    """

    def __init__(self, config: ClusterConfig, fleet: Fleet | None = None) -> None:
        self.config = config
        self.fleet = build_fleet(config.fleet) if fleet is None else fleet
        self.num_servers, self.num_resources = config.num_servers, config.num_resources
        self.num_actions, self.visible_jobs = config.num_actions, config.visible_jobs
        expected = (self.num_servers, self.num_resources)
        if self.fleet.capacity.shape != expected:
            raise ConfigError(
                f"The fleet's (servers, resources) are {self.fleet.capacity.shape}; "
                f"expected {expected}, as in config.fleet."
            )
        self.total_max_w = float(self.fleet.max_w.sum())
        self.total_capacity: list[float] = self.fleet.total_capacity.tolist()
        self.reference_capacity: list[float] = self.fleet.capacity.max(axis=0).tolist()
        self.reference_w = float(self.fleet.max_w.max())

    def reset(self, jobs: JobTable, wake_delay_ticks: int | None = None) -> None:
        """Start an episode: all servers awake and empty, and the jobs of tick 0 arrive.

        Args:
            wake_delay_ticks: of this episode; the config's if None.
        """
        if jobs.num_resources != self.num_resources:
            raise InvalidJobsError(
                f"The jobs demand {jobs.num_resources} resources, the fleet has "
                f"{self.num_resources}; expected the same."
            )
        fleet = self.fleet
        columns = (fleet.capacity, fleet.idle_w, fleet.max_w, fleet.exponent, fleet.curve_w)
        self.servers = [Server(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]
        self.queue: list[Job] = []
        self.jobs: list[Job] = []
        self.jobs_at: dict[int, list[Job]] = {}  # by arrival tick, in table order
        self.time_of_day_s = float(jobs.time_of_day_s)
        self.day_gain_s = jobs.day_gain_s(self.config.tick_s)
        delay = self.config.wake_delay_ticks if wake_delay_ticks is None else wake_delay_ticks
        self.wake_delay_ticks = delay
        table = (jobs.arrival_tick, jobs.duration_ticks, jobs.demand)
        for arrival, duration, demand in zip(*(c.tolist() for c in table), strict=True):
            job = Job(arrival, duration, demand, start_by=self._start_by(arrival, duration))
            self.jobs.append(job)
            self.jobs_at.setdefault(arrival, []).append(job)

        self.tick = self.decisions_in_tick = self.decisions = 0
        self.arrived = self.started = self.completed = 0
        self.rejected = self.unplaceable = self.dropped = 0
        self.violations = self.new_violations = self.late_job_ticks = 0
        self.sleep_requests = self.wake_requests = self.illegal = 0
        self.energy_j = self.cpu_ticks = 0.0
        self.awake_ticks = 0
        self.arrival_rate = [0.0 for _ in RATE_HORIZONS]
        self.work_rate = [0.0 for _ in RATE_HORIZONS]
        self.work_square = 0.0
        self._let_jobs_arrive()

    def step(self, action: int) -> ReferenceStep:
        """Take one decision; it ends the tick if it is `wait`, illegal, or the tick's last."""
        if self.tick >= self.config.episode_ticks:
            return ReferenceStep(0.0, 0.0, 0, is_truncated=True)
        self.decisions += 1
        self.decisions_in_tick += 1
        reward = 0.0
        is_waiting = action == self.num_actions - 1
        if not self.is_legal(action):
            self.illegal += 1
            reward -= self.config.reward.illegal_penalty
            is_waiting = True
        elif not is_waiting:
            row, n = divmod(action, self.num_servers)
            if row < self.visible_jobs:
                self._place(self.queue.pop(row), n)
            else:
                reward -= self._toggle(self.servers[n])

        if not is_waiting and self.decisions_in_tick < self.config.decisions_per_tick:
            return ReferenceStep(reward, 0.0, 0, is_truncated=False)
        price, cost = self._end_tick()
        is_truncated = self.tick == self.config.episode_ticks
        return ReferenceStep(reward - price, cost, 1, is_truncated)

    def is_legal(self, action: int) -> bool:
        """Whether the rules allow an action now; an action that does not exist is illegal."""
        if not 0 <= action < self.num_actions:
            return False
        if action == self.num_actions - 1:
            return not self.config.wait_only_when_stuck or not self._can_place()
        row, n = divmod(action, self.num_servers)
        server = self.servers[n]
        if row < self.visible_jobs:
            return (
                row < len(self.queue)
                and server.mode == ACTIVE
                and _fits(self.queue[row].demand, server.free)
            )
        return server.mode == ASLEEP or (server.mode == ACTIVE and not server.running)

    def mask(self) -> NDArray[np.int8]:
        """(A,) 1 where an action is legal."""
        return np.array([self.is_legal(a) for a in range(self.num_actions)], dtype=np.int8)

    def observation(self) -> dict[str, NDArray[Any]]:
        """What a policy sees; every feature lies in [-1, 1]."""
        window = [self._job_features(job) for job in self.queue[: self.visible_jobs]]
        empty = [0.0] * (self.num_resources + 4)
        window += [empty] * (self.visible_jobs - len(window))
        return {
            "servers": np.array([self._server_features(s) for s in self.servers], dtype=np.float32),
            "jobs": np.array(window, dtype=np.float32),
            "context": np.array(self._context_features(), dtype=np.float32),
            "action_mask": self.mask(),
        }

    @property
    def queue_length(self) -> int:
        """Jobs that wait."""
        return len(self.queue)

    @property
    def num_late(self) -> int:
        """Jobs that wait though their deadline to start has passed."""
        return sum(job.start_by < self.tick for job in self.queue)

    @property
    def num_running(self) -> int:
        """Jobs that run."""
        return sum(len(server.running) for server in self.servers)

    @property
    def num_awake(self) -> int:
        """Servers that are ACTIVE or WAKING."""
        return sum(server.mode != ASLEEP for server in self.servers)

    @property
    def power_w(self) -> float:
        """What the cluster draws now, in watts."""
        return sum(self.server_power_w(server) for server in self.servers)

    def server_power_w(self, server: Server) -> float:
        """What one server draws now, in watts."""
        if server.mode == ASLEEP:
            return _on_grid(self.config.standby_factor * server.idle_w)
        if server.mode == WAKING:
            return _on_grid(self.config.wake_power_factor * server.idle_w)
        return active_power_w(server, server.cpu_used / server.capacity[0])

    def _start_by(self, arrival: int, duration: int) -> int:
        slacks = [NEVER]
        if self.config.sla_latency_ticks is not None:
            slacks.append(self.config.sla_latency_ticks)
        if self.config.sla_stretch is not None:
            # Rounded first: 10 ticks at a stretch of 1.6 have 6 to spare, not 6.000000000000001.
            spare = round((self.config.sla_stretch - 1) * duration, 9)
            slacks.append(max(1, math.ceil(spare)))
        return min(arrival + min(slacks), NEVER)

    def _let_jobs_arrive(self) -> None:
        jobs = self.jobs_at.get(self.tick, [])
        for job in jobs:
            self.arrived += 1
            is_placeable = any(_fits(job.demand, server.capacity) for server in self.servers)
            if is_placeable and len(self.queue) < self.config.queue_capacity:
                self.queue.append(job)
                continue
            self.rejected += 1
            self.unplaceable += not is_placeable
            self._count_violation()
        if self.config.window_order == "laxity":
            self.queue.sort(key=lambda job: job.start_by)  # stable: newcomers go behind equals

        work = sum(job.demand[0] * job.duration for job in jobs)
        for i, horizon in enumerate(RATE_HORIZONS):
            gain = max(1.0 / horizon, 1.0 / (self.tick + 1))
            self.arrival_rate[i] += gain * (len(jobs) - self.arrival_rate[i])
            self.work_rate[i] += gain * (work - self.work_rate[i])
        self.work_square += gain * (work * work - self.work_square)  # the slowest gain

    def _place(self, job: Job, n: int) -> None:
        server = self.servers[n]
        job.start, job.server = self.tick, n
        server.free = [free - need for free, need in zip(server.free, job.demand, strict=True)]
        server.running.append(job)
        self.started += 1

    def _toggle(self, server: Server) -> float:
        """Put an idle server to sleep or wake a sleeping one; return the price."""
        if server.mode == ACTIVE:
            server.mode = ASLEEP
            self.sleep_requests += 1
            return self.config.reward.toggle_penalty * 15.0 / self.num_servers
        server.mode, server.wake_left = WAKING, self.wake_delay_ticks
        if server.wake_left == 0:
            server.mode, server.idle_since = ACTIVE, self.tick
        self.wake_requests += 1
        return 0.0

    def _end_tick(self) -> tuple[float, float]:
        """Pay for this tick, then move to the next; return the price (of the reward) and cost."""
        power_w = self.power_w
        self.energy_j += power_w * self.config.tick_s
        self.cpu_ticks += sum(server.cpu_used for server in self.servers)
        self.awake_ticks += self.num_awake

        for job in [job for job in self.queue if job.start_by == self.tick]:
            self._count_violation()
            if self.config.drop_expired:
                self.queue.remove(job)
                self.dropped += 1
        late = sum(job.start_by <= self.tick for job in self.queue)
        self.late_job_ticks += late

        weights = self.config.reward
        price = (
            weights.alpha * power_w / self.total_max_w
            + weights.beta * self.new_violations / self.num_servers
            + weights.late_penalty * late / self.num_servers
        )
        cost = float(self.new_violations + weights.cost_late_rate * late)
        self.new_violations = 0

        self.tick += 1
        self.decisions_in_tick = 0
        for server in self.servers:
            self._complete_jobs(server)
            if server.mode == WAKING:
                server.wake_left -= 1
                if server.wake_left == 0:
                    server.mode, server.idle_since = ACTIVE, self.tick
        if self.tick < self.config.episode_ticks:
            self._let_jobs_arrive()
        return price, cost

    def _complete_jobs(self, server: Server) -> None:
        for job in [job for job in server.running if job.end == self.tick]:
            server.running.remove(job)
            server.free = [free + need for free, need in zip(server.free, job.demand, strict=True)]
            self.completed += 1
            if not server.running:
                server.idle_since = self.tick

    def _count_violation(self) -> None:
        self.violations += 1
        self.new_violations += 1

    def _can_place(self) -> bool:
        num_placements = self.visible_jobs * self.num_servers
        return any(self.is_legal(action) for action in range(num_placements))

    def _server_features(self, server: Server) -> list[float]:
        now = self.tick
        ends = [job.end for job in server.running]
        is_idle = server.mode == ACTIVE and not server.running
        releasing = sum(j.demand[0] for j in server.running if j.end <= now + RELEASE_HORIZON)
        return [
            *_shares(server.free, self.reference_capacity),
            *_shares(server.capacity, self.reference_capacity),
            server.idle_w / self.reference_w,
            server.max_w / self.reference_w,
            active_power_w(server, 0.5) / self.reference_w,
            float(server.mode == ACTIVE),
            float(server.mode == WAKING),
            float(server.mode == ASLEEP),
            _squash(server.wake_left, 5),
            _squash(len(ends), 8),
            _squash(min(ends) - now, 30) if ends else 0.0,
            _squash(max(ends) - now, 30) if ends else 0.0,
            _squash(now - server.idle_since, 30) if is_idle else 0.0,
            releasing / self.reference_capacity[0],
        ]

    def _job_features(self, job: Job) -> list[float]:
        return [
            *(min(1.0, share) for share in _shares(job.demand, self.reference_capacity)),
            _squash(job.duration, 30),
            _squash(self.tick - job.arrival, 30),
            1.0 if job.start_by == NEVER else _squash(job.start_by - self.tick, 30),
            1.0,
        ]

    def _context_features(self) -> list[float]:
        queued = [sum(job.demand[r] for job in self.queue) for r in range(self.num_resources)]
        seconds = self.time_of_day_s + self.tick * (self.config.tick_s + self.day_gain_s)
        day = (seconds / 86_400) % 1.0
        return [
            _squash(len(self.queue), self.num_servers),
            *(_squash(share, 1) for share in _shares(queued, self.total_capacity)),
            *(_squash(rate, self.num_servers) for rate in self.arrival_rate),
            *(_squash(rate / self.total_capacity[0], 1) for rate in self.work_rate),
            math.sin(2 * math.pi * day),
            math.cos(2 * math.pi * day),
            self.num_awake / self.num_servers,
            min(1.0, self.power_w / self.total_max_w),
            self.decisions_in_tick / self.config.decisions_per_tick,
            _squash(self.wake_delay_ticks, 5),
            _squash(self.num_late, self.num_servers),
            _squash(math.sqrt(self.work_square) / self.total_capacity[0], 1),
        ]


def _on_grid(watts: float) -> float:
    """Round to the grid on which sums are exact in any order."""
    return math.floor(watts * 2**20 + 0.5) * 2**-20


def _fits(demand: list[float], room: list[float]) -> bool:
    return all(need <= space for need, space in zip(demand, room, strict=True))


def _shares(parts: list[float], wholes: list[float]) -> list[float]:
    return [part / whole for part, whole in zip(parts, wholes, strict=True)]


def _squash(x: float, scale: float) -> float:
    """Map any number into (-1, 1), with half of it reached at `scale`."""
    return x / (abs(x) + scale)


def active_power_w(server: Server, load: float) -> float:
    """What an awake server draws with this share of its CPU in use, in watts."""
    if server.exponent > 0:
        dynamic_w = server.max_w - server.idle_w
        return _on_grid(server.idle_w + dynamic_w * load**server.exponent)
    x = load * 10.0
    i = min(int(x), 9)
    low_w, high_w = server.curve_w[i], server.curve_w[i + 1]
    return _on_grid(low_w + (high_w - low_w) * (x - i))
