"""The loss of the flat network with its gradient, on CPUs that multiply bfloat16.

The products take nearly all of the time then, so nothing stands between them: no autograd, weights
are rounded once, and what the layers need besides is done in one pass over what they give. Anywhere
else `FlatHeads` and autograd do the same; `tests/models/test_flat_heads_gradient.py` holds the two
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cloudsched.models.constrained_gradient import arrays, logged_rows, loss_of_terms, times
from cloudsched.models.constrained_kernels import (
    NUM_TERMS,
    ROUNDED,
    TERM_TOTAL,
    Said,
    room_for,
    rounded_choose_next,
    rounded_loss_gradient,
)
from cloudsched.models.constrained_loss import ConstrainedLoss, Scales
from cloudsched.models.head_networks import FIXED, FlatHeads, HeadNetwork
from cloudsched.models.heads import COST, NUM_HEADS, POLICY, REWARD
from cloudsched.models.networks import ROW
from cloudsched.models.precision import rectified_product
from cloudsched.models.prepared import EXOGENOUS, IS_ASLEEP, NEXT, NEXT_ACTION
from cloudsched.models.rounded_kernels import (
    add_advantages,
    add_taken,
    rectify_gradient,
    score_values,
)

Batch = Mapping[str, Tensor]


def is_for(heads: nn.Module) -> bool:
    """Say whether this is the way to a network's gradient."""
    return (
        isinstance(heads, FlatHeads)
        and heads.first.products == torch.bfloat16
        and heads.first.weight.device.type == "cpu"
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    )


def flat_loss(
    heads: HeadNetwork, slow: HeadNetwork, luck: nn.Sequential, batch: Batch, scales: Scales
) -> ConstrainedLoss:
    """Return the loss of a prepared batch; the gradient is known by then."""
    weights = (*heads.parameters(), *luck.parameters())
    total, terms = _FlatLoss.apply(heads, slow, luck, batch, scales, *weights)  # type: ignore[no-untyped-call]
    return loss_of_terms(total, terms)


class _FlatLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        heads: FlatHeads,
        slow: FlatHeads,
        luck: nn.Sequential,
        batch: Batch,
        scales: Scales,
        *_weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        scales = arrays(scales)
        rounded = Rounded.of(heads, batch[FIXED])
        next_U2 = _next_values(slow, rounded, batch, scales)
        row_RC = batch[ROW].to(torch.bfloat16)  # whoever prepared it may have had no such products
        hidden_RW, body_RW = rounded.body(row_RC)
        outputs_RO = rounded.outputs(body_RW, NUM_HEADS)
        first_BL, second_BL, luck_B2 = _luck(luck, batch[EXOGENOUS])
        num_outputs = outputs_RO.shape[1]
        num_actions = num_outputs // NUM_HEADS
        by_last_RP = body_RW.new_empty(len(body_RW), len(ROUNDED) * num_actions + 2)
        by_reward_B, sums_P = torch.empty(len(luck_B2)), torch.empty(num_outputs + 2)
        by_luck_B2, terms = torch.empty_like(luck_B2), np.empty(NUM_TERMS)
        value_R2 = _values(heads, body_RW)
        rounded_loss_gradient(
            Said(_bits(outputs_RO), value_R2.numpy(), luck_B2.numpy(), next_U2.numpy()),
            logged_rows(batch["action_mask"], batch),
            scales,
            room_for(num_actions),
            _bits(by_last_RP),
            by_reward_B.numpy(),
            sums_P.numpy(),
            by_luck_B2.numpy(),
            terms,
        )
        ctx.gradients = (
            *_by_heads(
                *(heads, rounded, batch),
                *(row_RC, hidden_RW, body_RW),
                *(by_last_RP, by_reward_B, sums_P),
            ),
            *_by_luck(luck, batch[EXOGENOUS], first_BL, second_BL, by_luck_B2),
        )
        found = torch.from_numpy(terms).float()
        ctx.mark_non_differentiable(found)
        return found[TERM_TOTAL].clone(), found

    @staticmethod
    def backward(ctx: Any, share: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        return (None, None, None, None, None, *times(ctx.gradients, float(share)))


class Rounded(NamedTuple):
    """The weights of a flat network as its products take them."""

    first_WC: Tensor
    first_bias_W: Tensor  # what never changes about the servers is part of it
    second_WW: Tensor
    second_bias_W: Tensor
    out_OW: Tensor
    out_bias_O: Tensor

    @classmethod
    def of(cls, heads: FlatHeads, fixed_X: Tensor) -> Rounded:
        """Round a network's weights."""
        changing_WC, fixed_WX = heads.split_first()
        first_bias_W = torch.addmv(heads.first.bias, fixed_WX, fixed_X)
        parts = (
            *(changing_WC, first_bias_W, heads.second.weight, heads.second.bias),
            *(heads.out.weight, heads.out.bias),
        )
        return cls(*(part.to(torch.bfloat16) for part in parts))

    def body(self, row_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, W) what both layers give."""
        hidden_BW = rectified_product(row_BC, self.first_WC, self.first_bias_W)
        return hidden_BW, rectified_product(hidden_BW, self.second_WW, self.second_bias_W)

    def outputs(self, body_BW: Tensor, num_heads: int) -> Tensor:
        """Return (B, H * A) the first heads."""
        count = len(self.out_OW) // NUM_HEADS * num_heads
        return nn.functional.linear(body_BW, self.out_OW[:count], self.out_bias_O[:count])


def _next_values(slow: FlatHeads, rounded: Rounded, batch: Batch, scales: Scales) -> Tensor:
    """Return (U, 2) what the slow network says of what the online one does next."""
    row_UC = batch[NEXT + ROW].to(torch.bfloat16)
    if NEXT_ACTION in batch:  # a given policy is evaluated
        action_U = batch[NEXT_ACTION]
    else:
        advice_UO = rounded.outputs(rounded.body(row_UC)[1], POLICY)
        action_U = torch.empty(len(row_UC), dtype=torch.int64)
        rounded_choose_next(
            _bits(advice_UO),
            batch[NEXT + "action_mask"].numpy(),
            batch[NEXT + IS_ASLEEP].numpy(),
            scales,
            room_for(advice_UO.shape[1] // POLICY),
            action_U.numpy(),
        )
    _, body_UW = Rounded.of(slow, batch[FIXED]).body(row_UC)
    value_U2 = _values(slow, body_UW)
    add_advantages(
        _bits(body_UW),
        _array(slow.out.weight),
        _array(slow.out.bias),
        action_U.numpy(),
        scales.advantage,
        value_U2.numpy(),
    )
    return value_U2.mul_(torch.from_numpy(scales.value_2))


def _values(heads: FlatHeads, body_BW: Tensor) -> Tensor:
    value_B2 = torch.empty(len(body_BW), 2)
    layer = heads.value
    score_values(_bits(body_BW), _array(layer.weight), _array(layer.bias), value_B2.numpy())
    return value_B2


def _by_heads(
    heads: FlatHeads,
    rounded: Rounded,
    batch: Batch,
    row_RC: Tensor,
    hidden_RW: Tensor,
    body_RW: Tensor,
    by_last_RP: Tensor,
    by_reward_B: Tensor,
    sums_P: Tensor,
) -> list[Tensor]:
    """Return the gradients by the weights of a network, in the order of its parameters.

    Args:
        by_last_RP: by what the last layers gave, but for rewards.
        by_reward_B: by the reward of each action taken.
        sums_P: of all of them, over the rows.
    """
    num_outputs, width = rounded.out_OW.shape
    num_actions = num_outputs // NUM_HEADS
    out_HAW = rounded.out_OW.view(NUM_HEADS, num_actions, width)
    last_PW = torch.cat([*(out_HAW[head] for head in ROUNDED), heads.value.weight.to(out_HAW)])
    by_last_PW = by_last_RP.t() @ body_RW
    by_out_HAW = torch.empty(out_HAW.shape)
    for k, head in enumerate(ROUNDED):
        by_out_HAW[head] = by_last_PW[k * num_actions : (k + 1) * num_actions]
    by_body_RW = by_last_RP @ last_PW
    add_taken(
        by_reward_B.numpy(),
        batch["action"].numpy(),
        _array(heads.out.weight)[REWARD * num_actions : COST * num_actions],
        _bits(body_RW),
        _bits(by_body_RW),
        by_out_HAW[REWARD].numpy(),
    )
    by_second_bias_W, by_first_bias_W = torch.empty(2, hidden_RW.shape[1])
    rectify_gradient(_bits(body_RW), _bits(by_body_RW), by_second_bias_W.numpy())
    by_second_WW = by_body_RW.t() @ hidden_RW
    by_hidden_RW = by_body_RW @ rounded.second_WW
    rectify_gradient(_bits(hidden_RW), _bits(by_hidden_RW), by_first_bias_W.numpy())
    by_changing_WC = by_hidden_RW.t() @ row_RC
    by_fixed_WX = torch.outer(by_first_bias_W, batch[FIXED])
    return [
        torch.cat([by_changing_WC.float(), by_fixed_WX], dim=1),
        by_first_bias_W,
        by_second_WW.float(),
        by_second_bias_W,
        by_out_HAW.flatten(0, 1),
        sums_P[:num_outputs],
        by_last_PW[-2:].float(),
        sums_P[num_outputs:],
    ]


def _luck(luck: nn.Sequential, seen_BF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what each of the three layers of the predictor of luck gives."""
    first, first_bias, second, second_bias, last, last_bias = luck.parameters()
    first_BL = torch.relu_(nn.functional.linear(seen_BF, first, first_bias))
    second_BL = torch.relu_(nn.functional.linear(first_BL, second, second_bias))
    return first_BL, second_BL, nn.functional.linear(second_BL, last, last_bias)


def _by_luck(
    luck: nn.Sequential, seen_BF: Tensor, first_BL: Tensor, second_BL: Tensor, by_luck_B2: Tensor
) -> list[Tensor]:
    """Return the gradients by the weights of the predictor of luck, in their order."""
    _, _, second, _, last, _ = luck.parameters()
    by_second_BL = torch.ops.aten.threshold_backward(by_luck_B2 @ last, second_BL, 0.0)
    by_first_BL = torch.ops.aten.threshold_backward(by_second_BL @ second, first_BL, 0.0)
    pairs = ((by_first_BL, seen_BF), (by_second_BL, first_BL), (by_luck_B2, second_BL))
    return [part for up, read in pairs for part in (up.t() @ read, up.sum(dim=0))]


def _bits(tensor: Tensor) -> NDArray[np.uint16]:
    return tensor.view(torch.uint16).numpy()


def _array(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().numpy()
