"""A broken file gets one sentence that names the file, the line and the column."""

from __future__ import annotations

import gzip
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloudsched.errors import CloudschedError, ConfigError, TraceFileError
from cloudsched.workload.base import Workload
from cloudsched.workload.traces import reading

Make = Callable[..., Workload]
GOOD = {
    "google_v2_trace": [
        "700000000,,1,0,,0,u,0,0,0.1,0.2,0,0",
        "701000000,,1,0,,1,u,0,0,0.1,0.2,0,0",
        "702000000,,1,0,,4,u,0,0,0.1,0.2,0,0",
        "710000000,,2,0,,0,u,0,0,0.1,0.2,0,0",
        "711000000,,2,0,,1,u,0,0,0.1,0.2,0,0",
        "712000000,,2,0,,4,u,0,0,0.1,0.2,0,0",
    ],
    "alibaba_gpu_2023": [
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,creation_time,deletion_time,scheduled_time",
        "a,1000,1024,0,0,0,60,0",
        "b,1000,1024,0,0,10,70,10",
    ],
    "swf": [
        "; MaxProcs: 8",
        "1 0 0 60 2 -1 -1 2 -1 -1 1 1 1 1 1 1 -1 -1",
        "2 9 0 60 2 -1 -1 2 -1 -1 1 1 1 1 1 1 -1 -1",
    ],
}
each_reader = pytest.mark.parametrize("name", list(GOOD))


def write(folder: Path, name: str, lines: list[str]) -> Path:
    path = folder / f"{name}.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_good_files_are_good(make: Make, tmp_path: Path) -> None:
    for name, lines in GOOD.items():
        assert len(make(name, path=write(tmp_path, name, lines)).jobs(0, 100)) > 0


@pytest.mark.parametrize(
    ("name", "line", "old", "new", "where"),
    [
        ("google_v2_trace", 1, "0.1", "abc", r"line 2, column 10 \(cpu request\): 'abc'"),
        ("google_v2_trace", 0, "700000000", "x7", r"line 1, column 1 \(timestamp\): 'x7'"),
        ("google_v2_trace", 2, "0.2", "-0.2", r"line 3, column 11 \(memory request\): -0.2"),
        ("google_v2_trace", 2, "0.2", "nan", r"line 3, column 11 \(memory request\): nan"),
        ("google_v2_trace", 2, ",4,", ",9,", r"line 3, column 6 \(event type\): 9.0"),
        ("google_v2_trace", 2, "702000000", "", r"line 3, column 1 \(timestamp\): is empty"),
        ("google_v2_trace", 1, ",0.2,0,0", ",0.2", r"line 2: 11 columns; expected 13"),
        ("alibaba_gpu_2023", 2, "1000", "many", r"line 3, column 2 \(cpu_milli\): 'many'"),
        ("alibaba_gpu_2023", 1, "1024", "inf", r"line 2, column 3 \(memory_mib\): inf"),
        ("alibaba_gpu_2023", 1, "1024", "", r"line 2, column 3 \(memory_mib\): is empty"),
        ("alibaba_gpu_2023", 2, "70", "7", r"line 3, column 7 \(deletion_time\): 7.0 is before"),
        ("alibaba_gpu_2023", 0, "num_gpu", "gpus", r"line 1: no column 'num_gpu'"),
        ("alibaba_gpu_2023", 0, "num_gpu", "name", r"line 1: the same column name occurs twice"),
        ("swf", 1, " 60 ", " 6o ", r"line 2, column 4 \(run time\): '6o'"),
        ("swf", 1, "-1 -1 2", "-1 x 2", r"line 2, column 7 \(used memory\): 'x'"),
        ("swf", 2, "1 1 -1 -1", "1 1 -1 !", r"line 3, column 18 \(think time\): '!'"),
        ("swf", 2, " 9 ", " -9 ", r"line 3, column 2 \(submit time\): -9"),
        ("swf", 2, " 60 ", " nan ", r"line 3, column 4 \(run time\): nan"),
        ("swf", 2, " -1 -1 1", " -1 1", r"line 3: 17 columns; expected 18"),
    ],
)
def test_a_bad_value_is_named_with_its_line_and_column(
    make: Make, tmp_path: Path, name: str, line: int, old: str, new: str, where: str
) -> None:
    lines = list(GOOD[name])
    assert old in lines[line]
    lines[line] = lines[line].replace(old, new, 1)
    with pytest.raises(TraceFileError, match=f"{name}.txt, {where}"):
        make(name, path=write(tmp_path, name, lines))


def test_blank_lines_do_not_shift_the_line_that_is_named(make: Make, tmp_path: Path) -> None:
    lines = list(GOOD["google_v2_trace"])
    lines[2] = lines[2].replace("0.1", "-1")
    with pytest.raises(TraceFileError, match="line 5, column 10"):
        make("google_v2_trace", path=write(tmp_path, "events", ["", lines[0], "", *lines[1:]]))


@each_reader
@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "~nobody-by-this-name/trace.csv"])
def test_a_path_that_no_system_allows_is_refused(make: Make, name: str, path: str) -> None:
    with pytest.raises(TraceFileError, match="no such file or folder"):
        make(name, path=path)


@pytest.mark.parametrize("end", ["\r", "\r\n", "\r\r\n"])
@pytest.mark.parametrize("name", ["google_v2_trace", "alibaba_gpu_2023"])
def test_odd_line_ends_do_not_hide_a_bad_value(
    make: Make, tmp_path: Path, name: str, end: str
) -> None:
    lines = list(GOOD[name])
    lines[2] = lines[2].replace("0.1", "-1").replace("1000", "-1")
    path = tmp_path / "trace.csv"
    path.write_bytes(end.join(lines).encode())
    with pytest.raises(TraceFileError, match=r"trace.csv, line \d+, column \d+ .*-1"):
        make(name, path=path)


@each_reader
@pytest.mark.parametrize("text", [b"", b"\n\n  \n"])
def test_an_empty_file_is_refused(make: Make, tmp_path: Path, name: str, text: bytes) -> None:
    path = tmp_path / "empty.csv"
    path.write_bytes(text)
    with pytest.raises(TraceFileError, match=r"empty.csv, line 1: the file is empty"):
        make(name, path=path)


@pytest.mark.parametrize("name", ["alibaba_gpu_2023", "swf"])
def test_a_file_with_a_header_alone_is_refused(make: Make, tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceFileError, match="no rows"):
        make(name, path=write(tmp_path, name, GOOD[name][:1]))


@pytest.mark.parametrize(
    ("name", "lines", "reason"),
    [
        ("google_v2_trace", GOOD["google_v2_trace"][:2], "no attempt was submitted, scheduled"),
        ("alibaba_gpu_2023", [GOOD["alibaba_gpu_2023"][0], "a,1,1,0,0,0,5,"], "no pod was"),
        ("swf", ["1 0 0 -1 2 -1 -1 2 -1 -1 1 1 1 1 1 1 -1 -1"], "no job has a run time"),
    ],
)
def test_a_file_without_anything_to_replay_is_refused(
    make: Make, tmp_path: Path, name: str, lines: list[str], reason: str
) -> None:
    with pytest.raises(TraceFileError, match=reason):
        make(name, path=write(tmp_path, name, lines))


@each_reader
def test_a_missing_file_is_named_with_the_places_looked_at(
    make: Make, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLOUDSCHED_DATA", raising=False)
    with pytest.raises(TraceFileError, match=r"nowhere.csv: no such file.*CLOUDSCHED_DATA"):
        make(name, path="nowhere.csv")
    monkeypatch.setenv("CLOUDSCHED_DATA", str(tmp_path))
    with pytest.raises(TraceFileError, match=f"looked for nowhere.csv or {tmp_path}/nowhere.csv"):
        make(name, path="nowhere.csv")


@each_reader
def test_a_folder_without_a_trace_is_refused(make: Make, tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceFileError, match="no file in this folder matches"):
        make(name, path=tmp_path)


def test_a_folder_with_several_logs_asks_for_one(make: Make, tmp_path: Path) -> None:
    for log in ("a.swf", "b.swf"):
        (tmp_path / log).write_text(GOOD["swf"][1])
    with pytest.raises(TraceFileError, match=r"several logs \(a.swf, b.swf\)"):
        make("swf", path=tmp_path)


@each_reader
def test_something_that_is_no_file_does_not_hang(make: Make, tmp_path: Path, name: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(TraceFileError, match="neither a file nor a folder"):
        make(name, path=pipe)


@each_reader
def test_a_truncated_gzip_file_is_refused(make: Make, tmp_path: Path, name: str) -> None:
    path = tmp_path / "trace.gz"
    lines = GOOD[name] + GOOD[name][-1:] * 2000
    path.write_bytes(gzip.compress("\n".join(lines).encode())[:-10])
    with pytest.raises(TraceFileError, match=r"trace.gz, line \d+: the gzip data ends early"):
        make(name, path=path)


@each_reader
def test_a_damaged_gzip_file_is_refused(make: Make, tmp_path: Path, name: str) -> None:
    path = tmp_path / "trace.gz"
    packed = bytearray(gzip.compress("\n".join(GOOD[name]).encode()))
    packed[20:40] = b"\xff" * 20
    path.write_bytes(bytes(packed))
    with pytest.raises(TraceFileError, match=r"trace.gz, line 1: .*damaged"):
        make(name, path=path)


@each_reader
def test_a_file_of_one_endless_line_is_refused_before_it_is_unpacked(
    make: Make, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"0" * 50_000_000, compresslevel=9))
    with pytest.raises(TraceFileError, match=r"bomb.gz, line 1: longer than 65536 bytes"):
        make(name, path=path)


@each_reader
def test_a_file_that_unpacks_to_more_than_the_limit_is_refused(
    make: Make, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_UNPACKED_BYTES", 100_000)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"\n" * 1_000_000))
    with pytest.raises(TraceFileError, match="more than 100000 bytes unpacked"):
        make(name, path=path)


def test_a_file_that_may_not_be_read_is_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path, "log", GOOD["swf"])
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(TraceFileError, match=r"cannot be read \(Permission denied\)"):
        make("swf", path=path)


TASKS: dict[str, list[Any]] = {
    "submit_s": [0.0, 1.0, 2.0],
    "duration_s": [10.0, 10.0, 10.0],
    "cpu_req": [0.1, 0.1, 0.1],
    "mem_req": [0.1, 0.1, 0.1],
    "disk_req": [0.0, 0.0, 0.0],
    "end_event": ["KILL", "FINISH", "FINISH"],
}


def write_parquet(folder: Path, **changes: list[Any] | None) -> Path:
    columns = {name: values for name, values in (TASKS | changes).items() if values is not None}
    path = folder / "tasks.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def test_a_parquet_file_is_read(make: Make, tmp_path: Path) -> None:
    assert len(make("google_v2_trace", path=write_parquet(tmp_path)).jobs(0, 100)) > 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cpu_req": None}, "no column 'cpu_req'"),
        ({"end_event": None}, "no column 'end_event'"),
        ({"cpu_req": [0.1, 0.1, -0.5]}, "row 3, column cpu_req: -0.5 is not a number from 0"),
        ({"mem_req": [0.1, float("nan"), 0.1]}, "row 2, column mem_req: nan"),
        ({"mem_req": [0.1, None, 0.1]}, "row 2, column mem_req: is empty"),
        ({"cpu_req": ["a", "b", "c"]}, "not a readable Parquet file of numbers"),
        ({"end_event": ["KILL"] * 3}, "no rows to replay"),
    ],
)
def test_a_parquet_file_with_bad_columns_is_refused(
    make: Make, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(TraceFileError, match=f"tasks.parquet.*{reason}"):
        make("google_v2_trace", path=write_parquet(tmp_path, **changes))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_a_file_that_only_calls_itself_parquet_is_refused(
    make: Make, tmp_path: Path, share: float
) -> None:
    path = write_parquet(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))] or b"submit_s,cpu_req\n")
    with pytest.raises(TraceFileError, match=r"tasks.parquet: not a readable Parquet file"):
        make("google_v2_trace", path=path)


def test_a_csv_file_of_tasks_names_the_column_it_lacks(make: Make, tmp_path: Path) -> None:
    path = write(tmp_path, "tasks", ["submit_s,cpu_req,memory,duration_s", "0,0.1,0.1,5"])
    with pytest.raises(TraceFileError, match="line 1: no column 'mem_req'"):
        make("google_v2_trace", path=path)
    path = write(
        tmp_path, "tasks", ["submit_s,cpu_req,mem_req,duration_s,end_event", "0,1,1,5,KILL"]
    )
    with pytest.raises(TraceFileError, match=r"line 1: .*no end_event"):
        make("google_v2_trace", path=path)


@each_reader
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_damage_to_a_good_file_is_read_or_refused_never_anything_else(
    make: Make, tmp_path: Path, name: str, data: st.DataObject
) -> None:
    text = bytearray("\n".join(GOOD[name]).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(at, min(len(text), at + 6)))
        text[at:end] = data.draw(st.binary(max_size=6) | st.sampled_from([b",", b"-", b"1e308"]))
    path = tmp_path / "damaged.csv"
    path.write_bytes(bytes(text))
    try:
        make(name, path=path, load=0.01).jobs(0, 50)
    except (TraceFileError, ConfigError) as error:
        assert str(error)  # noqa: PT017 - either outcome is fine, but never another error


def test_the_error_survives_pickling(make: Make) -> None:
    with pytest.raises(CloudschedError) as caught:
        make("swf", path="nowhere.swf")
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, TraceFileError)
    assert str(again) == str(caught.value)
