"""Batches for the constrained learner: made in Ray Data's workers, taken in beside the learner.

Whatever Python does in the learner's process holds the lock that the learner needs, so that little
is left to do there: to copy finished batches out of the object store.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial

import numpy as np
import pyarrow as pa
import torch
from ray.data import DataIterator, Dataset
from ray.data.collate_fn import ArrowBatchCollateFn
from torch import Tensor

from cloudsched.datasets.schema import Arrays
from cloudsched.datasets.transitions import TransitionReader
from cloudsched.errors import ConfigError
from cloudsched.models.packed import packed, unpacked
from cloudsched.models.prepared import Prepare, cut
from cloudsched.rl.ahead import ahead

SLAB = 16  # batches, at least, that are read and shuffled together
MIN_SLABS = 64  # until Ray Data has to begin anew, which takes it half a second
BLOCKS_AHEAD = 2  # that may wait for the learner
LAYOUT, CONTENT = "layout", "content"
"""Columns of finished batches, see `cloudsched.models.packed`."""


def finished_batches(reader: TransitionReader, prepare: Prepare, size: int) -> Dataset:
    """Return the batches of a pass over the data, or of some, of `size` transitions each."""
    return reader.dataset(
        partial(finish, prepare=prepare, size=size), min_rows=SLAB * size, min_blocks=MIN_SLABS
    )


def finish(columns: Arrays, *, prepare: Prepare, size: int) -> pa.Table:
    """Prepare shuffled transitions and cut them into batches; what is left over is dropped."""
    prepared = prepare({name: torch.from_numpy(values) for name, values in columns.items()})
    order_B = torch.arange(len(columns["action"]))
    batches = [packed(batch) for batch in cut(prepared, order_B, size)]
    ends = np.cumsum([0, *(len(content) for _, content in batches)], dtype=np.int64)
    whole = np.concatenate([np.empty(0, np.uint8), *(content for _, content in batches)])
    contents = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(batches), [None, pa.py_buffer(ends), pa.py_buffer(whole)]
    )
    layouts = pa.array([layout for layout, _ in batches], pa.string())
    return pa.table({LAYOUT: layouts, CONTENT: contents})


def blocks(data: DataIterator | Dataset) -> Iterator[pa.Table]:
    """Return the blocks of finished batches, in the object store until nobody needs them."""
    found: Iterator[pa.Table] = iter(
        data.iter_torch_batches(
            batch_size=None, prefetch_batches=1, drop_last=False, device="cpu", collate_fn=AsItIs()
        )
    )
    return found


class AsItIs(ArrowBatchCollateFn):
    """Leaves blocks where they are, in the object store."""

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Return the block."""
        return batch


def endless(
    data: DataIterator | Dataset, device: torch.device | str
) -> Generator[dict[str, Tensor] | None]:
    """Yield batches on a device for ever, None each time that the data has come to its end.

    A thread fetches blocks: Ray Data takes half a second to begin anew, in which the learner goes
    on with what is there. Batches are copied by whoever takes them, which is faster than to be
    handed them by another thread.
    """
    return _batches(ahead(_rounds(data), BLOCKS_AHEAD), device)


def _rounds(data: DataIterator | Dataset) -> Generator[pa.Table | None]:
    while True:
        count = 0
        for block in blocks(data):
            yield block
            count += len(block)
        if count == 0:
            raise ConfigError("The dataset has fewer transitions than one batch; record more.")
        yield None


def _batches(
    source: Generator[pa.Table | None], device: torch.device | str
) -> Generator[dict[str, Tensor] | None]:
    with closing(source):
        for block in source:
            if block is None:
                yield None
                continue
            for layout, content in zip(block[LAYOUT], block[CONTENT], strict=True):
                found = np.frombuffer(content.as_buffer(), np.uint8)
                yield unpacked(layout.as_py(), found, device)
