"""Shapes of the synthetic workloads: their jobs, their days, their bursts."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from cloudsched.sim.jobs import JobTable
from cloudsched.workload.base import Workload, normal_cdf, random_streams
from cloudsched.workload.fit_google_v2 import spearman
from cloudsched.workload.synthetic_jobs import JobOptions, draw_jobs

Make = Callable[..., Workload]


def dispersion(jobs: JobTable, num_ticks: int) -> float:
    """Variance over mean of arrivals a tick; 1 for a Poisson process."""
    counts = np.bincount(jobs.arrival_tick, minlength=num_ticks)
    return float(counts.var() / counts.mean())


def test_poisson_jobs_look_as_the_options_say(make: Make) -> None:
    jobs = make("poisson").jobs(0, 100_000)
    cpu, memory = jobs.demand.T
    for demand in (cpu, memory):
        assert 0.1 <= demand.min() < 0.105
        assert 0.495 < demand.max() <= 0.5
        # uniform: the quantiles lie on a line
        assert np.quantile(demand, [0.25, 0.5, 0.75]) == pytest.approx([0.2, 0.3, 0.4], abs=0.005)
    assert spearman(cpu, memory) == pytest.approx(0.5, abs=0.02)
    assert jobs.duration_ticks.mean() == pytest.approx(30.0, rel=0.02)
    assert jobs.duration_ticks.std() / jobs.duration_ticks.mean() == pytest.approx(0.8, abs=0.04)
    assert jobs.duration_ticks.min() >= 1
    assert dispersion(jobs, 100_000) == pytest.approx(1.0, abs=0.03)


def test_compiled_demands_are_those_of_the_formula_to_the_last_bit() -> None:
    options = JobOptions(cpu_max=0.9, rank_correlation=0.3)
    demand, _ = draw_jobs(options, 5000, 3, np.random.default_rng(1))
    normal = np.random.default_rng(1).standard_normal((5000, 4))[:, :3]
    rho = 2.0 * math.sin(math.pi / 6.0 * 0.3)
    normal[:, 1:] = normal[:, 1:] * math.sqrt(1.0 - rho * rho) + rho * normal[:, :1]
    low, high = np.array([0.1, 0.1, 0.1]), np.array([0.9, 0.5, 0.5])
    np.testing.assert_array_equal(demand, low + (high - low) * normal_cdf(normal))


def test_streams_are_those_that_numpy_spawns() -> None:
    spawned = np.random.default_rng(1_000_007).spawn(3)
    for ours, theirs in zip(random_streams(1_000_007, 3), spawned, strict=True):
        assert ours.bit_generator.state == theirs.bit_generator.state


@pytest.mark.parametrize("correlation", [-1.0, -0.4, 0.0, 0.9, 1.0])
def test_the_rank_correlation_is_the_one_asked_for(make: Make, correlation: float) -> None:
    jobs = make("poisson", rank_correlation=correlation).jobs(0, 50_000)
    assert spearman(*jobs.demand.T) == pytest.approx(correlation, abs=0.02)


def test_about_0_86_default_jobs_arrive_a_tick(make: Make) -> None:
    assert make("poisson").jobs_per_tick == pytest.approx(0.861, abs=0.01)


def test_the_shortest_durations_are_one_tick(make: Make) -> None:
    jobs = make("poisson", mean_duration_ticks=1.0, duration_cv=5.0).jobs(0, 100)
    assert jobs.duration_ticks.min() == 1


def test_diurnal_arrivals_peak_at_two_in_the_afternoon(make: Make) -> None:
    workload = make("diurnal", bursts_per_day=0.0, amplitude=0.8)
    by_hour = np.zeros(24)
    for seed in range(40):
        jobs = workload.jobs(seed, 2880)
        second = jobs.time_of_day_s + (jobs.arrival_tick + 0.5) * 60.0
        by_hour += np.bincount((second % 86_400 // 3600).astype(int), minlength=24)
    share = by_hour / by_hour.mean()
    middle = np.arange(24) + 0.5
    expected = 1.0 + 0.8 * np.cos(2.0 * np.pi * (middle - 14.0) / 24.0)
    assert np.abs(share - expected).max() < 0.08


def test_diurnal_episodes_start_at_any_time_of_day(make: Make) -> None:
    workload = make("diurnal")
    hours = np.array([workload.jobs(seed, 1).time_of_day_s for seed in range(400)]) / 3600.0
    assert (np.histogram(hours, bins=4, range=(0.0, 24.0))[0] > 70).all()


def test_bursts_are_as_frequent_as_asked_and_multiply_the_rate(make: Make) -> None:
    workload = make(
        "diurnal", amplitude=0.0, bursts_per_day=24.0, burst_minutes=10.0, burst_factor=20.0, load=9
    )
    counts = np.concatenate(
        [np.bincount(workload.jobs(s, 5000).arrival_tick, minlength=5000) for s in range(8)]
    )
    is_burst = counts > 2.5 * np.median(counts)
    # 24 bursts of 10 minutes a day, overlaps counted once
    assert is_burst.mean() == pytest.approx(-np.expm1(-24 * 10 / 1440), abs=0.02)
    assert counts[is_burst].mean() / counts[~is_burst].mean() == pytest.approx(20.0, rel=0.05)


def test_an_episode_may_start_in_the_middle_of_a_burst(make: Make) -> None:
    workload = make("diurnal", amplitude=0.0, bursts_per_day=24.0, burst_factor=50.0, load=9)
    first = [len(workload.jobs(seed, 1)) for seed in range(400)]
    assert np.mean(np.array(first) > 5 * np.median(first)) == pytest.approx(0.15, abs=0.05)


def test_tasks_of_a_bursty_job_are_alike_and_arrive_together(make: Make) -> None:
    jobs = make("bursty").jobs(0, 20_000)
    demand, size = np.unique(jobs.demand, axis=0, return_counts=True)
    assert size.mean() == pytest.approx(6.0, rel=0.05)
    assert size.max() > 30
    for shared in demand[np.argsort(size)[-5:]]:
        is_task = (jobs.demand == shared).all(axis=1)
        assert len(np.unique(jobs.arrival_tick[is_task])) == 1
        ticks = jobs.duration_ticks[is_task]
        assert ticks.std() < 0.2 * ticks.mean() + 0.5
    assert dispersion(jobs, 20_000) > 8.0


def test_tasks_of_a_bursty_job_may_be_spread_over_ticks(make: Make) -> None:
    jobs = make("bursty", spread_ticks=5, mean_tasks=50.0).jobs(0, 5000)
    _, job = np.unique(jobs.demand, axis=0, return_inverse=True)
    job = job.reshape(-1)
    is_first = jobs.arrival_tick[job == job[len(job) // 2]]
    assert 1 <= np.ptp(is_first) <= 4
    # tasks of jobs from before the episode keep its first ticks as busy as the others
    workload = make("bursty", spread_ticks=50)
    early = np.mean([len(workload.jobs(seed, 10)) for seed in range(600)]) / 10
    assert early == pytest.approx(workload.jobs_per_tick, rel=0.08)


def test_the_normal_distribution_function_is_right() -> None:
    values = np.array([-8.0, -1.959964, -0.5, 0.0, 1.0, 2.326348, 8.0])
    expected = [0.0, 0.025, 0.3085375, 0.5, 0.8413447, 0.99, 1.0]
    assert normal_cdf(values) == pytest.approx(expected, abs=2e-6)
