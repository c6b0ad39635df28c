"""The kernels of constrained learning agree with its loss in torch, and with autograd."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudsched.models.constrained_gradient import compiled_loss, compiled_next_actions
from cloudsched.models.constrained_loss import (
    ConstrainedLoss,
    Scales,
    constrained_loss,
    next_actions,
)
from cloudsched.models.heads import Heads
from cloudsched.models.kinds import PLACE, WAKE, kinds, kinds_of
from cloudsched.models.prepared import FOLLOWING, IS_ASLEEP, KIND, NEXT, OUTCOME, STRAINED_KIND

NUM_LOGGED, NUM_STRAINED, NUM_NEXT = 60, 24, 40


def scales(**changes):
    chosen = {
        "value_2": torch.tensor([0.1, 0.05]),
        "advantage": 0.03,
        "nats_2": (2.0, 1.0),
        "price": 1.7,
        "reach": 2.0,
        "pessimism": 0.4,
        "unit_4": torch.tensor([0.5, 0.8, 0.3, 0.9]),
        "kind_4": torch.tensor([0.7, 9.0, 4.0, 1.2]),
        "strained_4": torch.tensor([8.0, 0.25, 0.0, 0.0]),
    }
    return Scales(**{**chosen, **changes})


def case(seed=0, *, num_servers=4, num_jobs=3, can_sleep=True, loudness=2.0):
    """Return what networks could say of some rows, as leaves, and a batch."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    num_pairs = num_servers * num_jobs
    num_toggles = num_servers if can_sleep else 0
    num_actions, num_rows = num_pairs + num_toggles + 1, NUM_LOGGED + NUM_STRAINED

    def rows(count):
        mask = torch.rand(count, num_actions, generator=generator) < 0.4
        mask[: count // 4, :num_pairs] = False  # nothing can be placed
        mask[:, -1] |= ~mask.any(dim=1)  # waiting is not always legal, but something is
        return mask, torch.rand(count, num_toggles, generator=generator) < 0.5

    mask, is_asleep = rows(num_rows)
    mask[0] = False
    mask[0, -1] = True  # a single legal action
    every = kinds(is_asleep, num_actions)[NUM_LOGGED:]
    meant = torch.where(torch.rand(NUM_STRAINED, generator=generator) < 0.5, WAKE, PLACE)
    is_possible = (mask[NUM_LOGGED:] & (every == meant.unsqueeze(1))).any(dim=1)
    action = torch.multinomial(mask[:NUM_LOGGED].float(), 1, generator=generator).squeeze(1)
    next_mask, next_is_asleep = rows(NUM_NEXT)
    batch = {
        "action": action,
        "behaviour_probability": torch.rand(NUM_LOGGED, generator=generator),
        "discount": torch.rand(NUM_LOGGED, generator=generator),
        KIND: kinds_of(action, is_asleep[:NUM_LOGGED], num_actions),
        OUTCOME: 0.1 * normal(NUM_LOGGED, 2),
        FOLLOWING: torch.randint(NUM_NEXT, (NUM_LOGGED,), generator=generator),
        IS_ASLEEP: is_asleep,
        STRAINED_KIND: torch.where(is_possible, meant, -1),
        NEXT + IS_ASLEEP: next_is_asleep,
        NEXT + "action_mask": next_mask.to(torch.int8),
    }
    outputs = loudness * normal(num_rows, 4, num_actions)
    said = (outputs, normal(num_rows, 2), normal(NUM_LOGGED, 2))
    return said, mask.to(torch.int8), 0.1 * normal(NUM_NEXT, 2), batch


def results(function, said, mask, following, batch, measures):
    outputs, value, luck = (part.clone().requires_grad_() for part in said)
    loss = function(Heads(outputs, mask, value), luck, following, batch, measures)
    loss.total.backward()
    return loss, (outputs.grad, value.grad, luck.grad)


def assert_the_same(said, mask, following, batch, measures):
    expected, gradients = results(constrained_loss, said, mask, following, batch, measures)
    found, others = results(compiled_loss, said, mask, following, batch, measures)
    for name in ConstrainedLoss.__dataclass_fields__:
        torch.testing.assert_close(
            getattr(found, name).detach(),
            getattr(expected, name).detach(),
            rtol=1e-4,
            atol=1e-5,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    for gradient, other in zip(gradients, others, strict=True):
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(other, gradient, rtol=1e-3, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_servers=st.integers(1, 6),
    num_jobs=st.integers(1, 4),
    can_sleep=st.booleans(),
    loudness=st.sampled_from([0.1, 2.0, 10.0]),
    price=st.sampled_from([0.01, 1.0, 30.0]),
    reach=st.sampled_from([0.1, 2.0, 8.0]),
)
def test_terms_and_gradients_are_those_of_autograd(seed, loudness, price, reach, **shape):
    said, *rest = case(seed, loudness=loudness, **shape)
    assert_the_same(said, *rest, scales(price=price, reach=reach))


def test_logits_that_are_far_apart_do_no_harm():
    said, *rest = case(3)
    said[0][:, :, ::2] -= 60.0
    assert_the_same(said, *rest, scales())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_servers=st.integers(1, 6),
    num_jobs=st.integers(1, 4),
    can_sleep=st.booleans(),
    price=st.sampled_from([0.01, 1.0, 30.0]),
)
def test_the_next_action_is_the_likeliest_of_the_likeliest_kind(seed, price, **shape):
    (outputs, *_), _, _, batch = case(seed, **shape)
    advice, measures = outputs[:NUM_NEXT, :3], scales(price=price)
    found = compiled_next_actions(advice, batch, measures)
    assert torch.equal(found, next_actions(advice, batch, measures))
    assert batch[NEXT + "action_mask"].gather(1, found.unsqueeze(1)).all()


def test_a_nan_is_not_hidden():
    said, mask, *rest = case()
    row, action = mask[:NUM_LOGGED].nonzero()[7].tolist()
    for head in range(4):
        spoilt = said[0].clone()
        spoilt[row, head, action] = math.nan
        loss, (gradient, *_) = results(compiled_loss, (spoilt, *said[1:]), mask, *rest, scales())
        assert gradient[row].isnan().any()
        assert loss.total.isnan()


def test_the_gradient_is_multiplied_by_what_the_loss_is_multiplied_by():
    said, *rest = case()
    _, (expected, *_) = results(compiled_loss, said, *rest, scales())
    outputs = said[0].clone().requires_grad_()
    mask, following, batch = rest
    loss = compiled_loss(Heads(outputs, mask, said[1]), said[2], following, batch, scales())
    (0.25 * loss.total).backward()
    torch.testing.assert_close(outputs.grad, 0.25 * expected)


@pytest.mark.parametrize("head", [0, 3])
def test_rows_that_do_not_count_have_no_gradient(head):
    said, mask, following, batch = case()
    batch[STRAINED_KIND][:] = -1
    _, (gradient, *_) = results(compiled_loss, said, mask, following, batch, scales())
    assert (gradient[NUM_LOGGED:, head] == 0.0).all()
