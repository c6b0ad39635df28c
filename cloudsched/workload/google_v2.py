"""Tasks like those of Google's 2011 cluster, drawn from packaged summary figures.

`data/google_v2.json` holds how often each (cpu, memory) request occurs and how long tasks of such
requests run, for the tasks that finished in the first 19.5 hours of clusterdata-2011-2 (Google,
CC BY 4.0). A draw picks a request by its share, then a duration from the quantiles of its group,
so the marginals and the rank correlations are those of the trace. `fit_google_v2` rebuilds it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from cloudsched.config import Settings
from cloudsched.errors import ConfigError
from cloudsched.sim.fleet import Fleet
from cloudsched.sim.jobs import JobTable
from cloudsched.workload.base import (
    FloatArray,
    IntArray,
    check_length,
    normal_cdf,
    random_streams,
    whole_ticks,
)
from cloudsched.workload.load import REFERENCE_JOBS, REFERENCE_SEED, arrivals_per_tick

DATA_FILE = "data/google_v2.json"
TIMINGS = ("poisson", "bursty")
GOLDEN_RATIO = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True, kw_only=True)
class GoogleV2Options(Settings):
    """When tasks arrive; what they ask for and how long they run is Google's."""

    timing: str = "poisson"
    """`poisson`: independent tasks, the easy version; `bursty`: jobs arrive, with all their tasks
    in one tick, which share a request and nearly a duration, as in the trace."""
    max_tasks_per_job: int = 32
    """Tasks of a job are cut to this many (bursty only); Google's largest has 10,425. With the
    default, 15 servers at load 0.5 that never sleep miss under 1 % of their deadlines."""

    def __post_init__(self) -> None:
        self._choice("timing", TIMINGS)
        self._integer("max_tasks_per_job", low=1, high=100_000)


@dataclass(frozen=True, kw_only=True)
class GoogleV2BurstyOptions(GoogleV2Options):
    """The same, with the bursty timing that the name promises."""

    timing: str = "bursty"
    """Always `bursty`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timing != "bursty":
            raise ConfigError(
                f"timing={self.timing!r}: expected bursty; the workload with independent tasks is "
                "'google_v2_sampled'."
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class GoogleV2Table:
    """The packaged figures: S requests, G groups of durations with Q quantiles each."""

    cpu: FloatArray  # (S,)
    memory: FloatArray  # (S,)
    cumulative_share: FloatArray  # (S,) of tasks, ends at 1
    group: IntArray  # (S,)
    level: FloatArray  # (Q,) from 0 to 1
    log_duration: FloatArray  # (G, Q) logarithm of seconds
    job_tasks: IntArray  # (T,) numbers of tasks that jobs have
    job_share: FloatArray  # (T,) share of jobs, sums to 1
    job_weight: float
    """What tasks of one job share of the normal variable behind the rank of their duration."""

    def request(self, rank: FloatArray) -> IntArray:
        """Pick requests by uniform ranks."""
        return np.searchsorted(self.cumulative_share, rank, side="right")

    def duration_s(self, request: IntArray, rank: FloatArray) -> FloatArray:
        """Return the durations at these ranks among tasks of the same group."""
        place = np.interp(rank, self.level, np.arange(len(self.level)))
        left = np.minimum(place.astype(np.int64), len(self.level) - 2)
        group = self.group[request]
        low, high = self.log_duration[group, left], self.log_duration[group, left + 1]
        duration_s: FloatArray = np.exp(low + (place - left) * (high - low))
        return duration_s

    def rank_in_job(self, shared: FloatArray, own: FloatArray) -> FloatArray:
        """Return ranks of durations from standard normals: of a task's job, and its own."""
        weight = self.job_weight
        return normal_cdf(math.sqrt(weight) * shared + math.sqrt(1.0 - weight) * own)


class GoogleV2Workload:
    """Tasks drawn from the packaged figures; a row of the table is a task."""

    def __init__(
        self, options: GoogleV2Options, *, fleet: Fleet, tick_s: float, load: float
    ) -> None:
        self._options = options
        self._tick_s = tick_s
        self._num_resources = fleet.num_resources
        self._table = table = load_table()
        self._job_tasks = np.minimum(table.job_tasks, options.max_tasks_per_job)
        self._job_cumulative = np.cumsum(table.job_share)
        self._tasks_per_job = float((self._job_tasks * table.job_share).sum())
        # A few of the longest tasks hold much of the work: evenly spread ranks are far more exact
        # here than random ones.
        count = np.arange(REFERENCE_JOBS, dtype=np.float64)
        request = table.request((count + 0.5) / REFERENCE_JOBS)
        duration_s = table.duration_s(request, count * GOLDEN_RATIO % 1.0)
        rng = np.random.default_rng(REFERENCE_SEED)
        demand = self._demand(request, rng.random((REFERENCE_JOBS, self._num_extra)))
        self._rate = arrivals_per_tick(
            demand, whole_ticks(duration_s, tick_s), fleet=fleet, load=load
        )

    @property
    def jobs_per_tick(self) -> float:
        """Mean number of arriving tasks a tick."""
        return self._rate

    def sample_tasks(
        self, num_tasks: int, rng: np.random.Generator
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return cpu, memory and seconds of independent tasks, as Google reports them."""
        rank = rng.random((num_tasks, 2))
        request = self._table.request(rank[:, 0])
        duration_s = self._table.duration_s(request, rank[:, 1])
        return self._table.cpu[request], self._table.memory[request], duration_s

    def jobs(self, seed: int, num_ticks: int) -> JobTable:
        """Return the arrivals of one episode."""
        check_length(num_ticks, self._rate)
        if self._options.timing == "poisson":
            return self._independent_tasks(seed, num_ticks)
        return self._jobs_of_tasks(seed, num_ticks)

    def _independent_tasks(self, seed: int, num_ticks: int) -> JobTable:
        arrival_rng, task_rng = random_streams(seed, 2)
        counts = arrival_rng.poisson(self._rate, num_ticks)
        rank = task_rng.random((int(counts.sum()), 2 + self._num_extra))
        request = self._table.request(rank[:, 0])
        duration_s = self._table.duration_s(request, rank[:, 1])
        return JobTable(
            arrival_tick=np.repeat(np.arange(num_ticks), counts),
            demand=self._demand(request, rank[:, 2:]),
            duration_ticks=whole_ticks(duration_s, self._tick_s),
        )

    def _jobs_of_tasks(self, seed: int, num_ticks: int) -> JobTable:
        arrival_rng, job_rng, normal_rng, task_rng = random_streams(seed, 4)
        counts = arrival_rng.poisson(self._rate / self._tasks_per_job, num_ticks)
        num_jobs = int(counts.sum())
        rank = job_rng.random((num_jobs, 2 + self._num_extra))
        request = self._table.request(rank[:, 0])
        size = np.searchsorted(self._job_cumulative, rank[:, 1], side="right")
        tasks = self._job_tasks[np.minimum(size, len(self._job_tasks) - 1)]
        demand = self._demand(request, rank[:, 2:])
        # Requests are drawn by their share of tasks, not of jobs, so tasks keep Google's marginals.
        shared = np.repeat(normal_rng.standard_normal(num_jobs), tasks)
        task_rank = self._table.rank_in_job(shared, task_rng.standard_normal(len(shared)))
        duration_s = self._table.duration_s(np.repeat(request, tasks), task_rank)
        return JobTable(
            arrival_tick=np.repeat(np.repeat(np.arange(num_ticks), counts), tasks),
            demand=np.repeat(demand, tasks, axis=0),
            duration_ticks=whole_ticks(duration_s, self._tick_s),
        )

    @property
    def _num_extra(self) -> int:
        return max(0, self._num_resources - 2)

    def _demand(self, request: IntArray, extra_rank: FloatArray) -> FloatArray:
        """Return (J, R): cpu, memory, and memory of unrelated requests for every other resource."""
        table = self._table
        columns = [table.cpu[request], table.memory[request]]
        columns += [table.memory[table.request(rank)] for rank in extra_rank.T]
        return np.stack(columns[: self._num_resources], axis=1)


@cache
def load_table() -> GoogleV2Table:
    """Read the packaged figures, once."""
    text = files("cloudsched.workload").joinpath(DATA_FILE).read_text("utf-8")
    return table_from_json(json.loads(text))


def table_from_json(figures: dict[str, Any]) -> GoogleV2Table:
    """Turn the file's lists into arrays."""
    requests, durations, jobs = figures["requests"], figures["durations"], figures["jobs"]
    cumulative = np.cumsum(np.array(requests["tasks"], dtype=np.float64))
    num_jobs = np.array(jobs["jobs"], dtype=np.float64)
    return GoogleV2Table(
        cpu=np.array(requests["cpu"], dtype=np.float64),
        memory=np.array(requests["memory"], dtype=np.float64),
        cumulative_share=cumulative / cumulative[-1],
        group=np.array(requests["group"], dtype=np.int64),
        level=np.array(durations["level"], dtype=np.float64),
        log_duration=np.log(np.array(durations["quantile_s"], dtype=np.float64)),
        job_tasks=np.array(jobs["tasks"], dtype=np.int64),
        job_share=num_jobs / num_jobs.sum(),
        job_weight=float(durations["job_weight"]),
    )
