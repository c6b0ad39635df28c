"""A last layer that scores only the legal actions, which are few, instead of all and masking most.

At 15 servers an observation has 91 actions, of which eleven are legal on average. The kernels work
on the CPU; anywhere else, and where many actions are legal, the product with all of them is taken
and masked. `tests/models/test_legal.py` holds the two together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor, nn

from cloudsched.models.masking import mask_logits

Array = NDArray[np.float32]

LOWEST = float(np.finfo(np.float32).min)
FEW = 0.25
"""Share of legal actions beyond which the full product is faster."""


def legal_scores(hidden_BH: Tensor, layer: nn.Linear, mask_BA: Tensor) -> Tensor:
    """Return the masked outputs (B, A) of a last layer, in float32."""
    is_dense = hidden_BH.device.type != "cpu" or mask_BA.count_nonzero() > FEW * mask_BA.numel()
    if is_dense:
        return mask_logits(layer(hidden_BH), mask_BA)
    arguments = (hidden_BH, layer.weight, layer.bias, mask_BA)
    if not torch.is_grad_enabled():
        return _scored(*arguments)
    scores_BA: Tensor = _LegalScores.apply(*arguments)  # type: ignore[no-untyped-call]
    return scores_BA


def chosen_scores(hidden_BH: Tensor, layer: nn.Linear, chosen_BC: Tensor) -> Tensor:
    """Return (B, C) a few outputs of a last layer for each row, in float32, without gradients."""
    weight_OH, bias_O = layer.weight.detach(), layer.bias.detach()
    hidden_BH = hidden_BH.detach().float().contiguous()
    if hidden_BH.device.type != "cpu":
        products_BC = (weight_OH[chosen_BC] @ hidden_BH.unsqueeze(2)).squeeze(2)
        return products_BC + bias_O[chosen_BC]
    scores_BC = torch.empty(chosen_BC.shape)
    score_chosen(
        hidden_BH.numpy(), weight_OH.numpy(), bias_O.numpy(), chosen_BC.numpy(), scores_BC.numpy()
    )
    return scores_BC


def _scored(hidden_BH: Tensor, weight_AH: Tensor, bias_A: Tensor, mask_BA: Tensor) -> Tensor:
    scores_BA = torch.empty(mask_BA.shape)
    score_legal(
        hidden_BH.detach().float().contiguous().numpy(),
        weight_AH.detach().numpy(),
        bias_A.detach().numpy(),
        mask_BA.contiguous().numpy(),
        scores_BA.numpy(),
    )
    return scores_BA


class _LegalScores(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden_BH: Tensor, weight_AH: Tensor, bias_A: Tensor, mask_BA: Tensor
    ) -> Tensor:
        exact_BH, mask_BA = hidden_BH.detach().float().contiguous(), mask_BA.contiguous()
        ctx.save_for_backward(exact_BH, weight_AH, mask_BA)
        ctx.hidden_dtype = hidden_BH.dtype
        return _scored(exact_BH, weight_AH, bias_A, mask_BA)

    @staticmethod
    def backward(ctx: Any, gradient_BA: Tensor) -> Any:  # type: ignore[override]
        hidden_BH, weight_AH, mask_BA = ctx.saved_tensors
        hidden_gradient_BH = torch.empty(hidden_BH.shape)
        weight_gradient_AH = torch.zeros(weight_AH.shape)
        bias_gradient_A = torch.zeros(len(weight_AH))
        legal_gradients(
            hidden_BH.numpy(),
            weight_AH.detach().numpy(),
            mask_BA.numpy(),
            gradient_BA.contiguous().numpy(),
            hidden_gradient_BH.numpy(),
            weight_gradient_AH.numpy(),
            bias_gradient_A.numpy(),
        )
        return (
            hidden_gradient_BH.to(ctx.hidden_dtype),
            weight_gradient_AH,
            bias_gradient_A,
            None,
        )


# Sums may be taken in any order, always the same one: without it they are not vectorised.
@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def score_legal(
    hidden: Array, weight: Array, bias: Array, mask: NDArray[np.int8], out_scores: Array
) -> None:
    """Write the outputs for legal actions, and the lowest number for the others.

    Args:
        hidden: (B, H).
        weight: (A, H).
        out_scores: (B, A) overwritten.
    """
    num_rows, num_actions = mask.shape
    for b in range(num_rows):
        row = hidden[b]
        for a in range(num_actions):
            if mask[b, a] == 0:
                out_scores[b, a] = LOWEST
                continue
            towards = weight[a]
            score = bias[a]
            for i in range(row.shape[0]):
                score += row[i] * towards[i]
            out_scores[b, a] = score


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def legal_gradients(
    hidden: Array,
    weight: Array,
    mask: NDArray[np.int8],
    gradient: Array,
    out_hidden: Array,
    out_weight: Array,
    out_bias: Array,
) -> None:
    """Write the gradients of `score_legal`, given those of its scores.

    Args:
        gradient: (B, A); that of illegal actions does not count.
        out_hidden: (B, H) overwritten.
        out_weight: (A, H) added to.
        out_bias: (A,) added to.
    """
    num_rows, num_actions = mask.shape
    for b in range(num_rows):
        row, out_row = hidden[b], out_hidden[b]
        out_row[:] = 0.0
        for a in range(num_actions):
            if mask[b, a] == 0:
                continue
            up = gradient[b, a]
            out_bias[a] += up
            towards, out_towards = weight[a], out_weight[a]
            for i in range(row.shape[0]):
                out_row[i] += up * towards[i]
                out_towards[i] += up * row[i]


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def score_chosen(
    hidden: Array, weight: Array, bias: Array, chosen: NDArray[np.int64], out_scores: Array
) -> None:
    """Write some outputs for each row.

    Args:
        hidden: (B, H).
        weight: (A, H).
        chosen: (B, C) which.
        out_scores: (B, C) overwritten.
    """
    for b in range(chosen.shape[0]):
        row = hidden[b]
        for c in range(chosen.shape[1]):
            towards = weight[chosen[b, c]]
            score = np.float32(0.0)
            for i in range(row.shape[0]):
                score += row[i] * towards[i]
            out_scores[b, c] = score + bias[chosen[b, c]]
