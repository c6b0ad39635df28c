"""What holds for everything in the catalogue."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest

from cloudsched.config import FleetConfig
from cloudsched.errors import ConfigError, UnknownNameError
from cloudsched.sim.fleet import Fleet, build_fleet
from cloudsched.sim.jobs import JobTable
from cloudsched.workload.base import Workload
from cloudsched.workload.catalog import WORKLOADS, make_workload

Make = Callable[..., Workload]
each_workload = pytest.mark.parametrize("name", list(WORKLOADS))


def is_same(a: JobTable, b: JobTable) -> bool:
    return (
        np.array_equal(a.arrival_tick, b.arrival_tick)
        and np.array_equal(a.demand, b.demand)
        and np.array_equal(a.duration_ticks, b.duration_ticks)
        and a.time_of_day_s == b.time_of_day_s
        and a.day_s_per_tick == b.day_s_per_tick
    )


@each_workload
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(make: Make, name: str) -> None:
    first, second = make(name), make(name)
    assert is_same(first.jobs(7, 200), second.jobs(7, 200))
    assert not is_same(first.jobs(7, 200), first.jobs(8, 200))


@each_workload
def test_jobs_do_not_depend_on_what_was_asked_before(make: Make, name: str) -> None:
    used, fresh = make(name), make(name)
    used.jobs(1, 50)
    assert is_same(used.jobs(2, 100), fresh.jobs(2, 100))


@each_workload
def test_a_longer_episode_starts_with_the_same_jobs(make: Make, name: str) -> None:
    workload = make(name)
    for seed in range(5):
        assert is_same(workload.jobs(seed, 120), workload.jobs(seed, 400).before(120))


@each_workload
def test_arrivals_lie_in_the_episode_and_the_time_in_a_day(make: Make, name: str) -> None:
    workload = make(name)
    for seed in range(20):
        jobs = workload.jobs(seed, 100)
        assert len(jobs) == 0 or jobs.arrival_tick[-1] < 100
        assert 0.0 <= jobs.time_of_day_s < 86_400.0


@each_workload
def test_the_mean_number_of_arrivals_is_the_one_promised(make: Make, name: str) -> None:
    workload = make(name)
    rates = np.array([len(workload.jobs(seed, 500)) / 500 for seed in range(200)])
    allowed = max(0.06 * workload.jobs_per_tick, 3.0 * rates.std() / np.sqrt(len(rates)))
    assert rates.mean() == pytest.approx(workload.jobs_per_tick, abs=allowed)


@each_workload
@pytest.mark.parametrize("resources", [("cpu",), ("cpu", "memory")])
def test_a_fleet_of_one_or_two_resources_gets_as_many_demands(
    make: Make, name: str, resources: tuple[str, ...]
) -> None:
    jobs = make(name, fleet=build_fleet(FleetConfig(resources=resources))).jobs(0, 300)
    assert jobs.num_resources == len(resources)
    assert len(jobs) > 0
    assert (jobs.demand.max(axis=0) > 0.0).all()


@pytest.mark.parametrize("name", [n for n, e in WORKLOADS.items() if not e.needs_file])
def test_synthetic_workloads_serve_up_to_sixteen_resources(make: Make, name: str) -> None:
    resources = tuple(f"r{i}" for i in range(16))
    jobs = make(name, fleet=build_fleet(FleetConfig(resources=resources))).jobs(0, 300)
    assert jobs.num_resources == 16
    assert (jobs.demand.std(axis=0) > 0.0).all()


@each_workload
def test_a_seed_that_is_no_whole_number_is_refused(make: Make, name: str) -> None:
    workload = make(name)
    for seed in (-1, 1.5, "3", None, True):
        with pytest.raises(ConfigError, match=r"seed=.*at least 0"):
            workload.jobs(seed, 10)  # type: ignore[arg-type]


@each_workload
def test_a_length_that_makes_no_sense_is_refused(make: Make, name: str) -> None:
    workload = make(name)
    for num_ticks in (0, -5, 2.0, 10**9):
        with pytest.raises(ConfigError, match="num_ticks="):
            workload.jobs(0, num_ticks)  # type: ignore[arg-type]


@each_workload
def test_an_episode_of_one_tick_works(make: Make, name: str) -> None:
    workload = make(name, load=5.0)
    assert all((workload.jobs(seed, 1).arrival_tick == 0).all() for seed in range(20))


@each_workload
def test_a_workload_survives_pickling(make: Make, name: str) -> None:
    workload = make(name)
    assert is_same(pickle.loads(pickle.dumps(workload)).jobs(3, 100), workload.jobs(3, 100))


@each_workload
def test_an_unknown_option_is_refused(make: Make, name: str) -> None:
    with pytest.raises(ConfigError, match="No setting named 'colour'"):
        make(name, colour="red")


@pytest.mark.parametrize("load", [0.0, -1.0, float("nan"), float("inf"), 10.5, "0.5", True])
def test_a_load_out_of_range_is_refused(make: Make, load: object) -> None:
    with pytest.raises(ConfigError, match=r"load=.*above 0 and at most 10"):
        make("poisson", load=load)


@each_workload
def test_the_catalogue_describes_every_workload_and_its_options(name: str) -> None:
    entry = WORKLOADS[name]
    assert entry.description.endswith(".")
    assert entry.needs_file == ("path" in {f.name for f in fields(entry.options)})  # type: ignore[arg-type]


def test_the_catalogue_loads_no_parquet_reader() -> None:
    check = "import sys, cloudsched.workload.catalog; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_a_misspelt_option_is_answered_with_the_right_one(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'amplitude'"):
        make_workload("diurnal", fleet=fleet, tick_s=60.0, amplitud=0.3)


def test_a_misspelt_name_is_answered_with_the_right_one(fleet: Fleet) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'google_v2_sampled'"):
        make_workload("google_v2_sample", fleet=fleet, tick_s=60.0)


@pytest.mark.parametrize("tick_s", [0.0, -60.0, float("nan"), 1e9, "60"])
def test_a_tick_out_of_range_is_refused(make: Make, tick_s: object) -> None:
    with pytest.raises(ConfigError, match="tick_s="):
        make("poisson", tick_s=tick_s)


def test_something_else_than_a_fleet_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="expected a Fleet"):
        make("poisson", fleet=FleetConfig())


def test_an_episode_of_more_jobs_than_memory_holds_is_refused(make: Make) -> None:
    workload = make("poisson", load=10.0, cpu_min=0.0, cpu_max=1e-3, memory_max=0.1)
    with pytest.raises(ConfigError, match=r"jobs would arrive.*fewer ticks"):
        workload.jobs(0, 10_000_000)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("poisson", "cpu_max", 0.0),
        ("poisson", "cpu_min", 0.6),
        ("poisson", "rank_correlation", 1.5),
        ("poisson", "mean_duration_ticks", float("nan")),
        ("diurnal", "amplitude", 1.1),
        ("diurnal", "burst_factor", 0.5),
        ("bursty", "mean_tasks", 0.5),
        ("bursty", "spread_ticks", 0),
        ("google_v2_sampled", "timing", "weekly"),
        ("google_v2_bursty", "timing", "poisson"),
        ("google_v2_bursty", "max_tasks_per_job", 0),
        ("google_v2_trace", "path", ""),
        ("google_v2_trace", "ended", "late"),
        ("google_v2_trace", "until_s", 0.0),
        ("alibaba_gpu_2023", "server_gpus", 0.0),
        ("swf", "server_processors", 0),
        ("swf", "server_memory_kb", -1.0),
    ],
)
def test_a_bad_value_is_refused_by_name(make: Make, name: str, option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{option}="):
        make(name, **{option: value})
