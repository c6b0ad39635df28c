"""Fleets, small recordings of every format, and the folder of real ones where it is there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloudsched.config import FleetConfig
from cloudsched.sim.fleet import Fleet, build_fleet
from cloudsched.workload.base import Workload
from cloudsched.workload.catalog import make_workload

NUM_RECORDED = 300
ALIBABA_HEADER = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,"
    "creation_time,deletion_time,scheduled_time"
)


@pytest.fixture(scope="session")
def fleet() -> Fleet:
    return build_fleet(FleetConfig())


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The real traces; tests that need them are skipped where they are not."""
    default = Path(__file__).parents[2].parent / "shared" / "data" / "traces"
    folder = Path(os.environ.get("CLOUDSCHED_DATA", default))
    if not (folder / "google_v2_tasks_sample.csv.gz").exists():
        pytest.skip(f"no real traces in {folder}; set CLOUDSCHED_DATA to their folder")
    return folder


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small recording for each workload that replays one."""
    folder = tmp_path_factory.mktemp("recordings")
    rng = np.random.default_rng(5)
    submit_s = np.sort(rng.uniform(0.0, 40_000.0, NUM_RECORDED)).round()
    duration_s = rng.lognormal(6.0, 1.0, NUM_RECORDED).round() + 1.0
    cpu, memory = rng.uniform(0.01, 0.3, (2, NUM_RECORDED)).round(4)
    files = {
        "google_v2_trace": folder / "part-00000-of-00500.csv",
        "alibaba_gpu_2023": folder / "pods.csv",
        "swf": folder / "log.swf",
    }
    events, pods, log = [], [ALIBABA_HEADER], ["; MaxProcs: 64"]
    for job in range(NUM_RECORDED):
        start_s, end_s = submit_s[job] + 2.0, submit_s[job] + 2.0 + duration_s[job]
        for kind, second in ((0, submit_s[job]), (1, start_s), (4, end_s)):
            time_us = int((600.0 + second) * 1e6)
            events.append(f"{time_us},,{job},0,,{kind},u,0,0,{cpu[job]},{memory[job]},0.001,0")
        pods.append(
            f"pod-{job},{cpu[job] * 128_000},{memory[job] * 786_432},1,500,,LS,Running,"
            f"{submit_s[job]},{end_s},{start_s}"
        )
        processors = 1 + int(cpu[job] * 60)
        log.append(
            f"{job} {submit_s[job]:.0f} 2 {duration_s[job]:.0f} {processors} -1 -1 {processors} "
            "-1 -1 1 1 1 -1 -1 -1 -1 -1"
        )
    for name, lines in zip(files, (events, pods, log), strict=True):
        files[name].write_text("\n".join(lines) + "\n")
    return files


@pytest.fixture
def make(fleet: Fleet, recordings: dict[str, Path]) -> Callable[..., Workload]:
    """Make any workload by name; replays get a small recording unless told otherwise."""

    def make_any(name: str, **options: Any) -> Workload:
        if name in recordings:
            options.setdefault("path", str(recordings[name]))
        if name == "alibaba_gpu_2023":
            options.setdefault("from_s", 0.0)
        options.setdefault("fleet", fleet)
        options.setdefault("tick_s", 60.0)
        return make_workload(name, **options)

    return make_any
