"""Scoring only legal actions gives what scoring all and masking gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cloudsched.models import legal
from cloudsched.models.legal import chosen_scores, legal_scores
from cloudsched.models.masking import mask_logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.1, 0.9])
def test_scores_and_gradients_are_those_of_all_actions_masked(
    share: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(40, 23)
    mask = (torch.rand(65, 23) < share).to(torch.int8)
    mask[:, -1] = 1
    values = torch.randn(65, 40).to(dtype)
    up = torch.randn(65, 23)
    monkeypatch.setattr(legal, "FEW", 1.0)  # with the kernels, however many are legal
    results = []
    for is_compiled in (False, True):
        hidden = values.clone().requires_grad_()
        if is_compiled:
            scores = legal_scores(hidden, layer, mask)
        else:
            scores = mask_logits(layer(hidden.float()), mask)
        results.append((scores, *torch.autograd.grad(scores, [hidden, *layer.parameters()], up)))
    for expected, found in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(
            found, expected, rtol=1e-2 if found.dtype == dtype else 1e-5, atol=1e-4
        )


def test_with_many_legal_actions_all_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, hidden, mask = nn.Linear(8, 5), torch.randn(3, 8), torch.ones(3, 5, dtype=torch.int8)
    monkeypatch.setattr(legal, "_LegalScores", None)
    torch.testing.assert_close(legal_scores(hidden, layer, mask), layer(hidden))


def test_a_few_chosen_scores_are_those_of_all() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(40, 23)
    hidden, chosen = torch.randn(65, 40).bfloat16(), torch.randint(23, (65, 2))
    expected = layer(hidden.float()).gather(1, chosen)
    torch.testing.assert_close(chosen_scores(hidden, layer, chosen), expected.detach())
