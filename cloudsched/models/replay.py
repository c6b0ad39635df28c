"""A replay memory of columns that stays on the learner's device.

Clusters are rows and decisions are columns of a ring, so an observation is stored once and the
observation n decisions later is found beside it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class NStepBatch(NamedTuple):
    """Decisions with what the next n brought."""

    observation: dict[str, Tensor]  # (B, ...) each
    action: Tensor  # (B,) int64
    n_step_reward: Tensor  # (B,) discounted sum of rewards
    discount: Tensor  # (B,) gamma ** ticks that the n decisions took
    next_observation: dict[str, Tensor]  # (B, ...) each
    is_valid: Tensor  # (B,) float, 0 where an episode was cut within the n decisions


class ColumnReplay:
    """Keeps the last `capacity` decisions of each of E clusters.

    Args:
        capacity: decisions of a cluster, C.
        device: where the memory lives.
    """

    def __init__(self, capacity: int, device: torch.device | str) -> None:
        self._capacity = capacity
        self._device = torch.device(device)
        self._observation: dict[str, Tensor] = {}  # (E, C, ...) each
        self._columns: dict[str, Tensor] = {}  # (E, C) each
        self._head = 0
        self.size = 0
        """Decisions kept of each cluster."""

    def add(
        self,
        observation: dict[str, Tensor],
        *,
        action: Tensor,
        reward: Tensor,
        elapsed: Tensor,
        is_cut: Tensor,
    ) -> None:
        """Append (E, T, ...) columns; the oldest are overwritten."""
        columns = {"action": action, "reward": reward, "elapsed": elapsed, "is_cut": is_cut}
        if not self._columns:
            self._observation = {k: self._allocate(v) for k, v in observation.items()}
            self._columns = {k: self._allocate(v) for k, v in columns.items()}
        num_steps = action.shape[1]
        places = (self._head + torch.arange(num_steps, device=self._device)) % self._capacity
        for kept, new in ((self._observation, observation), (self._columns, columns)):
            for name, table in kept.items():
                table.index_copy_(1, places, new[name].to(self._device))
        self._head = (self._head + num_steps) % self._capacity
        self.size = min(self.size + num_steps, self._capacity)

    def sample(self, count: int, *, num_steps: int, gamma: float) -> NStepBatch:
        """Draw decisions, each with its n-step return, n being `num_steps`."""
        num_clusters = len(self._columns["action"])
        oldest = self._head - self.size
        age_B = torch.randint(self.size - num_steps, (count,), device=self._device)
        cluster_B = torch.randint(num_clusters, (count,), device=self._device)
        total_B = torch.zeros(count, device=self._device)
        discount_B = torch.ones(count, device=self._device)
        is_valid_B = torch.ones(count, device=self._device)
        for step in range(num_steps):
            place_B = (oldest + age_B + step) % self._capacity
            total_B += discount_B * self._columns["reward"][cluster_B, place_B]
            discount_B *= gamma ** self._columns["elapsed"][cluster_B, place_B]
            is_valid_B *= ~self._columns["is_cut"][cluster_B, place_B]
        first_B = (oldest + age_B) % self._capacity
        last_B = (oldest + age_B + num_steps) % self._capacity
        return NStepBatch(
            observation={k: v[cluster_B, first_B] for k, v in self._observation.items()},
            action=self._columns["action"][cluster_B, first_B],
            n_step_reward=total_B,
            discount=discount_B,
            next_observation={k: v[cluster_B, last_B] for k, v in self._observation.items()},
            is_valid=is_valid_B,
        )

    def _allocate(self, table: Tensor) -> Tensor:
        shape = (table.shape[0], self._capacity, *table.shape[2:])
        return torch.zeros(shape, dtype=table.dtype, device=self._device)
