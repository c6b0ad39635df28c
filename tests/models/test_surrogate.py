"""The kernels of PPO's update agree with autograd and with the plain categorical."""

import math

import numpy as np
import pytest
import torch

from cloudsched.models.losses import PPOLoss, ppo_loss
from cloudsched.models.masking import log_prob, log_probs, mask_logits, sample
from cloudsched.models.surrogate import backward_ppo, draw


def case(num_rows=257, num_actions=23, scale=2.0):
    """Return masked logits as a leaf's function, and the columns of a minibatch."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    mask = torch.rand(num_rows, num_actions, generator=generator) < 0.3
    mask[:, -1] = True
    mask[0, :-1] = False  # a single legal action
    logits = scale * normal(num_rows, num_actions)
    action = sample(mask_logits(logits, mask), generator)
    old = log_prob(log_probs(mask_logits(logits, mask)), action) + 0.3 * normal(num_rows)
    columns = {
        "action_B": action,
        "old_log_prob_B": old,
        "old_value_B": normal(num_rows),
        "advantage_B": normal(num_rows),
        "return_B": normal(num_rows),
    }
    return logits, mask, normal(num_rows), columns


@pytest.mark.parametrize("value_clip", [None, 0.5])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.1])
def test_gradients_and_terms_are_those_of_autograd(value_clip, entropy_weight):
    logits, mask, value, columns = case()
    settings = {
        "clip": 0.2,
        "value_clip": value_clip,
        "value_weight": 0.7,
        "entropy_weight": entropy_weight,
    }
    results = []
    for function in (ppo_loss, backward_ppo):
        leaves = [logits.clone().requires_grad_(), value.clone().requires_grad_()]
        loss = function(
            logits_BA=mask_logits(leaves[0], mask), value_B=leaves[1], **columns, **settings
        )
        if function is ppo_loss:
            loss.total.backward()
        results.append((loss, *(leaf.grad for leaf in leaves)))
    (expected, *gradients), (loss, *others) = results
    for name in PPOLoss.__dataclass_fields__:
        torch.testing.assert_close(getattr(loss, name), getattr(expected, name).detach())
    for gradient, other in zip(gradients, others, strict=True):
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(other, gradient, rtol=1e-4, atol=1e-7)
    assert 0.05 < loss.clip_fraction < 0.95, "some ratios are clipped, some are not"


def test_a_nan_among_the_logits_is_not_hidden():
    logits, mask, value, columns = case()
    logits[3, -1] = math.nan
    loss = backward_ppo(
        logits_BA=mask_logits(logits.requires_grad_(), mask),
        value_B=value.requires_grad_(),
        **columns,
        clip=0.2,
        value_clip=None,
        value_weight=0.5,
        entropy_weight=0.01,
    )
    assert loss.total.isnan()
    assert logits.grad[3].isnan().any()


def test_draws_are_as_frequent_as_likely_and_never_illegal():
    torch.manual_seed(0)
    row = mask_logits(torch.randn(1, 12), torch.tensor([[0, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0]]))
    action, chosen = draw(row.expand(200_000, -1))
    shares = torch.bincount(action, minlength=12) / len(action)
    chances = log_probs(row)[0].exp()
    assert (shares[chances == 0.0] == 0.0).all()
    np.testing.assert_allclose(shares, chances, atol=0.005)
    torch.testing.assert_close(chosen, log_probs(row)[0][action])


def test_draws_repeat_with_the_seed():
    logits, mask, *_ = case()
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append(draw(mask_logits(logits, mask))[0])
    torch.testing.assert_close(*draws)
