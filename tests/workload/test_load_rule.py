"""Every workload offers the load that it was asked for, in the busiest resource."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cloudsched.config import FleetConfig
from cloudsched.errors import ConfigError
from cloudsched.sim.fleet import Fleet, build_fleet
from cloudsched.workload.base import Workload
from cloudsched.workload.catalog import WORKLOADS
from cloudsched.workload.load import arrivals_per_tick, is_placeable, offered_work

Make = Callable[..., Workload]
NUM_TICKS = 1000


def realised_load(workload: Workload, fleet: Fleet, num_seeds: int, num_ticks: int) -> float:
    work = np.zeros(fleet.num_resources)
    for seed in range(num_seeds):
        jobs = workload.jobs(seed, num_ticks)
        work += offered_work(jobs.demand, jobs.duration_ticks, fleet=fleet).sum(axis=0)
    return float(work.max()) / (num_seeds * num_ticks)


@pytest.mark.parametrize("name", [n for n, e in WORKLOADS.items() if not e.needs_file])
@pytest.mark.parametrize("load", [0.3, 1.2])
def test_the_realised_load_of_many_seeds_is_the_target(
    make: Make, fleet: Fleet, name: str, load: float
) -> None:
    workload = make(name, load=load)
    tolerance = 0.04 if name == "google_v2_bursty" else 0.03
    assert realised_load(workload, fleet, 250, NUM_TICKS) == pytest.approx(load, rel=tolerance)


@pytest.mark.parametrize("name", [n for n, e in WORKLOADS.items() if e.needs_file])
@pytest.mark.parametrize("load", [0.1, 0.9])
def test_a_replayed_recording_offers_the_target_as_a_whole(
    make: Make, fleet: Fleet, recordings: dict[str, Path], name: str, load: float
) -> None:
    workload = make(name, load=load)
    laps_of_300_jobs = round(50 * 300 / workload.jobs_per_tick)
    assert realised_load(workload, fleet, 2, laps_of_300_jobs) == pytest.approx(load, rel=0.02)


@pytest.mark.parametrize("name", [n for n, e in WORKLOADS.items() if e.needs_file])
def test_windows_of_a_recording_offer_the_target_on_average(
    make: Make, fleet: Fleet, name: str
) -> None:
    workload = make(name, load=0.5)
    assert realised_load(workload, fleet, 1000, 40) == pytest.approx(0.5, rel=0.06)


def test_options_and_ticks_do_not_move_the_load(make: Make, fleet: Fleet) -> None:
    bursts = {"amplitude": 1.0, "bursts_per_day": 100.0, "burst_minutes": 30.0}
    for workload in (
        make("diurnal", tick_s=300.0, **bursts),
        make("bursty", spread_ticks=20, mean_tasks=3.0, task_duration_cv=0.5),
        make("google_v2_bursty", max_tasks_per_job=5, tick_s=300.0),
        make("poisson", mean_duration_ticks=2.0, cpu_min=0.0),
    ):
        assert realised_load(workload, fleet, 80, NUM_TICKS) == pytest.approx(0.5, rel=0.03)


def test_jobs_that_fit_nowhere_count_as_no_work(make: Make, fleet: Fleet) -> None:
    workload = make("poisson", cpu_max=4.0)
    jobs = workload.jobs(0, NUM_TICKS)
    share = is_placeable(jobs.demand, fleet).mean()
    assert 0.2 < share < 0.5  # the biggest server has 1.4
    assert realised_load(workload, fleet, 250, NUM_TICKS) == pytest.approx(0.5, rel=0.03)


def test_a_job_may_fit_no_server_though_each_of_its_demands_fits_one() -> None:
    config = FleetConfig(num_servers=3)
    fleet = build_fleet(config)
    lopsided = Fleet(
        resources=fleet.resources,
        models=fleet.models,
        capacity=np.array([[1.0, 0.2], [0.2, 1.0], [0.5, 0.1]]),
        idle_w=fleet.idle_w,
        max_w=fleet.max_w,
        exponent=fleet.exponent,
        curve_w=fleet.curve_w,
    )
    demand = np.array([[0.9, 0.1], [0.1, 0.9], [0.5, 0.5], [1.0, 0.2], [1.0, 0.21]])
    assert is_placeable(demand, lopsided).tolist() == [True, True, False, True, False]


def test_the_rate_follows_from_the_busiest_resource(fleet: Fleet) -> None:
    demand = np.array([[0.2, 0.4], [0.4, 0.4]])
    ticks = np.array([10, 20], dtype=np.int32)
    # memory: (0.4 * 10 + 0.4 * 20) / 2 = 6 a job, of 15.5 in the fleet
    rate = arrivals_per_tick(demand, ticks, fleet=fleet, load=0.5)
    assert rate == pytest.approx(0.5 * 15.5 / 6.0)


def test_demands_and_durations_are_the_same_at_any_load(make: Make) -> None:
    low, high = (make("poisson", load=load).jobs(4, 500) for load in (0.2, 0.4))
    assert len(high) > 1.5 * len(low)
    assert np.array_equal(low.demand, high.demand[: len(low)])
    assert np.array_equal(low.duration_ticks, high.duration_ticks[: len(low)])


def test_a_workload_of_jobs_that_all_fit_nowhere_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"No job of this workload fits.*larger servers"):
        make("poisson", cpu_min=2.0, cpu_max=3.0)
