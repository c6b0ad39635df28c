"""Replays: which jobs they take from a recording, when, and how large."""

from __future__ import annotations

import dataclasses
import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cloudsched.config import FleetConfig
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.errors import ConfigError, TraceFileError
from cloudsched.sim.fleet import Fleet, build_fleet
from cloudsched.sim.jobs import JobTable
from cloudsched.sim.state import RATE_HORIZONS
from cloudsched.workload.base import Workload
from cloudsched.workload.load import offered_work
from cloudsched.workload.replay import ReplayWorkload, Trace
from cloudsched.workload.traces.alibaba import AlibabaOptions, read_alibaba
from cloudsched.workload.traces.google import read_google
from cloudsched.workload.traces.swf import SwfOptions, read_swf

Make = Callable[..., Workload]


def event(second: float, job: int, kind: int, *, task: int = 0, requests: str = "0.1,0.2,0") -> str:
    return f"{int(second * 1e6)},,{job},{task},77,{kind},user,1,2,{requests},0"


def write(path: Path, lines: list[str]) -> Path:
    text = "\n".join(lines) + "\n"
    if path.suffix == ".gz":
        with gzip.open(path, "wt") as file:
            file.write(text)
    else:
        path.write_text(text)
    return path


def test_google_events_become_attempts_from_schedule_to_finish(tmp_path: Path) -> None:
    path = write(
        tmp_path / "part-00000-of-00500.csv.gz",
        [
            event(0, 1, 0),  # from before the trace
            event(0, 1, 1),
            event(700, 2, 0, requests="0.5,0.25,0.125"),
            event(701, 2, 1),
            event(705, 2, 8, requests="0.9,0.9,0.9"),  # an update while it runs
            event(720, 3, 0),
            event(731, 2, 4),
            event(740, 3, 1),
            event(745, 3, 2),  # evicted, then tried again
            event(745, 3, 0),
            event(750, 3, 1),
            event(760, 3, 4),
            event(780, 4, 0),
            event(790, 4, 1),  # still running when the file ends
            event(795, 1, 4),
            event(796, 5, 0, requests=",,"),  # no request recorded
            event(797, 5, 1),
            event(799, 5, 4),
        ],
    )
    trace = read_google(path, ended="finish")
    assert trace.submit_s.tolist() == [100.0, 145.0]
    assert trace.duration_s.tolist() == [30.0, 10.0]
    assert trace.demand["cpu"].tolist() == [0.5, 0.1]
    assert trace.demand["memory"].tolist() == [0.25, 0.2]
    assert trace.demand["disk"].tolist() == [0.125, 0.0]
    assert trace.time_of_day_s == 19 * 3600.0
    any_end = read_google(path, ended="any")
    assert any_end.submit_s.tolist() == [100.0, 120.0, 145.0]
    assert any_end.duration_s.tolist() == [30.0, 5.0, 10.0]


def test_a_google_task_may_span_the_parts_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "task_events"
    folder.mkdir()
    write(folder / "part-00001-of-00500.csv.gz", [event(900, 2, 4, task=3)])
    write(folder / "part-00000-of-00500.csv", [event(700, 2, 0, task=3), event(800, 2, 1, task=3)])
    for path in (tmp_path, folder):
        assert read_google(path, ended="finish").duration_s.tolist() == [100.0]


def test_the_same_google_part_packed_and_unpacked_is_refused(tmp_path: Path) -> None:
    for name in ("part-00000-of-00500.csv", "part-00000-of-00500.csv.gz"):
        write(tmp_path / name, [event(700, 2, 0)])
    with pytest.raises(TraceFileError, match="same file packed and unpacked"):
        read_google(tmp_path, ended="finish")


def test_raw_events_of_real_tasks_give_the_tasks_back(data_folder: Path, tmp_path: Path) -> None:
    tasks = read_google(data_folder / "google_v2_tasks_sample.csv.gz", ended="finish")
    lines = []
    for job in range(2000):
        start_s = 600.0 + tasks.submit_s[job]
        requests = f"{tasks.demand['cpu'][job]},{tasks.demand['memory'][job]},0"
        for kind, second in (
            (0, start_s),
            (1, start_s + 1),
            (4, start_s + 1 + tasks.duration_s[job]),
        ):
            lines.append((second, event(second, job, kind, requests=requests)))
    path = write(tmp_path / "part-00000-of-00500.csv", [line for _, line in sorted(lines)])
    again = read_google(path, ended="finish")
    assert again.submit_s == pytest.approx(tasks.submit_s[:2000], abs=1e-5)
    assert np.array_equal(again.demand["cpu"], tasks.demand["cpu"][:2000])
    assert again.duration_s == pytest.approx(tasks.duration_s[:2000], abs=1e-4)


def test_the_parquet_file_and_its_sample_are_of_one_recording(data_folder: Path) -> None:
    whole = read_google(data_folder / "google_v2_tasks_w1.parquet", ended="finish")
    sample = read_google(data_folder / "google_v2_tasks_sample.csv.gz", ended="finish")
    assert len(whole.submit_s) == 320_840
    assert len(sample.submit_s) == 100_000
    has_all_digits = sample.duration_s < 10_000.0  # the sample gives six
    duration_s = np.float32(sample.duration_s[has_all_digits])
    assert np.isin(duration_s, np.float32(whole.duration_s)).all()
    every_end = read_google(data_folder / "google_v2_tasks_w1.parquet", ended="any")
    assert len(every_end.submit_s) == 756_322 - 60_939  # those still running at its end


def test_relative_paths_are_looked_up_in_the_data_folder(
    make: Make, recordings: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recordings["swf"]
    monkeypatch.setenv("CLOUDSCHED_DATA", str(path.parent))
    assert len(make("swf", path=path.name).jobs(0, 500)) > 0


def test_pods_are_measured_in_the_largest_machine(tmp_path: Path) -> None:
    header = (
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,"
        "creation_time,deletion_time,scheduled_time"
    )
    path = write(
        tmp_path / "pods.csv",
        [
            header,
            "b,64000,393216,8,1000,,LS,Running,200,500,300.0",
            "pending,1000,1,1,1000,,BE,Pending,50,60,",
            "a,32000,0,1,500,V100M16|V100M32,BE,Failed,100,160,100.0",
        ],
    )
    trace = read_alibaba(path, AlibabaOptions(path=str(path)))
    assert trace.submit_s.tolist() == [100.0, 200.0]
    assert trace.duration_s.tolist() == [60.0, 200.0]
    assert trace.demand["cpu"].tolist() == [0.25, 0.5]
    assert trace.demand["memory"].tolist() == [0.0, 0.5]
    assert trace.demand["gpu"].tolist() == [0.5 / 8, 1.0]


def test_gpus_are_a_third_resource(make: Make, data_folder: Path) -> None:
    three = build_fleet(FleetConfig(resources=("cpu", "memory", "gpu")))
    jobs = make("alibaba_gpu_2023", path=str(data_folder), from_s=1e7, fleet=three).jobs(0, 1000)
    assert jobs.num_resources == 3
    assert np.median(jobs.demand[:, 2]) == pytest.approx(0.125, abs=0.03)
    two = build_fleet(FleetConfig(resources=("cpu", "gpu")))
    again = make("alibaba_gpu_2023", path=str(data_folder), from_s=1e7, fleet=two).jobs(0, 1000)
    assert again.demand[:, 1].max() > 0.1


def test_by_default_the_pods_of_the_recording_proper_are_replayed(
    fleet: Fleet, data_folder: Path
) -> None:
    options = AlibabaOptions(path=str(data_folder))
    trace = read_alibaba(data_folder / "alibaba_gpu_v2023_pods.csv", options)
    assert len(trace.submit_s) == 8152 - 897
    part = trace.part(options.from_s, options.until_s)
    assert 7100 < len(part.submit_s) < 7255
    assert np.quantile(np.diff(part.submit_s), 0.999) < 5 * 3600.0  # no long silence


@pytest.mark.parametrize("name", ["google_v2_trace", "swf"])
def test_a_resource_that_was_not_recorded_is_refused(make: Make, name: str) -> None:
    fleet = build_fleet(FleetConfig(resources=("cpu", "memory", "gpu")))
    with pytest.raises(ConfigError, match=r"has no 'gpu', only cpu, memory"):
        make(name, fleet=fleet)


def swf_line(*, submit: int, run: int, processors: int, memory: int = -1, status: int = 1) -> str:
    return f"1 {submit} 0 {run} {processors} -1 {memory} -1 -1 -1 {status} 1 1 1 1 1 -1 -1"


def test_a_log_is_measured_in_its_whole_machine(tmp_path: Path) -> None:
    path = write(
        tmp_path / "log.swf",
        [
            "; Version: 2.2",
            "; StartTime: Mon Sep 23 14:00:31 CEST 1996",
            "; MaxProcs: 100",
            swf_line(submit=10, run=60, processors=50),
            swf_line(submit=0, run=0, processors=100),
            swf_line(submit=5, run=-1, processors=10),
            swf_line(submit=6, run=0, processors=10, status=5),
            swf_line(submit=7, run=5, processors=-1),
        ],
    )
    trace = read_swf(path, SwfOptions(path=str(path)))
    assert trace.submit_s.tolist() == [0.0, 10.0]
    assert trace.demand["cpu"].tolist() == [1.0, 0.5]
    assert trace.demand["memory"].tolist() == [1.0, 0.5]
    assert trace.time_of_day_s == 14 * 3600 + 31


def test_a_job_wider_than_a_server_becomes_equal_tasks(tmp_path: Path) -> None:
    path = write(tmp_path / "log.swf", [swf_line(submit=3, run=60, processors=40)])
    trace = read_swf(path, SwfOptions(path=str(path), server_processors=16))
    assert trace.submit_s.tolist() == [3.0, 3.0, 3.0]
    assert trace.demand["cpu"] == pytest.approx([40 / 3 / 16] * 3)


def test_recorded_memory_is_used_where_it_is_known(tmp_path: Path) -> None:
    path = write(
        tmp_path / "log.swf",
        [
            swf_line(submit=0, run=60, processors=4, memory=100),
            swf_line(submit=1, run=60, processors=8, memory=25),
            swf_line(submit=2, run=60, processors=2),
        ],
    )
    own_scale = read_swf(path, SwfOptions(path=str(path)))
    assert own_scale.demand["memory"].tolist() == [400 / 800, 200 / 800, 2 / 8]
    given = read_swf(path, SwfOptions(path=str(path), server_memory_kb=1000.0))
    assert given.demand["memory"].tolist() == [0.4, 0.2, 0.25]


@pytest.mark.parametrize(
    ("log", "num_jobs", "hour"),
    [("KTH-SP2-1996-2", 28_481, 14), ("NASA-iPSC-1993-3.1-cln", 18_239, 0)],
)
def test_real_logs_are_read(data_folder: Path, log: str, num_jobs: int, hour: int) -> None:
    path = data_folder / "swf" / f"{log}.swf.gz"
    trace = read_swf(path, SwfOptions(path=str(path)))
    assert len(trace.submit_s) == pytest.approx(num_jobs, abs=10)
    assert trace.demand["cpu"].max() == 1.0
    assert trace.time_of_day_s // 3600 == hour


def evenly_spaced(num_jobs: int, gap_s: float) -> Trace:
    return Trace(
        source="test",
        submit_s=np.arange(num_jobs) * gap_s,
        duration_s=np.full(num_jobs, 60.0),
        demand={"cpu": np.arange(1, num_jobs + 1) / 1000, "memory": np.full(num_jobs, 0.001)},
        time_of_day_s=3600.0,
    )


def replay(trace: Trace, fleet: Fleet, load: float) -> ReplayWorkload:
    options = AlibabaOptions(path="test", from_s=0.0)
    return ReplayWorkload(trace, options, fleet=fleet, tick_s=60.0, load=load)


def numbers(jobs: JobTable) -> NDArray[np.int64]:
    """Return which jobs of `evenly_spaced` these are."""
    return np.round(jobs.demand[:, 0] * 1000).astype(np.int64) - 1


def test_a_window_keeps_the_order_and_goes_on_at_the_beginning_of_its_part(fleet: Fleet) -> None:
    workload = replay(evenly_spaced(99, 60.0), fleet, load=0.01)
    num_ticks = round(2.5 * 66 / workload.jobs_per_tick)
    jobs = workload.jobs(11, num_ticks)
    assert len(jobs) == pytest.approx(2.5 * 66, abs=5)  # some arrive in each tick
    assert set(numbers(jobs).tolist()) == set(range(66))
    assert np.array_equal(np.diff(numbers(jobs)) % 66, np.ones(len(jobs) - 1))


def test_test_seeds_replay_the_last_third_and_no_other_seed_does(fleet: Fleet) -> None:
    workload = replay(evenly_spaced(300, 60.0), fleet, load=0.01)
    seen: dict[str, set[int]] = {"train": set(), "test": set()}
    for split, seeds in (("train", (*range(50), 999_999)), ("test", range(10**6, 10**6 + 50))):
        for seed in seeds:
            seen[split] |= set(numbers(workload.jobs(seed, 20)).tolist())
    assert seen["train"] == set(range(200))
    assert seen["test"] == set(range(200, 300))


def test_the_selected_part_of_a_recording_is_divided(fleet: Fleet) -> None:
    options = AlibabaOptions(path="test", from_s=60.0 * 100, until_s=60.0 * 130)
    trace = evenly_spaced(300, 60.0)
    workload = ReplayWorkload(trace, options, fleet=fleet, tick_s=60.0, load=0.01)
    assert set(numbers(workload.jobs(0, 1000)).tolist()) == set(range(100, 120))
    assert set(numbers(workload.jobs(10**6, 1000)).tolist()) == set(range(120, 130))


@pytest.mark.parametrize("load", [0.2, 0.7])
def test_both_parts_offer_the_load_asked_for(fleet: Fleet, load: float) -> None:
    workload = replay(evenly_spaced(300, 60.0), fleet, load=load)  # later jobs are bigger
    for seed in (0, 10**6):
        jobs = workload.jobs(seed, 5000)
        work = offered_work(jobs.demand, jobs.duration_ticks, fleet=fleet).sum(axis=0)
        assert work.max() / 5000 == pytest.approx(load, rel=0.02)


def test_jobs_of_one_moment_are_not_divided() -> None:
    submit_s = np.repeat([0.0, 10.0, 20.0], [1, 8, 1])
    trace = dataclasses.replace(evenly_spaced(10, 60.0), submit_s=submit_s)
    train, test = trace.divided()
    assert (train.submit_s.tolist(), len(test.submit_s)) == ([0.0], 9)
    burst_first = dataclasses.replace(trace, submit_s=np.repeat([0.0, 5.0], [9, 1]))
    assert [len(part.submit_s) for part in burst_first.divided()] == [9, 1]


@pytest.mark.parametrize("num_jobs", [1, 5])
def test_a_recording_of_one_moment_cannot_be_divided(fleet: Fleet, num_jobs: int) -> None:
    with pytest.raises(TraceFileError, match=r"test: all jobs to replay .* at least two times"):
        replay(evenly_spaced(num_jobs, 0.0), fleet, load=0.001)


def test_times_between_submissions_are_stretched_by_one_factor(fleet: Fleet) -> None:
    slow, fast = (replay(evenly_spaced(100, 60.0), fleet, load=load) for load in (0.01, 0.04))
    stretch = slow.part_of(0).stretch
    assert stretch == pytest.approx(4.0 * fast.part_of(0).stretch)
    jobs = slow.jobs(0, 1000)
    gaps = np.diff(jobs.arrival_tick)
    assert gaps.mean() == pytest.approx(stretch, rel=0.05)
    assert np.ptp(gaps) <= 1


@pytest.mark.parametrize("load", [0.002, 0.01])
def test_the_time_of_day_is_that_of_the_recording_throughout_the_window(
    fleet: Fleet, load: float
) -> None:
    workload = replay(evenly_spaced(1000, 60.0), fleet, load=load)
    for seed in (*range(10), *range(10**6, 10**6 + 10)):
        jobs = workload.jobs(seed, 200)
        recorded_minute = numbers(jobs) + 60  # it starts at 01:00
        # An arrival lies somewhere in its tick.
        tick = jobs.arrival_tick[:, None] + np.array([0.0, 1.0])
        low, high = (jobs.time_of_day_s + tick * jobs.day_s_per_tick).T / 60.0
        has_wrapped = np.diff(recorded_minute, prepend=recorded_minute[0]) < 0
        same_lap = ~np.logical_or.accumulate(has_wrapped)
        shift = 1440.0 * np.round((recorded_minute - low) / 1440.0)
        assert same_lap[0]
        assert (low + shift <= recorded_minute + 1e-6)[same_lap].all()
        assert (recorded_minute <= high + shift + 1e-6)[same_lap].all()


def test_the_observed_time_of_day_follows_the_stretched_recording(
    recordings: dict[str, Path],
) -> None:
    env = ClusterVectorEnv(
        1,
        workload="google_v2_trace",
        workload_options={"path": str(recordings["google_v2_trace"])},
        settings={"episode_ticks": 50, "visible_jobs": 1},
    )
    observation, _ = env.reset(seed=[3])
    jobs = env.workload.jobs(3, 50)
    assert jobs.day_s_per_tick is not None
    assert abs(jobs.day_s_per_tick - 60.0) > 10.0  # this recording is stretched or squeezed
    wait = np.array([env.single_action_space.n - 1])
    sine = 1 + 2 + 2 * len(RATE_HORIZONS)
    for tick in range(49):
        angle = 2.0 * np.pi * (jobs.time_of_day_s + tick * jobs.day_s_per_tick) / 86_400.0
        seen = observation["context"][0, sine : sine + 2]
        assert seen == pytest.approx([np.sin(angle), np.cos(angle)], abs=1e-5)
        observation, *_ = env.step(wait)


def test_a_part_of_a_recording_can_be_replayed(make: Make, fleet: Fleet) -> None:
    trace = evenly_spaced(100, 60.0).part(600.0, 1200.0)
    assert trace.submit_s.tolist() == [600.0 + 60.0 * i for i in range(10)]
    with pytest.raises(TraceFileError, match=r"no job to replay from 1e\+09 s.*jobs from"):
        make("swf", from_s=1e9)


def test_a_part_of_one_job_repeats_it(fleet: Fleet) -> None:
    jobs = replay(evenly_spaced(3, 60.0), fleet, load=0.001).jobs(10**6, 10_000)
    assert len(jobs) > 10
    assert set(numbers(jobs).tolist()) == {2}
