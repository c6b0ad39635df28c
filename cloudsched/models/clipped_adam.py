"""Adam that clips the gradient on the way: one pass over the parameters instead of three."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

TINY = 1e-6
"""Added to the norm, as `clip_grad_norm_` does."""


class ClippedAdam(torch.optim.Adam):
    """Torch's Adam, whose fused kernel can scale gradients as it reads them.

    State, checkpoints and schedules are those of the parent.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], **settings: Any) -> None:
        super().__init__(parameters, fused=True, **settings)

    @torch.no_grad()
    def clipped_step(self, largest_norm: float) -> Tensor:
        """Take a step with the gradient scaled down to a norm if it is larger.

        What `clip_grad_norm_` and `step` do, without what `step` looks up each time.

        Returns:
            The norm of the gradient as it was.
        """
        lists = [self._gathered(group) for group in self.param_groups]
        norms = torch._foreach_norm([gradient for one in lists for gradient in one[1]])
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        scale = ((norm + TINY) / largest_norm).clamp_(min=1.0)
        for group, (*tensors, steps) in zip(self.param_groups, lists, strict=True):
            torch._foreach_add_(steps, 1)
            torch._fused_adam_(  # type: ignore[call-overload]
                *tensors,
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=group["amsgrad"],
                maximize=group["maximize"],
                grad_scale=scale,
            )
        return norm

    def _gathered(self, group: dict[str, Any]) -> list[list[Tensor]]:
        """Return parameters that have a gradient, these, both moments, their maxima and steps."""
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        self._init_group(group, *lists)  # type: ignore[no-untyped-call]
        return lists
