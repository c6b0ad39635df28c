"""Batches come out of their bytes as they went in."""

import pytest
import torch

from cloudsched.models.packed import ALIGNED, DTYPES, packed, unpacked


def a_batch():
    torch.manual_seed(0)
    drawn = {name: (100 * torch.randn(7, 3)).to(dtype) for name, dtype in DTYPES.items()}
    nothing = torch.zeros(0, 5, dtype=torch.bfloat16)
    return {**drawn, "nothing": nothing, "row": torch.randn(13), "turned": torch.randn(4, 9).t()}


def test_a_batch_is_the_same_afterwards():
    batch = a_batch()
    found = unpacked(*packed(batch), "cpu")
    assert list(found) == list(batch)
    for name, values in batch.items():
        assert found[name].dtype == values.dtype, name
        assert torch.equal(found[name], values), name


def test_every_part_begins_where_a_line_of_the_cache_does():
    found = unpacked(*packed(a_batch()), "cpu")
    assert len(found) > 3
    for values in found.values():
        assert values.data_ptr() % ALIGNED == 0 or values.numel() == 0


def test_a_batch_does_not_share_the_memory_that_it_came_from():
    layout, content = packed(a_batch())
    found = unpacked(layout, content, "cpu")
    content[:] = 0
    assert torch.equal(found["float32"], a_batch()["float32"])


def test_a_type_that_nobody_could_read_is_refused():
    with pytest.raises(KeyError, match="complex64"):
        packed({"odd": torch.zeros(2, dtype=torch.complex64)})
