"""Alibaba's GPU cluster trace of 2023: pods with CPU, memory and shares of GPUs.

Reads `openb_pod_list_*.csv` of cluster-trace-gpu-v2023 as published. Pods that were never scheduled
or never ended are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cloudsched.errors import TraceFileError
from cloudsched.sim.fleet import Fleet
from cloudsched.workload.replay import ReplayOptions, ReplayWorkload, Trace, sorted_trace
from cloudsched.workload.traces.reading import Column, files_of, find_path, unpack
from cloudsched.workload.traces.text import csv_file

FOLDER_FILES = ("openb_pod_list_default.csv*", "alibaba_gpu_v2023_pods.csv*")

COLUMNS = (
    Column(name="cpu_milli"),
    Column(name="memory_mib"),
    Column(name="num_gpu", high=1e6),
    Column(name="gpu_milli", high=1e6),
    Column(name="creation_time"),
    Column(name="deletion_time", may_be_empty=True),
    Column(name="scheduled_time", may_be_empty=True),
)


@dataclass(frozen=True, kw_only=True)
class AlibabaOptions(ReplayOptions):
    """What a server with capacity 1.0 is; by default the largest machine of that cluster."""

    from_s: float = 1e7
    """Jobs submitted before this time of the recording are left out. By default the recording
    proper: of the 77 % of time before it only the few pods are listed that still ran."""
    server_cpu_milli: float = 128_000.0
    """Thousandths of cores that make a CPU demand of 1.0."""
    server_memory_mib: float = 786_432.0
    """MiB that make a memory demand of 1.0."""
    server_gpus: float = 8.0
    """GPUs that make a demand of 1.0 in a resource named `gpu`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("server_cpu_milli", "server_memory_mib", "server_gpus"):
            self._number(name, low=0.0, high=1e12, exclusive=True)


def alibaba_workload(
    options: AlibabaOptions, *, fleet: Fleet, tick_s: float, load: float
) -> ReplayWorkload:
    """Read the trace and build its replay."""
    files = files_of(find_path(options.path), FOLDER_FILES)
    trace = read_alibaba(files[0], options)
    return ReplayWorkload(trace, options, fleet=fleet, tick_s=tick_s, load=load)


def read_alibaba(path: Path, options: AlibabaOptions) -> Trace:
    """Read a list of pods."""
    table = csv_file(path, unpack(path)).read_csv(COLUMNS)
    columns = table.columns
    duration_s = columns["deletion_time"] - columns["scheduled_time"]
    if (duration_s < 0.0).any():
        row = int(np.argmax(duration_s < 0.0))
        deleted, scheduled = columns["deletion_time"][row], columns["scheduled_time"][row]
        table.refuse(row, "deletion_time", f"{deleted} is before the scheduled_time {scheduled}")
    has_run = np.isfinite(duration_s)
    if not has_run.any():
        raise TraceFileError(f"{path.name}: no pod was scheduled and deleted; nothing to replay.")
    gpus = columns["num_gpu"] * columns["gpu_milli"] / 1000.0
    return sorted_trace(
        source=path.name,
        submit_s=columns["creation_time"][has_run],
        duration_s=duration_s[has_run],
        demand={
            "cpu": columns["cpu_milli"][has_run] / options.server_cpu_milli,
            "memory": columns["memory_mib"][has_run] / options.server_memory_mib,
            "gpu": gpus[has_run] / options.server_gpus,
        },
        time_of_day_s=0.0,  # the trace does not tell
    )
