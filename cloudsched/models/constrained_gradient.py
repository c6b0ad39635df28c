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
    TERM_ADVANTAGE,
    TERM_LUCK,
    TERM_NOISE,
    TERM_PESSIMISM,
    TERM_POLICY,
    TERM_PRIOR,
    TERM_SHARE,
    TERM_VALUE,
    Logged,
    Said,
    choose_next,
    loss_gradient,
    room_for,
)
from cloudsched.models.constrained_loss import (
    ConstrainedLoss,
    Scales,
    constrained_target,
)
from cloudsched.models.heads import Heads
from cloudsched.models.prepared import IS_ASLEEP, KIND, NEXT, STRAINED_KIND


def compiled_loss(
    heads: Heads,
    luck_B2: Tensor,
    next_B2: Tensor,
    batch: Mapping[str, Tensor],
    scales: Scales,
) -> ConstrainedLoss:
    """Return what `constrained_loss` would; the gradient is known by then."""
    target_B2 = constrained_target(
        reward_B2=torch.stack([batch["reward"], batch["cost"]], dim=1),
        discount_B=batch["discount"],
        next_B2=next_B2,
    )
    logged = Logged(
        _array(heads.mask_BA),
        _array(batch[IS_ASLEEP]),
        _array(batch["action"]),
        _array(batch[KIND]),
        _array(batch["behaviour_probability"]),
        _array(target_B2),
        _array(batch[STRAINED_KIND]),
    )
    total, terms = _LossOfOutputs.apply(  # type: ignore[no-untyped-call]
        heads.outputs_BHA, heads.value_B2, luck_B2, logged, _arrays(scales)
    )
    return ConstrainedLoss(
        total=total,
        prior=terms[TERM_PRIOR],
        policy=terms[TERM_POLICY],
        value_reward=terms[TERM_VALUE],
        value_cost=terms[TERM_VALUE + 1],
        advantage_reward=terms[TERM_ADVANTAGE],
        advantage_cost=terms[TERM_ADVANTAGE + 1],
        luck=terms[TERM_LUCK],
        pessimism=terms[TERM_PESSIMISM],
        estimated_excess=-next_B2[:, 0].mean(),
        estimated_cost=next_B2[:, 1].mean(),
        noise_4=terms[TERM_NOISE : TERM_NOISE + 4],
        share_4=terms[TERM_SHARE : TERM_SHARE + 4],
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
        _arrays(scales),
        room_for(advice_BHA.shape[2]),
        action_B.numpy(),
    )
    return action_B


class _LossOfOutputs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        outputs_RHA: Tensor,
        value_R2: Tensor,
        luck_B2: Tensor,
        logged: Logged,
        scales: Scales,
    ) -> tuple[Tensor, Tensor]:
        said = Said(_array(outputs_RHA), _array(value_R2), _array(luck_B2))
        gradients = [torch.empty(part.shape) for part in (outputs_RHA, value_R2, luck_B2)]
        terms = np.empty(NUM_TERMS)
        loss_gradient(
            said,
            logged,
            scales,
            room_for(outputs_RHA.shape[2]),
            *(gradient.numpy() for gradient in gradients),
            terms,
        )
        found = torch.from_numpy(terms).float()
        ctx.gradients = gradients
        ctx.mark_non_differentiable(found)
        return found[0].clone(), found

    @staticmethod
    def backward(ctx: Any, share: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        gradients, factor = ctx.gradients, float(share)
        if factor != 1.0:
            gradients = [factor * gradient for gradient in gradients]
        return (*gradients, None, None)


def _arrays(scales: Scales) -> Scales:
    return Scales(*(_array(part) if isinstance(part, Tensor) else part for part in scales))


def _array(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().contiguous().numpy()
