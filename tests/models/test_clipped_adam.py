"""Adam that clips on the way takes the steps of torch's two calls."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from cloudsched.models.clipped_adam import ClippedAdam

SHAPES = ((7, 5), (5,), (), (3, 2))


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def give_gradients(learned: list[nn.Parameter], step: int) -> None:
    """Give new gradients to all, of different sizes in different steps, but none to the last."""
    generator = torch.Generator().manual_seed(step)
    for parameter in learned[:-1]:
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.grad = 10.0 ** (step % 3 - 1) * noise


@pytest.mark.parametrize("largest_norm", [0.5, 5.0, math.inf])
def test_steps_are_those_of_clipping_and_then_adam(largest_norm: float) -> None:
    plain, fast = parameters(), parameters()
    expected = torch.optim.Adam(plain, lr=1e-2, eps=1e-5)
    found = ClippedAdam(fast, lr=1e-2, eps=1e-5)
    for step in range(9):
        for optimizer in (expected, found):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)  # as a schedule does
        give_gradients(plain, step)
        give_gradients(fast, step)
        norm = nn.utils.clip_grad_norm_(plain, largest_norm)
        expected.step()
        torch.testing.assert_close(found.clipped_step(largest_norm), norm)
        for ours, theirs in zip(fast, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert not torch.equal(fast[0], parameters()[0]), "something was learned"
    assert torch.equal(fast[-1], parameters()[-1]), "what has no gradient stays"


def test_a_checkpoint_goes_on_where_it_was_and_is_one_of_torch() -> None:
    found = []
    for is_interrupted in (False, True):
        learned = parameters()
        optimizer = ClippedAdam(learned, lr=1e-2)
        for step in range(6):
            if is_interrupted and step == 3:
                state = optimizer.state_dict()
                torch.optim.Adam(parameters()).load_state_dict(state)
                optimizer = ClippedAdam(learned, lr=1.0)
                optimizer.load_state_dict(state)
            give_gradients(learned, step)
            optimizer.clipped_step(1.0)
        found.append(torch.cat([parameter.detach().flatten() for parameter in learned]))
    assert torch.equal(*found)
