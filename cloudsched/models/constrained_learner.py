"""Gradient steps of the constrained learner, and everything that an exact continuation needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cloudsched.models.constrained import ConstrainedConfig, ConstrainedModel
from cloudsched.models.constrained_loss import ConstrainedLoss
from cloudsched.models.flat_heads_gradient import FlatHeadsGradient
from cloudsched.models.head_networks import FlatHeads
from cloudsched.models.lagrange import LagrangeMultiplier
from cloudsched.models.precision import products_dtype, take_products_in

FAST = 4.0  # times the learning rate, see `SetHeads.fast_parameters`

MeanOfWorkers = Callable[[Tensor], Tensor]


class ConstrainedLearner:
    """Takes gradient steps on batches of transitions, and moves the price of the constraint.

    Args:
        module: in distributed training each worker has one, with the same weights.
        num_steps: gradient steps in all, for the schedule of the learning rate.
    """

    def __init__(
        self, module: ConstrainedModel, config: ConstrainedConfig, *, num_steps: int
    ) -> None:
        self.module = module
        self._config = config
        device = module.scale_2.device
        take_products_in(products_dtype(config.precision, device), module)
        self._weights = module.in_one_piece()
        self._by_hand: FlatHeadsGradient | None = None
        if FlatHeadsGradient.suits(module.heads):
            assert isinstance(module.heads, FlatHeads)
            assert isinstance(module.target, FlatHeads)
            self._by_hand = FlatHeadsGradient(module.heads, module.target, module.luck)
        ordinary, fast = self._weights.groups()
        groups: list[dict[str, Any]] = [{"params": [ordinary]}]
        if len(fast):
            groups.append({"params": [fast], "lr": FAST * config.learning_rate})
        self._optimizer = torch.optim.Adam(groups, lr=config.learning_rate, eps=1e-6, fused=True)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer,
            lambda step: 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / num_steps)),
        )
        self.multiplier = LagrangeMultiplier(config.constraint)
        self.step_count = 0

    def step(
        self, batch: Mapping[str, Tensor], *, mean_of_workers: MeanOfWorkers | None = None
    ) -> ConstrainedLoss:
        """Take one gradient step.

        Args:
            mean_of_workers: maps a tensor of this worker to its mean over all; None if alone.
        """
        price = self.module.scale_2.new_tensor(self.multiplier.price)
        loss = self._write_gradient(batch, price)
        if mean_of_workers is not None:
            self._weights.gradient.copy_(mean_of_workers(self._weights.gradient))
        self._weights.clip_gradient(self._config.gradient_clip)
        self._optimizer.step()
        self._schedule.step()
        self._weights.update_slow(self._config.target_rate)
        shared_9 = torch.cat([loss.noise_4, loss.share_4, loss.estimated_cost.view(1)])
        if mean_of_workers is not None:
            shared_9 = mean_of_workers(shared_9)
        self.module.hear(shared_9[:4], shared_9[4:8])
        self.multiplier.update(float(shared_9[8]))
        self.step_count += 1
        return loss

    def _write_gradient(self, batch: Mapping[str, Tensor], price: Tensor) -> ConstrainedLoss:
        module, config = self.module, self._config
        if self._by_hand is not None:
            return self._by_hand.write(module.prepared(batch), module.scales(price, config))
        self._weights.gradient.zero_()
        loss: ConstrainedLoss = module(batch, price, config)
        loss.total.backward()  # type: ignore[no-untyped-call]
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return everything that an exact continuation needs."""
        return {
            "model": self.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "multiplier": self.multiplier.state_dict(),
            "step_count": self.step_count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self.multiplier.load_state_dict(state["multiplier"])
        self.step_count = int(state["step_count"])
