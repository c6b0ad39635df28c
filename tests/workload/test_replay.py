"""Replays: which jobs they take from a recording, when, and how large."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cloudsched.config import FleetConfig
from cloudsched.errors import ConfigError, TraceFileError
from cloudsched.sim.fleet import Fleet, build_fleet
from cloudsched.workload.base import Workload
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


def test_a_window_keeps_the_order_and_goes_on_at_the_beginning(fleet: Fleet) -> None:
    workload = replay(evenly_spaced(100, 60.0), fleet, load=0.01)
    num_ticks = round(2.5 * 100 / workload.jobs_per_tick)
    jobs = workload.jobs(11, num_ticks)
    assert len(jobs) == pytest.approx(250, abs=3)  # three arrive a tick
    numbers = np.round(jobs.demand[:, 0] * 1000).astype(int)
    assert np.array_equal(np.diff(numbers) % 100, np.ones(len(jobs) - 1))


def test_times_between_submissions_are_stretched_by_one_factor(fleet: Fleet) -> None:
    slow, fast = (replay(evenly_spaced(100, 60.0), fleet, load=load) for load in (0.01, 0.04))
    assert slow.stretch == pytest.approx(4.0 * fast.stretch)
    jobs = slow.jobs(0, 1000)
    gaps = np.diff(jobs.arrival_tick)
    assert gaps.mean() == pytest.approx(slow.stretch, rel=0.05)
    assert np.ptp(gaps) <= 1


def test_the_time_of_day_is_that_of_the_recording(fleet: Fleet) -> None:
    workload = replay(evenly_spaced(100, 60.0), fleet, load=0.01)
    for seed in range(20):
        jobs = workload.jobs(seed, 200)
        first = round(jobs.demand[0, 0] * 1000) - 1  # submitted at this minute of the recording
        minute = (jobs.time_of_day_s - 3600.0) / 60.0
        assert 0.0 <= (first - minute) % 100 <= 1.0


def test_a_part_of_a_recording_can_be_replayed(make: Make, fleet: Fleet) -> None:
    trace = evenly_spaced(100, 60.0).part(600.0, 1200.0)
    assert trace.submit_s.tolist() == [600.0 + 60.0 * i for i in range(10)]
    with pytest.raises(TraceFileError, match=r"no job to replay from 1e\+09 s.*jobs from"):
        make("swf", from_s=1e9)


def test_a_recording_of_one_job_repeats_it(fleet: Fleet) -> None:
    jobs = replay(evenly_spaced(1, 60.0), fleet, load=0.001).jobs(0, 1000)
    assert len(jobs) > 10
    assert len(np.unique(jobs.demand, axis=0)) == 1
