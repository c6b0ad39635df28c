"""Batches are cut from the slabs that Ray Data delivers."""

import pyarrow as pa
import torch

from cloudsched.models.prepared import STRAINED_FROM, STRAINED_KIND
from cloudsched.rl.offline import SLAB, iter_batches


class Rows:
    """So many numbered rows, delivered as Ray Data does it: the last slab is what is left."""

    def __init__(self, count):
        self.count = count

    def iter_torch_batches(self, *, batch_size, prefetch_batches, drop_last, device, collate_fn):
        assert not drop_last
        assert prefetch_batches == 1, "slabs come in order"
        for first in range(0, self.count, batch_size):
            rows = list(range(first, min(first + batch_size, self.count)))
            yield collate_fn(pa.table({"action": rows, "discount": [row + 0.5 for row in rows]}))


def unstrained(columns):
    nothing = torch.zeros(0, dtype=torch.int64)
    return {**columns, STRAINED_KIND: nothing, STRAINED_FROM: nothing}


def batches(count, seed):
    return list(iter_batches(Rows(count), unstrained, 8, seed, "cpu"))


def actions(count, seed):
    return [batch["action"] for batch in batches(count, seed)]


def test_every_row_comes_once_but_for_less_than_a_batch():
    for count in (0, 7, 8, 8 * SLAB, 8 * SLAB + 21):
        found = actions(count, seed=0)
        assert all(len(batch) == 8 for batch in found)
        assert len(found) == count // 8
        rows = torch.cat(found).tolist() if found else []
        assert len(set(rows)) == len(rows)


def test_columns_stay_together():
    for batch in batches(100, 0):
        assert torch.equal(batch["discount"], batch["action"] + 0.5)


def test_a_batch_holds_rows_from_all_over_its_slab():
    first = actions(8 * SLAB, seed=0)[0]
    assert int(first.max() - first.min()) > 4 * SLAB


def test_every_pass_of_a_run_is_the_same_and_other_seeds_are_others():
    again = zip(actions(300, seed=1), actions(300, seed=1), strict=True)
    assert all(torch.equal(one, other) for one, other in again)
    assert not torch.equal(actions(300, seed=1)[0], actions(300, seed=2)[0])
