"""Batches as bytes, as one process hands them to another: one block of memory and its layout."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNED = 64  # bytes, a line of the cache
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int64": torch.int64,
    "int8": torch.int8,
    "bool": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Place(NamedTuple):
    """Where a tensor lies in a block of memory, in numbers of its type."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int


def packed(batch: Mapping[str, Tensor]) -> tuple[str, NDArray[np.uint8]]:
    """Return the layout of a batch, and its bytes."""
    layout, end = [], 0
    for name, values in batch.items():
        layout.append((name, NAMES[values.dtype], tuple(values.shape), end))
        end += -(-values.nbytes // ALIGNED) * ALIGNED
    whole = torch.zeros(end, dtype=torch.uint8)
    for values, (*_, start) in zip(batch.values(), layout, strict=True):
        part = whole[start : start + values.nbytes]
        part.view(values.dtype).view(values.shape).copy_(values)
    return json.dumps(layout), whole.numpy()


def unpacked(
    layout: str, content: NDArray[np.uint8], device: torch.device | str
) -> dict[str, Tensor]:
    """Return a batch on a device, in one piece of memory of its own."""
    whole = torch.empty(len(content), dtype=torch.uint8)
    whole.numpy()[:] = content
    whole = whole.to(device)
    typed = {dtype: whole.view(dtype) for dtype in NAMES}
    return {
        name: typed[dtype].as_strided(shape, strides, start)
        for name, dtype, shape, strides, start in _places(layout)
    }


@lru_cache(maxsize=256)  # few sizes come again and again
def _places(layout: str) -> list[Place]:
    """Return where the tensors of a batch lie."""
    places = []
    for name, kind, shape, start in json.loads(layout):
        dtype = DTYPES[kind]
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        places.append(Place(name, dtype, tuple(shape), strides, start // dtype.itemsize))
    return places
