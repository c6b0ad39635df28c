"""Google's 2011 cluster trace, version 2: `task_events` as published, or compact tables of tasks.

A job of the replay is one attempt at a task: submitted, scheduled, and ended. Recorded time is
counted from the start of the trace, which is timestamp 600 s, 19:00 in the data centre.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cloudsched.errors import TraceFileError
from cloudsched.sim.fleet import Fleet
from cloudsched.workload.base import FloatArray
from cloudsched.workload.replay import ReplayOptions, ReplayWorkload, Trace, sorted_trace
from cloudsched.workload.traces.reading import (
    MAX_ROWS,
    Column,
    Table,
    files_of,
    find_path,
    read_parquet,
    unpack,
)
from cloudsched.workload.traces.text import csv_file, first_line, split_csv

TRACE_START_S = 600.0
TIME_OF_DAY_S = 19 * 3600.0
AFTER_TRACE_S = 1e12  # Google marks events after the trace with a timestamp of 2**63 - 1 us

EVENT_COLUMNS = (
    "timestamp",
    "missing info",
    "job ID",
    "task index",
    "machine ID",
    "event type",
    "user",
    "scheduling class",
    "priority",
    "cpu request",
    "memory request",
    "disk request",
    "different machine constraint",
)
SUBMIT, SCHEDULE, EVICT, FAIL, FINISH, KILL, LOST = range(7)
ENDS = {"finish": (FINISH,), "any": (EVICT, FAIL, FINISH, KILL, LOST)}
END_NAMES = {"finish": ("FINISH",), "any": ("EVICT", "FAIL", "FINISH", "KILL", "LOST")}

FOLDER_FILES = (
    "part-*-of-*",
    "task_events/part-*-of-*",
    "google_v2_tasks_w1.parquet",
    "google_v2_tasks_sample.csv.gz",
)


@dataclass(frozen=True, kw_only=True)
class GoogleTraceOptions(ReplayOptions):
    """Which attempts are replayed."""

    ended: str = "finish"
    """`finish`: attempts that finished; `any`: also those evicted, failed, killed or lost."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._choice("ended", tuple(ENDS))


def google_workload(
    options: GoogleTraceOptions, *, fleet: Fleet, tick_s: float, load: float
) -> ReplayWorkload:
    """Read the trace and build its replay."""
    trace = read_google(find_path(options.path), ended=options.ended)
    return ReplayWorkload(trace, options, fleet=fleet, tick_s=tick_s, load=load)


def read_google(path: Path, *, ended: str) -> Trace:
    """Read a file, or all parts in a folder."""
    files = files_of(path, FOLDER_FILES)
    if files[0].suffix == ".parquet":
        return _read_tasks_parquet(files[0], ended)
    data = unpack(files[0])
    has_header = any(column.name in split_csv(first_line(data)) for column in _task_columns())
    if has_header:
        return _read_tasks_csv(files[0], data)
    return _read_events(files, data, ended)


def _read_tasks_parquet(path: Path, ended: str) -> Trace:
    columns = [*_task_columns(), _request("disk_req")]
    return _tasks(read_parquet(path, columns, keep=("end_event", END_NAMES[ended])))


def _read_tasks_csv(path: Path, data: bytes) -> Trace:
    """Read a table with a header, of tasks that finished."""
    file = csv_file(path, data)
    if "end_event" in file.names:
        raise TraceFileError(
            f"{path.name}, line 1: a CSV file of tasks has only finished ones, so no end_event; "
            "leave the others and the column out, or use Parquet."
        )
    return _tasks(file.read_csv(_task_columns()))


def _task_columns() -> list[Column]:
    times = [Column(name="submit_s"), Column(name="duration_s", high=1e10)]
    return [*times, _request("cpu_req"), _request("mem_req")]


def _request(name: str, *, may_be_empty: bool = False) -> Column:
    return Column(name=name, high=1e6, may_be_empty=may_be_empty)


def _tasks(table: Table) -> Trace:
    columns = table.columns
    demand = {"cpu": columns["cpu_req"], "memory": columns["mem_req"]}
    if "disk_req" in columns:
        demand["disk"] = columns["disk_req"]
    return sorted_trace(
        source=table.path.name,
        submit_s=columns["submit_s"],
        duration_s=columns["duration_s"],
        demand=demand,
        time_of_day_s=TIME_OF_DAY_S,
    )


def _read_events(files: Sequence[Path], first: bytes, ended: str) -> Trace:
    names = ("timestamp", "job ID", "task index", "event type")
    needs = ("cpu request", "memory request", "disk request")
    columns = [
        Column(name="timestamp", high=2.0**63),
        Column(name="job ID", high=2.0**53),
        Column(name="task index", high=2.0**53),
        Column(name="event type", high=8),
        *(_request(name, may_be_empty=True) for name in needs),
    ]
    parts: list[dict[str, FloatArray]] = []
    num_rows = 0
    for file in files:
        data = first if file is files[0] else unpack(file)
        table = csv_file(file, data, names=EVENT_COLUMNS).read_csv(columns)
        num_rows += len(table.columns["timestamp"])
        if num_rows > MAX_ROWS:
            raise TraceFileError(
                f"{file.parent}: more than {MAX_ROWS} events up to {file.name}; "
                "give a folder with fewer parts."
            )
        parts.append(dict(table.columns))
    events = {name: np.concatenate([part[name] for part in parts]) for name in (*names, *needs)}
    return _attempts(files[0].name, events, ended)


def _attempts(source: str, events: dict[str, FloatArray], ended: str) -> Trace:
    """Find SUBMIT, SCHEDULE and end of each attempt: three neighbours of one task in time."""
    kind = events["event type"]
    second = events["timestamp"] / 1e6
    # Updates change requests on the way; tasks from before the trace have timestamp 0.
    row = np.flatnonzero((kind <= LOST) & (second > 0.0) & (second < AFTER_TRACE_S))
    row = row[np.lexsort((second[row], events["task index"][row], events["job ID"][row]))]
    submit, schedule, end = row[:-2], row[1:-1], row[2:]
    is_attempt = (kind[submit] == SUBMIT) & (kind[schedule] == SCHEDULE)
    is_attempt &= np.isin(kind[end], ENDS[ended])
    for name in ("job ID", "task index"):
        is_attempt &= events[name][submit] == events[name][end]
    # Google leaves requests out of some records; such a task cannot be placed.
    for name in ("cpu request", "memory request"):
        is_attempt &= ~np.isnan(events[name][submit])
    submit, schedule, end = submit[is_attempt], schedule[is_attempt], end[is_attempt]
    if not len(submit):
        raise TraceFileError(
            f"{source}: no attempt was submitted, scheduled and ended ({ended}) in this file; "
            "give more parts in one folder, or ended='any'."
        )
    return sorted_trace(
        source=source,
        submit_s=np.maximum(second[submit] - TRACE_START_S, 0.0),
        duration_s=second[end] - second[schedule],
        demand={
            "cpu": events["cpu request"][submit],
            "memory": events["memory request"][submit],
            "disk": np.nan_to_num(events["disk request"][submit]),
        },
        time_of_day_s=TIME_OF_DAY_S,
    )
