"""Text tables: parsed at once, and line by line only to find the line that is wrong."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from cloudsched.errors import TraceFileError, suggestion
from cloudsched.workload.base import FloatArray
from cloudsched.workload.traces.reading import BLOCK_BYTES, Column, Table

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf(inity)?)", re.IGNORECASE)
SHOWN_CHARACTERS = 40


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """The text of a table with one row a line, and how its lines are split."""

    path: Path
    data: bytes
    names: Sequence[str]
    """Names of all columns, in order."""
    has_header: bool
    split: Callable[[str], list[str]]

    def read_csv(self, columns: Sequence[Column]) -> Table:
        """Parse comma-separated columns; quotes mean nothing."""
        import pyarrow as pa
        from pyarrow import csv

        wanted = [column.name for column in columns]
        self._require(wanted)
        try:
            data = csv.read_csv(
                io.BytesIO(self.data),
                read_options=csv.ReadOptions(
                    column_names=list(self.names), skip_rows=int(self.has_header)
                ),
                parse_options=csv.ParseOptions(quote_char=False),
                convert_options=csv.ConvertOptions(
                    column_types=dict.fromkeys(wanted, pa.float64()),
                    include_columns=wanted,
                    null_values=[""],
                ),
            )
        except (pa.ArrowException, ValueError) as error:
            self._blame(columns, error)
        values = {name: data[name].to_numpy() for name in wanted}
        is_empty = {name: data[name].is_null().to_numpy() for name in wanted}
        return self._table(columns, values, is_empty)

    def read_columns_of_text(self, columns: Sequence[Column], *, comments: str) -> Table:
        """Parse columns that any number of blanks keep apart; all must be numbers."""
        all_columns = [Column(name=name) for name in self.names]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of a file without rows
                data: FloatArray = np.loadtxt(
                    io.BytesIO(self.data), comments=comments, ndmin=2, encoding="utf-8"
                )
        except ValueError as error:
            self._blame(all_columns, error)
        if data.size and data.shape[1] != len(self.names):
            self._blame(all_columns, ValueError(f"{data.shape[1]} columns"))
        data = data.reshape(-1, len(self.names))
        values = {column.name: data[:, self.names.index(column.name)] for column in columns}
        nowhere = np.zeros(len(data), dtype=np.bool_)
        return self._table(columns, values, dict.fromkeys(values, nowhere))

    def _table(
        self,
        columns: Sequence[Column],
        values: dict[str, FloatArray],
        is_empty: dict[str, NDArray[np.bool_]],
    ) -> Table:
        if not len(values[columns[0].name]):
            raise TraceFileError(f"{self.path.name}: no rows; expected a job a line.")
        table = Table(path=self.path, columns=values, locate=self._locate)
        table.check(columns, is_empty)
        return table

    def _require(self, wanted: Sequence[str]) -> None:
        for name in wanted:
            if name not in self.names:
                raise TraceFileError(
                    f"{self.path.name}, line 1: no column {name!r}. {suggestion(name, self.names)}"
                )

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """Yield number and fields of each line that is a row."""
        for number, line in enumerate(self.data.splitlines(), start=1):
            fields = self.split(line.decode("utf-8", errors="replace").strip())
            if fields and not (self.has_header and number == 1):
                yield number, fields

    def _locate(self, row: int, name: str) -> str:
        for index, (number, _) in enumerate(self._lines()):
            if index == row:
                return self._where(number, name)
        return f"row {row + 1}, column {name}"  # odd line ends: the parsers count otherwise

    def _where(self, number: int, name: str) -> str:
        return f"line {number}, column {self.names.index(name) + 1} ({name})"

    def _blame(self, columns: Sequence[Column], error: Exception) -> NoReturn:
        """Raise the error for the first line that cannot be parsed."""
        for number, fields in self._lines():
            if len(fields) != len(self.names):
                raise TraceFileError(
                    f"{self.path.name}, line {number}: {len(fields)} columns; "
                    f"expected {len(self.names)}, up to {self.names[-1]}."
                ) from error
            for column in columns:
                text = fields[self.names.index(column.name)].strip()
                if text and not NUMBER.fullmatch(text):
                    raise TraceFileError(
                        f"{self.path.name}, {self._where(number, column.name)}: "
                        f"{text[:SHOWN_CHARACTERS]!r} is not a number; correct or remove it."
                    ) from error
        raise TraceFileError(f"{self.path.name}: cannot be parsed ({error}).") from error


def csv_file(path: Path, data: bytes, *, names: Sequence[str] | None = None) -> TextFile:
    """Describe a CSV file; without names, its first line holds them."""
    has_header = names is None
    if names is None:
        names = split_csv(first_line(data).removeprefix("\ufeff"))
    if len(set(names)) != len(names):
        raise TraceFileError(f"{path.name}, line 1: the same column name occurs twice.")
    return TextFile(path=path, data=data, names=names, has_header=has_header, split=split_csv)


def first_line(data: bytes) -> str:
    """Return the first line without its end."""
    lines = data[: 2 * BLOCK_BYTES].splitlines()
    return lines[0].decode("utf-8", errors="replace").strip() if lines else ""


def split_csv(line: str) -> list[str]:
    """Split a line at its commas; an empty line has no fields."""
    return line.split(",") if line else []
