"""The loss of constrained learning on the CPU: kernels that give its gradient in the same pass.

Autograd takes dozens of passes over all (B, 4, A) outputs for what concerns the legal actions of a
row, a third of all. Anywhere else `constrained_loss` and `next_actions` do the same;
`tests/models/test_constrained_gradient.py` holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cloudsched.models.constrained_kernels import (
    NUM_TERMS,
    TERM_NOISE,
    TERM_PRIOR,
    TERM_TOTAL,
    Logged,
    Said,
    choose_next,
    loss_gradient,
    room_for,
)
from cloudsched.models.constrained_loss import ConstrainedLoss, Scales
from cloudsched.models.heads import Heads
from cloudsched.models.prepared import FOLLOWING, IS_ASLEEP, KIND, NEXT, OUTCOME, STRAINED_KIND

# As `Logged` has them, after the mask.
LOGGED = (
    *(IS_ASLEEP, "action", KIND, "behaviour_probability", OUTCOME, "discount"),
    *(FOLLOWING, STRAINED_KIND),
)


def compiled_loss(
    heads: Heads,
    luck_B2: Tensor,
    next_U2: Tensor,
    batch: Mapping[str, Tensor],
    scales: Scales,
) -> ConstrainedLoss:
    """Return what `constrained_loss` would; the gradient is known by then."""
    total, terms = _LossOfOutputs.apply(*heads, luck_B2, next_U2, batch, scales)  # type: ignore[no-untyped-call]
    return loss_of_terms(total, terms)


def loss_of_terms(total: Tensor, terms: Tensor) -> ConstrainedLoss:
    """Return a loss and the terms that the kernel wrote."""
    noise_4, next_2, share_4 = terms[TERM_NOISE:].tensor_split([4, 6])
    prior, policy, *rest, luck, pessimism = terms[TERM_PRIOR:TERM_NOISE].unbind()
    value_reward, value_cost, advantage_reward, advantage_cost = rest
    return ConstrainedLoss(
        total=total,
        prior=prior,
        policy=policy,
        value_reward=value_reward,
        value_cost=value_cost,
        advantage_reward=advantage_reward,
        advantage_cost=advantage_cost,
        luck=luck,
        pessimism=pessimism,
        estimated_excess=-next_2[0],
        estimated_cost=next_2[1],
        noise_4=noise_4,
        share_4=share_4,
    )


def compiled_next_actions(
    advice_BHA: Tensor, batch: Mapping[str, Tensor], scales: Scales
) -> Tensor:
    """Return what `next_actions` would."""
    action_B = torch.empty(len(advice_BHA), dtype=torch.int64)
    choose_next(
        _array(advice_BHA),
        _array(batch[NEXT + "action_mask"]),
        _array(batch[NEXT + IS_ASLEEP]),
        arrays(scales),
        room_for(advice_BHA.shape[2]),
        action_B.numpy(),
    )
    return action_B


def logged_rows(mask_RA: Tensor, batch: Mapping[str, Tensor]) -> Logged:
    """Return what the kernels read of a batch."""
    return Logged(_array(mask_RA), *(_array(batch[name]) for name in LOGGED))


class _LossOfOutputs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        outputs_RHA: Tensor,
        mask_RA: Tensor,
        value_R2: Tensor,
        luck_B2: Tensor,
        next_U2: Tensor,
        batch: Mapping[str, Tensor],
        scales: Scales,
    ) -> tuple[Tensor, Tensor]:
        said = Said(*(_array(part) for part in (outputs_RHA, value_R2, luck_B2, next_U2)))
        ctx.gradients = [torch.empty(part.shape) for part in (outputs_RHA, value_R2, luck_B2)]
        by_outputs, by_value, by_luck = (gradient.numpy() for gradient in ctx.gradients)
        terms, room = np.empty(NUM_TERMS), room_for(outputs_RHA.shape[2])
        logged = logged_rows(mask_RA, batch)
        loss_gradient(said, logged, arrays(scales), room, by_outputs, by_value, by_luck, terms)
        found = torch.from_numpy(terms).float()
        ctx.mark_non_differentiable(found)
        return found[TERM_TOTAL].clone(), found

    @staticmethod
    def backward(ctx: Any, share: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        by_outputs, by_value, by_luck = (float(share) * part for part in ctx.gradients)
        return by_outputs, None, by_value, by_luck, None, None, None


def arrays(scales: Scales) -> Scales:
    """Return scales as the kernels take them."""
    parts: list[Any] = [_array(part) if isinstance(part, Tensor) else part for part in scales]
    return Scales(*parts)


def _array(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().contiguous().numpy()
