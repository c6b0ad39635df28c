"""The gradient of the flat network's loss, on CPUs that multiply bfloat16.

The products take most of the time then, so little stands between them: no autograd, weights are
rounded once, and what the layers need besides is done in one pass over what they give. Anywhere
else `FlatHeads` and autograd do the same; `tests/models/test_flat_heads_gradient.py` holds the two
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cloudsched.models.constrained_gradient import arrays, logged_rows, loss_of_terms
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
from cloudsched.models.head_networks import FIXED, FlatHeads
from cloudsched.models.heads import COST, NUM_HEADS, POLICY, REWARD
from cloudsched.models.networks import ROW
from cloudsched.models.precision import rectified_product
from cloudsched.models.prepared import EXOGENOUS, IS_ASLEEP, NEXT, NEXT_ACTION
from cloudsched.models.rounded_kernels import (
    pass_back,
    rectify_gradient,
    score_taken,
    score_values,
)

Batch = Mapping[str, Tensor]


class FlatHeadsGradient:
    """Writes the gradient of a batch's loss to the parameters.

    It holds on to where weights and gradients lie, as looking them up takes longer than some of the
    work. They may change, but not move.
    """

    def __init__(self, heads: FlatHeads, slow: FlatHeads, luck: nn.Sequential) -> None:
        self._online, self._slow = FlatWeights.of(heads), FlatWeights.of(slow)
        self._by_online = FlatWeights.gradients_of(heads)
        self._luck = [p.detach() for p in luck.parameters()]
        self._by_luck = [_gradient(p) for p in luck.parameters()]

    @staticmethod
    def suits(heads: nn.Module) -> bool:
        """Say whether this is the way to a network's gradient."""
        return (
            isinstance(heads, FlatHeads)
            and heads.first.products == torch.bfloat16
            and heads.first.weight.device.type == "cpu"
            and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        )

    def write(self, batch: Batch, scales: Scales) -> ConstrainedLoss:
        """Make the gradient of a prepared batch's loss that of the parameters; return the loss."""
        scales, fixed_X = arrays(scales), batch[FIXED]
        online, by_online = self._online, self._by_online
        body = Body.of(online, fixed_X)
        out_OW, out_bias_O = online.out_OW.to(torch.bfloat16), online.out_bias_O.to(torch.bfloat16)
        num_actions = len(out_OW) // NUM_HEADS
        room = room_for(num_actions)
        next_row_UC = batch[NEXT + ROW].to(torch.bfloat16)
        if NEXT_ACTION in batch:  # a given policy is evaluated
            action_U = batch[NEXT_ACTION]
        else:
            count = POLICY * num_actions
            _, body_UW = body.of_rows(next_row_UC)
            advice_UO = nn.functional.linear(body_UW, out_OW[:count], out_bias_O[:count])
            action_U = torch.empty(len(next_row_UC), dtype=torch.int64)
            rounded_choose_next(
                _bits(advice_UO),
                batch[NEXT + "action_mask"].numpy(),
                batch[NEXT + IS_ASLEEP].numpy(),
                scales,
                room,
                action_U.numpy(),
            )
        next_U2 = _values(self._slow, next_row_UC, action_U, fixed_X, scales)
        row_RC = batch[ROW].to(torch.bfloat16)  # whoever prepared it may have had no such products
        hidden_RW, body_RW = body.of_rows(row_RC)
        outputs_RO = nn.functional.linear(body_RW, out_OW, out_bias_O)
        luck = _luck(self._luck, batch[EXOGENOUS])
        luck_B2 = luck[-1]
        value_B2 = torch.empty_like(luck_B2)
        bits_BW = _bits(body_RW)[: len(luck_B2)]
        score_values(
            bits_BW, online.value_2W.numpy(), online.value_bias_2.numpy(), value_B2.numpy()
        )
        by_last_RP = body_RW.new_empty(len(body_RW), len(ROUNDED) * num_actions + 2)
        by_reward_B, by_luck_B2 = torch.empty(len(luck_B2)), torch.empty_like(luck_B2)
        terms = np.empty(NUM_TERMS)
        rounded_loss_gradient(
            Said(_bits(outputs_RO), value_B2.numpy(), luck_B2.numpy(), next_U2.numpy()),
            logged_rows(batch["action_mask"], batch),
            scales,
            room,
            _bits(by_last_RP),
            by_reward_B.numpy(),
            by_online.out_bias_O.numpy(),
            by_online.value_bias_2.numpy(),
            by_luck_B2.numpy(),
            terms,
        )
        by_body_RW = _write_last(
            online, out_OW, batch["action"], body_RW, by_last_RP, by_reward_B, by_online
        )
        _write_body(body, fixed_X, row_RC, hidden_RW, by_body_RW, by_online)
        _write_luck(self._luck, (batch[EXOGENOUS], *luck), by_luck_B2, self._by_luck)
        found = torch.from_numpy(terms).float()
        return loss_of_terms(found[TERM_TOTAL], found)


class FlatWeights(NamedTuple):
    """The weights of a flat network, or their gradients."""

    changing_WC: Tensor  # of the first layer, for features that change
    fixed_WX: Tensor  # for those that never do
    first_bias_W: Tensor
    second_WW: Tensor
    second_bias_W: Tensor
    out_OW: Tensor
    out_bias_O: Tensor
    value_2W: Tensor
    value_bias_2: Tensor

    @classmethod
    def of(cls, heads: FlatHeads) -> FlatWeights:
        """Return where a network's weights lie."""
        first_WF, *others = (parameter.detach() for parameter in heads.parameters())
        return cls(*heads.split_first(first_WF), *others)

    @classmethod
    def gradients_of(cls, heads: FlatHeads) -> FlatWeights:
        """Return where their gradients lie."""
        first_WF, *others = (_gradient(parameter) for parameter in heads.parameters())
        return cls(*heads.split_first(first_WF), *others)


class Body(NamedTuple):
    """The hidden layers of a flat network as products take them."""

    first_WC: Tensor
    first_bias_W: Tensor  # what never changes about the servers is part of it
    second_WW: Tensor
    second_bias_W: Tensor

    @classmethod
    def of(cls, weights: FlatWeights, fixed_X: Tensor) -> Body:
        """Round a network's weights."""
        first_bias_W = torch.addmv(weights.first_bias_W, weights.fixed_WX, fixed_X)
        parts = (weights.changing_WC, first_bias_W, weights.second_WW, weights.second_bias_W)
        return cls(*(part.to(torch.bfloat16) for part in parts))

    def of_rows(self, row_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, W) what both layers give."""
        hidden_BW = rectified_product(row_BC, self.first_WC, self.first_bias_W)
        return hidden_BW, rectified_product(hidden_BW, self.second_WW, self.second_bias_W)


def _values(
    weights: FlatWeights, row_UC: Tensor, action_U: Tensor, fixed_X: Tensor, scales: Scales
) -> Tensor:
    """Return (U, 2) what a network says of an action in each row."""
    _, body_UW = Body.of(weights, fixed_X).of_rows(row_UC)
    value_U2 = torch.empty(len(row_UC), 2)
    score_taken(
        _bits(body_UW),
        weights.value_2W.numpy(),
        weights.value_bias_2.numpy(),
        weights.out_OW.numpy(),
        weights.out_bias_O.numpy(),
        action_U.numpy(),
        scales.advantage,
        scales.value_2,
        value_U2.numpy(),
    )
    return value_U2


def _write_last(
    weights: FlatWeights,
    out_OW: Tensor,
    action_B: Tensor,
    body_RW: Tensor,
    by_last_RP: Tensor,
    by_reward_B: Tensor,
    out: FlatWeights,
) -> Tensor:
    """Write the gradients by the weights of the last layers, and by the bias before them.

    Args:
        out_OW: rounded.
        by_last_RP: by what they gave, but for rewards.
        by_reward_B: by the reward of each action taken.

    Returns:
        (R, W) that by what goes into the rectifier before them.
    """
    num_actions, width = len(out_OW) // NUM_HEADS, out_OW.shape[1]
    out_HAW = out_OW.view(NUM_HEADS, num_actions, width)
    last_PW = torch.cat([*(out_HAW[head] for head in ROUNDED), weights.value_2W.to(out_OW)])
    by_last_PW = by_last_RP.t() @ body_RW
    by_out_HAW = out.out_OW.view(NUM_HEADS, num_actions, width)
    for k, head in enumerate(ROUNDED):
        by_out_HAW[head] = by_last_PW[k * num_actions : (k + 1) * num_actions]
    out.value_2W.copy_(by_last_PW[-2:])
    by_body_RW = by_last_RP @ last_PW
    pass_back(
        by_reward_B.numpy(),
        action_B.numpy(),
        weights.out_OW.numpy()[REWARD * num_actions : COST * num_actions],
        _bits(body_RW),
        _bits(by_body_RW),
        by_out_HAW[REWARD].numpy(),
        out.second_bias_W.numpy(),
    )
    return by_body_RW


def _write_body(
    body: Body,
    fixed_X: Tensor,
    row_RC: Tensor,
    hidden_RW: Tensor,
    by_body_RW: Tensor,
    out: FlatWeights,
) -> None:
    """Write the gradients by the weights of the hidden layers, and by the first bias."""
    out.second_WW.copy_(by_body_RW.t() @ hidden_RW)
    by_hidden_RW = by_body_RW @ body.second_WW
    rectify_gradient(_bits(hidden_RW), _bits(by_hidden_RW), out.first_bias_W.numpy())
    out.changing_WC.copy_(by_hidden_RW.t() @ row_RC)
    torch.outer(out.first_bias_W, fixed_X, out=out.fixed_WX)


def _luck(weights: list[Tensor], seen_BF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what each of the three layers of the predictor of luck gives."""
    first, first_bias, second, second_bias, last, last_bias = weights
    first_BL = torch.relu_(nn.functional.linear(seen_BF, first, first_bias))
    second_BL = torch.relu_(nn.functional.linear(first_BL, second, second_bias))
    return first_BL, second_BL, nn.functional.linear(second_BL, last, last_bias)


def _write_luck(
    weights: list[Tensor], given: tuple[Tensor, ...], by_luck_B2: Tensor, out: list[Tensor]
) -> None:
    """Write the gradients by the weights of the predictor of luck.

    Args:
        given: what it saw, and what its layers made of it.
    """
    seen_BF, first_BL, second_BL, _ = given
    _, _, second, _, last, _ = weights
    by_second_BL = torch.ops.aten.threshold_backward(by_luck_B2 @ last, second_BL, 0.0)
    by_first_BL = torch.ops.aten.threshold_backward(by_second_BL @ second, first_BL, 0.0)
    pairs = ((by_first_BL, seen_BF), (by_second_BL, first_BL), (by_luck_B2, second_BL))
    for layer, (up, read) in enumerate(pairs):
        torch.mm(up.t(), read, out=out[2 * layer])
        torch.sum(up, dim=0, out=out[2 * layer + 1])


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _bits(tensor: Tensor) -> NDArray[np.uint16]:
    return tensor.view(torch.uint16).numpy()
