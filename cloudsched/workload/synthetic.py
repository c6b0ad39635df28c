"""Synthetic workloads: `poisson`, `diurnal` and `bursty`, all with the same kind of job."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cloudsched.sim.fleet import Fleet
from cloudsched.sim.jobs import JobTable
from cloudsched.workload.base import DAY_S, FloatArray, check_length, random_streams
from cloudsched.workload.load import REFERENCE_JOBS, REFERENCE_SEED, arrivals_per_tick
from cloudsched.workload.synthetic_jobs import JobOptions, draw_jobs, lognormal, rounded_ticks

PEAK_S = 14 * 3600.0  # the busiest time of a synthetic day


@dataclass(frozen=True, kw_only=True)
class DiurnalOptions(JobOptions):
    """The same jobs, arriving along a day with its peak at 14:00, and in bursts."""

    amplitude: float = 0.5
    """Swing of the rate around its mean: at the peak it is 1 + amplitude times the mean."""
    bursts_per_day: float = 8.0
    """Mean number of bursts a day, at any time of it."""
    burst_minutes: float = 10.0
    """Mean length of a burst, rounded to ticks, at least one; lengths are uniform around it."""
    burst_factor: float = 2.0
    """What a burst multiplies the rate by; overlapping bursts count once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("amplitude", low=0.0, high=1.0)
        self._number("bursts_per_day", low=0.0, high=1e4)
        self._number("burst_minutes", low=0.0, high=1440.0, exclusive=True)
        self._number("burst_factor", low=1.0, high=1e3)


@dataclass(frozen=True, kw_only=True)
class BurstyOptions(JobOptions):
    """Jobs made of many tasks that ask for the same and run about as long.

    Tasks are smaller and shorter than the jobs of `poisson`; at load 0.5 a cluster of 15 servers
    that never sleeps still misses under 1 % of its deadlines, so what a policy loses is its own.
    """

    cpu_min: float = 0.05
    cpu_max: float = 0.2
    memory_min: float = 0.05
    memory_max: float = 0.2
    mean_duration_ticks: float = 20.0
    mean_tasks: float = 6.0
    """Mean number of tasks in a job; geometric, at least 1."""
    spread_ticks: int = 1
    """Ticks over which the tasks of a job are submitted; 1 for all at once."""
    task_duration_cv: float = 0.1
    """Relative spread of the durations of one job's tasks around their job's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("mean_tasks", low=1.0, high=1e5)
        self._integer("spread_ticks", low=1, high=10_000)
        self._number("task_duration_cv", low=0.0, high=10.0)


class PoissonWorkload:
    """Independent jobs that arrive at a constant rate; ticks may have any length."""

    def __init__(self, options: JobOptions, *, fleet: Fleet, tick_s: float, load: float) -> None:
        self._options = options
        self._num_resources = fleet.num_resources
        self._rate = _rate_of_jobs(options, fleet=fleet, load=load)

    @property
    def jobs_per_tick(self) -> float:
        """Mean number of arrivals a tick."""
        return self._rate

    def jobs(self, seed: int, num_ticks: int) -> JobTable:
        """Return the arrivals of one episode."""
        check_length(num_ticks, self._rate)
        arrival_rng, job_rng = random_streams(seed, 2)
        counts = arrival_rng.poisson(self._rate, num_ticks)
        demand, duration = draw_jobs(self._options, int(counts.sum()), self._num_resources, job_rng)
        return JobTable(
            arrival_tick=np.repeat(np.arange(num_ticks), counts),
            demand=demand,
            duration_ticks=rounded_ticks(duration),
        )


class DiurnalWorkload:
    """Independent jobs at a rate that follows the time of day, with bursts.

    The time of day at tick 0 is drawn from the seed and told in `JobTable.time_of_day_s`. The mean
    rate over a day, bursts included, meets the load rule.
    """

    def __init__(
        self, options: DiurnalOptions, *, fleet: Fleet, tick_s: float, load: float
    ) -> None:
        self._options = options
        self._num_resources = fleet.num_resources
        self._tick_s = tick_s
        self._rate = _rate_of_jobs(options, fleet=fleet, load=load)
        self._burst_ticks = max(1, round(options.burst_minutes * 60.0 / tick_s))
        self._bursts_per_tick = options.bursts_per_day * tick_s / DAY_S
        # The number of bursts under way is Poisson, so this is the share of ticks with any.
        burst_share = -math.expm1(-self._bursts_per_tick * self._burst_ticks)
        self._calm_rate = self._rate / (1.0 + (options.burst_factor - 1.0) * burst_share)

    @property
    def jobs_per_tick(self) -> float:
        """Mean number of arrivals a tick, over a day."""
        return self._rate

    def jobs(self, seed: int, num_ticks: int) -> JobTable:
        """Return the arrivals of one episode."""
        amplitude = self._options.amplitude
        check_length(num_ticks, self._calm_rate * (1.0 + amplitude) * self._options.burst_factor)
        arrival_rng, job_rng, burst_rng, length_rng, clock_rng = random_streams(seed, 5)
        start_s = float(clock_rng.uniform(0.0, DAY_S))
        time_s = start_s + (np.arange(num_ticks) + 0.5) * self._tick_s
        day = 1.0 + amplitude * np.cos(2.0 * math.pi / DAY_S * (time_s - PEAK_S))
        burst = self._bursts(num_ticks, burst_rng, length_rng)
        counts = arrival_rng.poisson(self._calm_rate * day * burst)
        demand, duration = draw_jobs(self._options, int(counts.sum()), self._num_resources, job_rng)
        return JobTable(
            arrival_tick=np.repeat(np.arange(num_ticks), counts),
            demand=demand,
            duration_ticks=rounded_ticks(duration),
            time_of_day_s=start_s,
        )

    def _bursts(
        self, num_ticks: int, burst_rng: np.random.Generator, length_rng: np.random.Generator
    ) -> FloatArray:
        """Return (T,): the burst factor in ticks with a burst under way, 1 in the others."""
        longest = 2 * self._burst_ticks - 1
        early = longest - 1  # ticks before the episode whose bursts may reach into it
        starts = burst_rng.poisson(self._bursts_per_tick, early + num_ticks)
        begin = np.repeat(np.arange(len(starts)), starts)
        length = length_rng.integers(1, longest, size=len(begin), endpoint=True)
        change = np.bincount(begin, minlength=len(starts) + longest)
        change -= np.bincount(begin + length, minlength=len(change))
        is_burst = np.cumsum(change)[early : early + num_ticks] > 0
        return np.where(is_burst, self._options.burst_factor, 1.0)


class BurstyWorkload:
    """Jobs of many like tasks; a row of the table is a task."""

    def __init__(self, options: BurstyOptions, *, fleet: Fleet, tick_s: float, load: float) -> None:
        self._options = options
        self._num_resources = fleet.num_resources
        self._rate = _rate_of_jobs(
            options, fleet=fleet, load=load, task_duration_cv=options.task_duration_cv
        )

    @property
    def jobs_per_tick(self) -> float:
        """Mean number of arriving tasks a tick."""
        return self._rate

    def jobs(self, seed: int, num_ticks: int) -> JobTable:
        """Return the arrivals of one episode."""
        options = self._options
        check_length(num_ticks, self._rate)
        arrival_rng, size_rng, job_rng, jitter_rng, delay_rng = random_streams(seed, 5)
        early = options.spread_ticks - 1  # ticks before the episode whose jobs may reach into it
        counts = arrival_rng.poisson(self._rate / options.mean_tasks, early + num_ticks)
        num_jobs = int(counts.sum())
        tasks = size_rng.geometric(1.0 / options.mean_tasks, num_jobs)
        demand, duration = draw_jobs(options, num_jobs, self._num_resources, job_rng)
        tick = np.repeat(np.repeat(np.arange(len(counts)), counts), tasks) - early
        tick += delay_rng.integers(options.spread_ticks, size=len(tick))
        normal = jitter_rng.standard_normal(len(tick))
        duration = np.repeat(duration, tasks) * lognormal(normal, 1.0, options.task_duration_cv)
        order = np.argsort(tick, kind="stable")
        order = order[(tick[order] >= 0) & (tick[order] < num_ticks)]
        return JobTable(
            arrival_tick=tick[order].astype(np.int32),
            demand=np.repeat(demand, tasks, axis=0)[order],
            duration_ticks=rounded_ticks(duration[order]),
        )


def _rate_of_jobs(
    options: JobOptions, *, fleet: Fleet, load: float, task_duration_cv: float = 0.0
) -> float:
    rng = np.random.default_rng(REFERENCE_SEED)
    demand, duration = draw_jobs(options, REFERENCE_JOBS, fleet.num_resources, rng)
    duration *= lognormal(rng.standard_normal(REFERENCE_JOBS), 1.0, task_duration_cv)
    return arrivals_per_tick(demand, rounded_ticks(duration), fleet=fleet, load=load)
