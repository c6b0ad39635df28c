"""Logs of parallel computers in the Standard Workload Format, version 2.2.

A job of the log asks for processors, perhaps of many nodes. Here a job runs on one server, so
`server_processors` says how many processors a server of capacity 1.0 has. By default that is the
whole machine of the log, so that its widest job fits. With fewer, a wider job becomes several
tasks of equal width, one server each, submitted together and running for the job's time; they may
then start at different times, which a real parallel job would not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cloudsched.errors import TraceFileError
from cloudsched.sim.fleet import Fleet
from cloudsched.workload.base import DAY_S, MAX_JOBS, FloatArray
from cloudsched.workload.replay import ReplayOptions, ReplayWorkload, Trace, sorted_trace
from cloudsched.workload.traces.reading import Column, files_of, find_path, unpack
from cloudsched.workload.traces.text import TextFile

FOLDER_FILES = ("*.swf", "*.swf.gz")
FIELDS = (
    "job number",
    "submit time",
    "wait time",
    "run time",
    "allocated processors",
    "average CPU time",
    "used memory",
    "requested processors",
    "requested time",
    "requested memory",
    "status",
    "user",
    "group",
    "executable",
    "queue",
    "partition",
    "preceding job",
    "think time",
)
# -1 means unknown throughout
COLUMNS = (
    Column(name="submit time", low=-1.0),
    Column(name="run time", low=-1.0, high=1e10),
    Column(name="allocated processors", low=-1.0, high=1e9),
    Column(name="used memory", low=-1.0),
    Column(name="requested processors", low=-1.0, high=1e9),
    Column(name="requested memory", low=-1.0),
    Column(name="status", low=-1.0, high=1e9),
)
CANCELLED = 5


@dataclass(frozen=True, kw_only=True)
class SwfOptions(ReplayOptions):
    """What a server with capacity 1.0 is."""

    server_processors: int | None = None
    """Processors of a server; wider jobs are split. None for all of the log's machine."""
    server_memory_kb: float | None = None
    """Memory of a server; None for as much as its processors take in the log's hungriest job."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server_processors is not None:
            self._integer("server_processors", low=1)
        if self.server_memory_kb is not None:
            self._number("server_memory_kb", low=0.0, exclusive=True)


def swf_workload(
    options: SwfOptions, *, fleet: Fleet, tick_s: float, load: float
) -> ReplayWorkload:
    """Read the log and build its replay."""
    files = files_of(find_path(options.path), FOLDER_FILES)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise TraceFileError(f"{files[0].parent}: holds several logs ({names}); give one of them.")
    trace = read_swf(files[0], options)
    return ReplayWorkload(trace, options, fleet=fleet, tick_s=tick_s, load=load)


def read_swf(path: Path, options: SwfOptions) -> Trace:
    """Read a log."""
    data = unpack(path)
    file = TextFile(path=path, data=data, names=FIELDS, has_header=False, split=_split)
    columns = file.read_columns_of_text(COLUMNS, comments=";").columns
    processors = columns["allocated processors"]
    processors = np.where(processors > 0.0, processors, columns["requested processors"])
    memory = columns["used memory"]
    memory_kb = np.where(memory >= 0.0, memory, columns["requested memory"])
    run_s = columns["run time"]
    has_run = (run_s >= 0.0) & (processors > 0.0) & (columns["submit time"] >= 0.0)
    has_run &= (run_s > 0.0) | (columns["status"] != CANCELLED)
    if not has_run.any():
        raise TraceFileError(f"{path.name}: no job has a run time and processors to replay.")
    processors, memory_kb = processors[has_run], memory_kb[has_run]
    header = _header(data)
    widest = int(processors.max())
    width = options.server_processors or max(widest, _machine_processors(header))
    tasks = np.ceil(processors / width).astype(np.int64)
    if tasks.sum() > MAX_JOBS:
        raise TraceFileError(
            f"{path.name}: {tasks.sum()} tasks of server_processors={width}, more than {MAX_JOBS}; "
            "give servers more processors."
        )
    cpu = processors / tasks / width
    memory_share = _memory(memory_kb, processors / tasks, cpu, width, options.server_memory_kb)
    return sorted_trace(
        source=path.name,
        submit_s=np.repeat(columns["submit time"][has_run], tasks),
        duration_s=np.repeat(run_s[has_run], tasks),
        demand={"cpu": np.repeat(cpu, tasks), "memory": np.repeat(memory_share, tasks)},
        time_of_day_s=_time_of_day_s(header),
    )


def _memory(
    memory_kb: FloatArray,
    processors: FloatArray,
    cpu: FloatArray,
    width: int,
    server_memory_kb: float | None,
) -> FloatArray:
    """Return each task's share of a server's memory; that of its processors where unknown.

    Args:
        memory_kb: for each processor; -1 where unknown.
    """
    is_known = memory_kb >= 0.0
    if server_memory_kb is None:
        server_memory_kb = float(memory_kb.max()) * width
    if not is_known.any() or server_memory_kb <= 0.0:
        return cpu
    return np.where(is_known, memory_kb * processors / server_memory_kb, cpu)


def _split(line: str) -> list[str]:
    return line.split(";")[0].split()


def _header(data: bytes) -> dict[str, str]:
    """Return the `; Name: value` lines at the top."""
    header: dict[str, str] = {}
    for line in data.split(b"\n")[:1000]:
        found = re.match(r";\s*(\w+):\s*(.*)", line.decode("utf-8", errors="replace"))
        if found:
            header.setdefault(found.group(1), found.group(2).strip())
    return header


def _machine_processors(header: dict[str, str]) -> int:
    for name in ("MaxProcs", "MaxNodes"):
        found = re.match(r"\d{1,9}\b", header.get(name, ""))
        if found:
            return int(found.group())
    return 0


def _time_of_day_s(header: dict[str, str]) -> float:
    """Return the local time at which the log starts; 0 where it does not tell."""
    clock = re.search(r"\b(\d\d):(\d\d):(\d\d)\b", header.get("StartTime", ""))
    if clock:
        hour, minute, second = (int(part) for part in clock.groups())
        return (hour * 3600.0 + minute * 60.0 + second) % DAY_S
    unix_s = re.match(r"\d{1,12}\b", header.get("UnixStartTime", ""))
    zone_s = re.match(r"-?\d{1,6}\b", header.get("TimeZone", ""))
    if unix_s:
        return (int(unix_s.group()) + (int(zone_s.group()) if zone_s else 0)) % DAY_S
    return 0.0
