"""Reading trace files of doubtful origin: limits, and errors that name file, line and column."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from cloudsched.errors import TraceFileError, suggestion
from cloudsched.workload.base import FloatArray

DATA_VARIABLE = "CLOUDSCHED_DATA"
MAX_UNPACKED_BYTES = 2**29
MAX_ROWS = 50_000_000
# A line must end within two blocks; real ones have a few hundred bytes.
BLOCK_BYTES = 2**16
GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of numbers that a reader needs."""

    name: str
    """Name in the file's header, or of the format where files have no header."""
    low: float = 0.0
    """Smallest value that makes sense."""
    high: float = 1e12
    """Largest value that makes sense."""
    may_be_empty: bool = False
    """Whether a row may leave it out; it is NaN then."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Checked columns of one file, which still knows where each row came from."""

    path: Path
    columns: Mapping[str, FloatArray]  # each (J,)
    locate: Callable[[int, str], str]
    """From row and column name to the words "line 17, column 10 (cpu request)"."""

    def refuse(self, row: int, name: str, reason: str) -> NoReturn:
        """Raise the error for a value that cannot be right."""
        raise TraceFileError(
            f"{self.path.name}, {self.locate(row, name)}: {reason}; correct or remove it."
        )

    def check(self, columns: Sequence[Column], is_empty: Mapping[str, NDArray[np.bool_]]) -> None:
        """Refuse the first row, if any, whose values are empty or out of range."""
        for column in columns:
            values = self.columns[column.name]
            empty = is_empty[column.name]
            is_inside = (values >= column.low) & (values <= column.high)
            is_bad = ~is_inside & ~(empty & column.may_be_empty)
            if is_bad.any():
                row = int(np.argmax(is_bad))
                value = float(values[row])
                reason = f"{value!r} is not a number from {column.low:g} to {column.high:g}"
                self.refuse(row, column.name, "is empty" if empty[row] else reason)


def find_path(path: str) -> Path:
    """Find a file or folder: as it is, else in the folder that `CLOUDSCHED_DATA` names."""
    given = Path(os.path.expanduser(path))
    folder = os.environ.get(DATA_VARIABLE)
    places = [given] if folder is None or given.is_absolute() else [given, Path(folder) / given]
    for place in places:
        if os.path.exists(place):  # unlike Path.exists, False for names that no system allows
            return place
    looked = " or ".join(str(place) for place in places)
    hint = "" if folder else f"; relative paths are also looked up in ${DATA_VARIABLE}, now not set"
    raise TraceFileError(f"{path}: no such file or folder (looked for {looked}){hint}.")


def files_of(path: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the file itself, or what a folder has of the first pattern that matches anything."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise TraceFileError(f"{path}: neither a file nor a folder.")
    for pattern in patterns:
        found = sorted(path.glob(pattern))
        if len({file.name.removesuffix(".gz") for file in found}) < len(found):
            raise TraceFileError(f"{path}: holds the same file packed and unpacked; keep one.")
        if found:
            return found
    raise TraceFileError(f"{path}: no file in this folder matches {' or '.join(patterns)}.")


def unpack(path: Path) -> bytes:
    """Read a text file whole, unzipped if it is gzip, within limits of size and line length."""
    parts = io.BytesIO()
    try:
        with open(path, "rb") as raw:
            is_gzip = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            raw.seek(0)
            stream = gzip.GzipFile(fileobj=raw) if is_gzip else raw
            while block := stream.read(BLOCK_BYTES):
                if len(block) == BLOCK_BYTES and b"\n" not in block:
                    raise TraceFileError(
                        f"{path.name}, line {_lines_in(parts) + 1}: longer than {BLOCK_BYTES} "
                        "bytes; this is not a trace of one job a line."
                    )
                parts.write(block)
                if parts.tell() > MAX_UNPACKED_BYTES:
                    raise TraceFileError(
                        f"{path.name}: more than {MAX_UNPACKED_BYTES} bytes unpacked; split it."
                    )
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceFileError(
            f"{path.name}, line {_lines_in(parts) + 1}: the gzip data ends early or is damaged "
            f"({error}); fetch the file again."
        ) from error
    except OSError as error:
        raise TraceFileError(f"{path}: cannot be read ({error.strerror or error}).") from error
    if not parts.getvalue().strip():
        raise TraceFileError(f"{path.name}, line 1: the file is empty; expected a job a line.")
    return parts.getvalue()


def read_parquet(
    path: Path, columns: Sequence[Column], *, keep: tuple[str, tuple[str, ...]] | None = None
) -> Table:
    """Read number columns of a Parquet file.

    Args:
        keep: name of a text column, and the values of it whose rows are wanted.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    names = [column.name for column in columns]
    wanted = names if keep is None else [*names, keep[0]]
    try:
        with pq.ParquetFile(path) as file:
            for name in wanted:
                if name not in file.schema_arrow.names:
                    raise TraceFileError(
                        f"{path.name}: no column {name!r}. "
                        f"{suggestion(name, file.schema_arrow.names)}"
                    )
            _check_rows(path, file.metadata.num_rows)
            data = file.read(columns=wanted)
        row = np.arange(data.num_rows)
        if keep is not None:
            is_kept = pc.is_in(data[keep[0]].cast(pa.string()), value_set=pa.array(keep[1]))
            row = np.flatnonzero(is_kept.to_numpy())
            data = data.take(row)
        values = {name: data[name].cast(pa.float64()).to_numpy() for name in names}
        is_empty = {name: data[name].is_null().to_numpy() for name in names}
    except (pa.ArrowException, OSError) as error:
        raise TraceFileError(
            f"{path.name}: not a readable Parquet file of numbers ({str(error).splitlines()[0]})."
        ) from error
    if not len(row):
        raise TraceFileError(f"{path.name}, row 1: no rows to replay{_kept(keep)}.")
    table = Table(
        path=path, columns=values, locate=lambda r, name: f"row {row[r] + 1}, column {name}"
    )
    table.check(columns, is_empty)
    return table


def _kept(keep: tuple[str, tuple[str, ...]] | None) -> str:
    return "" if keep is None else f" (none has {keep[0]} {' or '.join(keep[1])})"


def _check_rows(path: Path, num_rows: int) -> None:
    if num_rows > MAX_ROWS:
        raise TraceFileError(f"{path.name}: {num_rows} rows, more than {MAX_ROWS}; split it.")


def _lines_in(parts: io.BytesIO) -> int:
    return parts.getvalue().count(b"\n")
