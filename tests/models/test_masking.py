import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from cloudsched.models.masking import (
    entropy,
    likeliest_kind,
    log_prob,
    log_probs,
    mask_logits,
    most_likely,
    sample,
)

MASKS = npst.arrays(np.int8, (6, 7), elements=st.integers(0, 1)).map(
    lambda mask: np.concatenate([mask, np.ones((6, 1), np.int8)], axis=1)
)
LOGITS = npst.arrays(np.float32, (6, 8), elements=st.floats(-50, 50, width=32))


@settings(max_examples=50, deadline=None)
@given(LOGITS, MASKS)
def test_masked_probabilities_are_those_of_a_softmax_over_legal_actions(logits, mask):
    probabilities = log_probs(mask_logits(torch.tensor(logits), torch.tensor(mask))).exp()
    for row, legal, got in zip(logits, mask, probabilities, strict=True):
        weights = [math.exp(x - max(row[legal == 1])) for x in row[legal == 1].astype(float)]
        want = np.array(weights) / sum(weights)
        np.testing.assert_allclose(got[torch.tensor(legal) == 1], want, rtol=1e-3, atol=1e-6)
        assert (got[torch.tensor(legal) == 0] == 0.0).all()


@settings(max_examples=50, deadline=None)
@given(LOGITS, MASKS)
def test_gradients_of_log_prob_and_entropy_are_finite_and_zero_on_illegal_actions(logits, mask):
    weights = torch.tensor(logits, requires_grad=True)
    table = log_probs(mask_logits(weights, torch.tensor(mask)))
    action = torch.full((6,), 7)
    (log_prob(table, action) + entropy(table)).sum().backward()
    assert torch.isfinite(weights.grad).all()
    assert (weights.grad[torch.tensor(mask) == 0] == 0.0).all()


def test_a_single_legal_action_is_certain_and_has_no_entropy_and_no_gradient():
    logits = torch.randn(3, 5, requires_grad=True)
    mask = torch.zeros(3, 5, dtype=torch.int8)
    mask[:, 2] = 1
    masked = mask_logits(logits, mask)
    table = log_probs(masked)
    assert (sample(masked) == 2).all()
    assert (most_likely(masked) == 2).all()
    assert (log_prob(table, torch.full((3,), 2)) == 0.0).all()
    assert (entropy(table) == 0.0).all()
    (entropy(table) + log_prob(table, torch.full((3,), 2))).sum().backward()
    assert (logits.grad == 0.0).all()


def test_a_million_samples_are_all_legal():
    generator = torch.Generator().manual_seed(0)
    mask = torch.randint(0, 2, (10_000, 91), generator=generator, dtype=torch.int8)
    mask[:, -1] = 1
    logits = mask_logits(5.0 * torch.randn(10_000, 91, generator=generator), mask)
    for _ in range(100):
        actions = sample(logits, generator)
        assert (mask.gather(1, actions.unsqueeze(1)) == 1).all()


def test_samples_have_the_frequencies_of_the_probabilities():
    logits = mask_logits(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([[1, 1, 0, 1]]))
    draws = sample(logits.expand(200_000, 4), torch.Generator().manual_seed(1))
    shares = torch.bincount(draws, minlength=4) / len(draws)
    np.testing.assert_allclose(shares, log_probs(logits).exp()[0], atol=4e-3)


@pytest.mark.parametrize("num_toggles", [2, 0])
def test_the_likeliest_kind_beats_the_likeliest_action(num_toggles):
    # Two servers and two jobs: four placements of 0.15 each against one wait of 0.4.
    probabilities = [0.15] * 4 + [1e-9] * num_toggles + [0.4]
    logits = torch.tensor([probabilities]).log()
    assert most_likely(logits).item() == 4 + num_toggles
    assert most_likely(likeliest_kind(logits, num_servers=2, num_jobs=2)).item() < 4
