"""Batches are finished by whoever reads the data, and reach the learner as they were."""

import time
from contextlib import closing

import numpy as np
import pyarrow as pa
import pytest
import torch

from cloudsched.errors import ConfigError
from cloudsched.models.prepared import STRAINED_FROM, STRAINED_KIND
from cloudsched.rl.feeding import BLOCKS_AHEAD, CONTENT, LAYOUT, endless, finish

SIZE = 8


def unstrained(columns):
    nothing = torch.zeros(0, dtype=torch.int64)
    return {**columns, STRAINED_KIND: nothing, STRAINED_FROM: nothing}


def block(first, count):
    """Numbered transitions, finished."""
    rows = np.arange(first, first + count)
    columns = {"action": rows, "discount": (rows + 0.5).astype(np.float32)}
    return finish(columns, prepare=unstrained, size=SIZE)


class Delivered:
    """Blocks, delivered as Ray Data does it; remembers how many were asked for."""

    def __init__(self, *blocks):
        self.blocks = blocks
        self.count = 0

    def iter_torch_batches(self, *, batch_size, prefetch_batches, drop_last, device, collate_fn):
        assert batch_size is None, "blocks are not cut, or rows would be copied"
        assert not drop_last
        for found in self.blocks:
            self.count += 1
            yield collate_fn(found)


def first_of(data, count):
    with closing(endless(data, "cpu")) as feed:
        return [next(feed) for _ in range(count)]


def test_every_row_comes_once_but_for_less_than_a_batch():
    for count in (0, 7, 8, 100):
        found = block(0, count)
        assert len(found) == count // SIZE
        if len(found):
            batches = first_of(Delivered(found), len(found))
            rows = torch.cat([batch["action"] for batch in batches])
            assert rows.tolist() == list(range(count // SIZE * SIZE))


def test_columns_stay_together():
    for batch in first_of(Delivered(block(0, 50), block(50, 50)), 12):
        assert torch.equal(batch["discount"], batch["action"] + 0.5)


def test_rounds_follow_each_other_and_are_the_same():
    data = Delivered(block(0, 16), block(0, 5), block(100, 8))
    found = first_of(data, 8)
    is_end = [batch is None for batch in found]
    assert is_end == [False, False, False, True] * 2
    starts = [int(batch["action"][0]) for batch in found if batch is not None]
    assert starts == [0, 8, 100] * 2


def test_a_block_may_be_a_part_of_what_was_finished():
    whole = block(0, 64)
    parts = Delivered(whole.slice(1, 2), pa.concat_tables([whole.slice(5, 1), whole.slice(7)]))
    starts = [int(batch["action"][0]) for batch in first_of(parts, 4)]
    assert starts == [8, 16, 40, 56]
    assert whole.column_names == [LAYOUT, CONTENT]


def test_data_without_a_whole_batch_is_refused():
    with pytest.raises(ConfigError, match="fewer transitions than one batch"):
        first_of(Delivered(block(0, 7)), 1)


def test_only_some_blocks_are_fetched_ahead():
    data = Delivered(*(block(0, 80) for _ in range(50)))
    with closing(endless(data, "cpu")) as feed:
        next(feed)
        time.sleep(0.5)
        assert data.count <= BLOCKS_AHEAD + 3
