"""The sampled Google workload against the trace it was derived from."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from cloudsched.sim.jobs import on_grid
from cloudsched.workload.base import FloatArray, Workload
from cloudsched.workload.fit_google_v2 import fit, main, spearman, to_text
from cloudsched.workload.google_v2 import DATA_FILE, GoogleV2Workload, load_table

Make = Callable[..., Workload]
NUM_TASKS = 200_000


def packaged_text() -> str:
    return files("cloudsched.workload").joinpath(DATA_FILE).read_text("utf-8")


def ks_distance(x: FloatArray, y: FloatArray) -> float:
    """Largest distance between two empirical distribution functions."""
    points = np.concatenate([x, y])
    below_x = np.searchsorted(np.sort(x), points, side="right") / len(x)
    below_y = np.searchsorted(np.sort(y), points, side="right") / len(y)
    return float(np.abs(below_x - below_y).max())


@pytest.fixture(scope="module")
def real(data_folder: Path) -> dict[str, FloatArray]:
    with gzip.open(data_folder / "google_v2_tasks_sample.csv.gz", "rt") as file:
        names = file.readline().strip().split(",")
        values = np.loadtxt(file, delimiter=",")
    return dict(zip(names, values.T, strict=True))


@pytest.fixture
def sampled(make: Make) -> tuple[FloatArray, FloatArray, FloatArray]:
    workload = make("google_v2_sampled")
    assert isinstance(workload, GoogleV2Workload)
    return workload.sample_tasks(NUM_TASKS, np.random.default_rng(1))


def test_the_marginals_are_those_of_the_trace(
    sampled: tuple[FloatArray, FloatArray, FloatArray], real: dict[str, FloatArray]
) -> None:
    names = ("cpu_req", "mem_req", "duration_s")
    distances = [ks_distance(x, real[name]) for x, name in zip(sampled, names, strict=True)]
    assert max(distances) <= 0.01, dict(zip(names, distances, strict=True))


def test_the_rank_correlations_are_those_of_the_trace(
    sampled: tuple[FloatArray, FloatArray, FloatArray], real: dict[str, FloatArray]
) -> None:
    trace = (real["cpu_req"], real["mem_req"], real["duration_s"])
    for i, j in ((0, 1), (0, 2), (1, 2)):
        expected = spearman(trace[i], trace[j])
        assert spearman(sampled[i], sampled[j]) == pytest.approx(expected, abs=0.02)


def test_the_work_of_a_task_is_that_of_the_trace(
    sampled: tuple[FloatArray, FloatArray, FloatArray], real: dict[str, FloatArray]
) -> None:
    cpu, memory, duration_s = sampled
    for mine, name in ((cpu, "cpu_req"), (memory, "mem_req")):
        expected = np.mean(real[name] * real["duration_s"])
        assert np.mean(mine * duration_s) == pytest.approx(expected, rel=0.05)


def test_without_the_trace_the_sample_still_has_its_correlations(
    sampled: tuple[FloatArray, FloatArray, FloatArray],
) -> None:
    cpu, memory, duration_s = sampled
    expected = json.loads(packaged_text())["spearman"]
    assert spearman(cpu, memory) == pytest.approx(expected["cpu_memory"], abs=0.02)
    assert spearman(cpu, duration_s) == pytest.approx(expected["cpu_duration"], abs=0.02)
    assert spearman(memory, duration_s) == pytest.approx(expected["memory_duration"], abs=0.02)
    assert np.mean(cpu == 0.0) == pytest.approx(0.0053, abs=0.001)
    assert np.median(duration_s) == pytest.approx(460.0, rel=0.03)


def test_durations_are_rounded_up_to_ticks(make: Make) -> None:
    minute, hour = (make("google_v2_sampled", tick_s=t).jobs(0, 2000) for t in (60.0, 3600.0))
    assert minute.duration_ticks.min() == 1
    assert np.median(minute.duration_ticks) == pytest.approx(460.0 / 60.0, abs=0.6)
    assert np.mean(hour.duration_ticks == 1) == pytest.approx(0.865, abs=0.02)


def test_episodes_have_the_same_marginals_with_either_timing(
    make: Make, sampled: tuple[FloatArray, FloatArray, FloatArray]
) -> None:
    cpu, memory, duration_s = sampled
    expected = (on_grid(cpu), on_grid(memory), np.ceil(duration_s / 60.0))
    for name, tolerance in (("google_v2_sampled", 0.01), ("google_v2_bursty", 0.025)):
        jobs = make(name).jobs(0, 100_000)
        got = (jobs.demand[:, 0], jobs.demand[:, 1], jobs.duration_ticks.astype(np.float64))
        for mine, reference in zip(got, expected, strict=True):
            assert ks_distance(mine, reference) < tolerance


def test_tasks_of_a_bursty_job_share_request_and_nearly_duration(make: Make) -> None:
    jobs = make("google_v2_bursty", tick_s=1.0, max_tasks_per_job=200).jobs(0, 3_000_000)
    _, first, job, size = np.unique(
        np.column_stack([jobs.arrival_tick, jobs.demand]),
        axis=0,
        return_index=True,
        return_inverse=True,
        return_counts=True,
    )
    is_pair = size > 1
    one, other = first[is_pair], first[is_pair] + 1
    assert np.array_equal(job.reshape(-1)[one], job.reshape(-1)[other])
    log_ticks = np.log(jobs.duration_ticks)
    # for a pair of one job this correlation is the share of variance that lies between jobs
    assert np.corrcoef(log_ticks[one], log_ticks[other])[0, 1] == pytest.approx(0.90, abs=0.015)
    assert size.max() == 200
    assert np.mean(size == 1) == pytest.approx(0.80, abs=0.02)


def test_no_bursty_job_has_more_tasks_than_allowed(make: Make) -> None:
    jobs = make("google_v2_bursty", max_tasks_per_job=3, load=0.02).jobs(0, 5000)
    _, size = np.unique(
        np.column_stack([jobs.arrival_tick, jobs.demand]), axis=0, return_counts=True
    )
    assert np.quantile(size, 0.99) == 3.0


def test_bursty_timing_is_the_option_of_the_sampled_workload(make: Make) -> None:
    one, other = make("google_v2_sampled", timing="bursty"), make("google_v2_bursty")
    assert np.array_equal(one.jobs(3, 200).demand, other.jobs(3, 200).demand)


def test_the_packaged_figures_are_small_attributed_and_consistent() -> None:
    text = packaged_text()
    figures = json.loads(text)
    assert len(text) < 60_000
    assert "Google clusterdata-2011-2" in figures["about"]["source"]
    assert "CC BY 4.0" in figures["about"]["license"]
    table = load_table()
    assert (np.diff(table.log_duration, axis=1) >= 0.0).all()
    assert table.group.max() == len(table.log_duration) - 1
    assert 0.0 < table.job_weight < 1.0


def test_the_packaged_figures_can_be_rebuilt_from_the_trace(data_folder: Path) -> None:
    assert to_text(fit(data_folder / "google_v2_tasks_w1.parquet")) == packaged_text()


def test_the_command_writes_the_figures(
    data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    assert main(["--data", str(data_folder), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["requests"]["cpu"]
    assert capsys.readouterr().out.strip() == str(out)


def test_the_command_says_which_file_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--data", str(tmp_path), "--out", str(tmp_path / "figures.json")]) == 2
    assert "google_v2_tasks_w1.parquet: no such file" in capsys.readouterr().err
