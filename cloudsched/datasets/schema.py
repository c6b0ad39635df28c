"""The data contract: what one logged decision is, as a row of a Parquet file.

| column                                | type               | value                              |
|---------------------------------------|--------------------|------------------------------------|
| `servers`, `jobs`, `context`          | fixed-size binary  | little-endian float32 in C order   |
| `action_mask`                         | fixed-size binary  | A bytes, 1 where an action is legal|
| `action`                              | int32              | what was done                      |
| `behaviour_probability`               | float32            | of doing just that, in (0, 1]      |
| `reward`, `cost`                      | float32            | as the environment defines them    |
| `power_w`                             | float32            | mean draw of the tick that ended   |
|                                       |                    | with this decision, else 0         |
| `elapsed_ticks`                       | int32              | ticks that the decision took       |
| `terminated`, `truncated`             | bool               | how the episode ended, if it did   |
| `behaviour`                           | int32              | row of the manifest's behaviours   |
| `episode`, `seed`                     | int64              | which arrivals                     |
| `step`                                | int32              | decision of the episode, from 0    |

Observation parts carry their `shape` and `dtype` in the field's metadata. They are binary because
Parquet stores a list with two levels for each number, which makes it ten times slower to read.

Decisions of an episode follow each other in order, in one file, so the next observation is that of
the next row; a row group may begin or end anywhere in an episode. A decision at the end of a
truncated episode has no next row, so nothing can be bootstrapped from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cloudsched.config import ClusterConfig
from cloudsched.envs.observation import feature_shapes
from cloudsched.errors import DatasetError

SCHEMA = "cloudsched.dataset.v1"

OBSERVATION = ("servers", "jobs", "context", "action_mask")
FLOAT, BYTE = "<f4", "|i1"

SCALARS: Mapping[str, pa.DataType] = {
    "action": pa.int32(),
    "behaviour_probability": pa.float32(),
    "reward": pa.float32(),
    "cost": pa.float32(),
    "power_w": pa.float32(),
    "elapsed_ticks": pa.int32(),
    "terminated": pa.bool_(),
    "truncated": pa.bool_(),
    "behaviour": pa.int32(),
    "episode": pa.int64(),
    "seed": pa.int64(),
    "step": pa.int32(),
}

Arrays = dict[str, NDArray[Any]]


def observation_shapes(cluster: ClusterConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each observation part of one decision."""
    parts = feature_shapes(cluster.num_servers, cluster.visible_jobs, cluster.num_resources)
    return dict(zip(OBSERVATION, (*parts, (cluster.num_actions,)), strict=True))


def arrow_schema(cluster: ClusterConfig) -> pa.Schema:
    """Return the columns of decisions in clusters with these rules."""
    fields: list[pa.Field[Any]] = []
    for name, shape in observation_shapes(cluster).items():
        dtype = np.dtype(BYTE if name == "action_mask" else FLOAT)
        fields.append(
            pa.field(
                name,
                pa.binary(int(np.prod(shape)) * dtype.itemsize),
                nullable=False,
                metadata={"dtype": dtype.str, "shape": ",".join(map(str, shape))},
            )
        )
    for name, kind in SCALARS.items():
        fields.append(pa.field(name, kind, nullable=False))
    return pa.schema(fields, metadata={"schema": SCHEMA})


def to_table(columns: Mapping[str, NDArray[Any]], schema: pa.Schema) -> pa.Table:
    """Return B decisions as a table; the arrays are not copied where they are contiguous."""
    arrays = []
    for field in schema:
        values = columns[field.name]
        if not pa.types.is_fixed_size_binary(field.type):
            arrays.append(pa.array(np.asarray(values), type=field.type))
            continue
        dtype, shape = _layout(field)
        rows = np.ascontiguousarray(values, dtype=dtype)
        assert rows.shape[1:] == shape, f"{field.name}: {rows.shape[1:]} is not {shape}"
        buffers = [None, pa.py_buffer(rows.data)]
        arrays.append(pa.Array.from_buffers(field.type, len(rows), buffers))
    return pa.Table.from_arrays(arrays, schema=schema)


def to_arrays(table: pa.Table) -> Arrays:
    """Return the columns of a table as arrays with a leading axis B, without copies if they can."""
    columns: Arrays = {}
    for field in table.schema:
        column = table.column(field.name)
        if pa.types.is_fixed_size_binary(field.type):
            columns[field.name] = _stacked(column, field)
        else:
            columns[field.name] = column.to_numpy()
    return columns


def check_schema(found: pa.Schema, expected: pa.Schema, where: str) -> None:
    """Refuse a file whose columns are not those of the contract."""
    version = (found.metadata or {}).get(b"schema", b"").decode(errors="replace")
    if version != SCHEMA:
        raise DatasetError(
            f"{where}: schema {version!r} is not {SCHEMA!r}; record it again with this version."
        )
    for field in expected:
        index = found.get_field_index(field.name)
        if index < 0:
            raise DatasetError(f"{where}: column {field.name!r} is missing; record it again.")
        if found.field(index).type != field.type:
            raise DatasetError(
                f"{where}: column {field.name!r} has type {found.field(index).type}, expected "
                f"{field.type}; it was recorded in another kind of cluster."
            )


def _layout(field: pa.Field[Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    metadata = field.metadata or {}
    try:
        shape = tuple(int(size) for size in metadata[b"shape"].decode().split(","))
        return np.dtype(metadata[b"dtype"].decode()), shape
    except (KeyError, ValueError, TypeError) as error:
        raise DatasetError(
            f"Column {field.name!r} does not say its shape and dtype; record it again."
        ) from error


def _stacked(column: pa.ChunkedArray[Any], field: pa.Field[Any]) -> NDArray[Any]:
    dtype, shape = _layout(field)
    chunks: list[NDArray[Any]] = []
    for chunk in column.chunks:
        if chunk.null_count:
            raise DatasetError(f"Column {field.name!r} has empty cells; record it again.")
        width = chunk.type.byte_width
        start, end = chunk.offset * width, (chunk.offset + len(chunk)) * width
        values = chunk.buffers()[1]
        assert values is not None
        raw = np.frombuffer(memoryview(values), np.uint8)[start:end]
        chunks.append(raw.view(dtype).reshape(len(chunk), *shape))
    if len(chunks) == 1:
        return chunks[0]
    return np.concatenate(chunks) if chunks else np.zeros((0, *shape), dtype)
