"""A replay memory of columns that stays on the learner's device.

Clusters are rows and decisions are columns of a ring, so an observation is stored once, and the one
that a decision is bootstrapped from is found beside it. The n-step return of a decision is worked
out once, when its n ticks are over.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class NStepBatch(NamedTuple):
    """Decisions with what the next n ticks brought."""

    observation: dict[str, Tensor]  # (B, ...) each
    action: Tensor  # (B,) int64
    n_step_reward: Tensor  # (B,) discounted sum of rewards
    discount: Tensor  # (B,) of the bootstrap
    next_observation: dict[str, Tensor]  # (B, ...) each
    is_valid: Tensor  # (B,) float, 0 where an episode was cut on the way


class NStepReturns(NamedTuple):
    """What follows each decision of a table; all are (E, W)."""

    total: Tensor  # discounted sum of rewards
    discount: Tensor
    later: Tensor  # int64, column of the decision to bootstrap from
    is_known: Tensor  # bool, whether that decision is in the table
    is_whole: Tensor  # bool, whether no episode was cut before it


def n_step_returns(
    reward: Tensor, elapsed: Tensor, is_cut: Tensor, *, num_ticks: int, gamma: float
) -> NStepReturns:
    """Return the n-step returns of all decisions; arguments are (E, W).

    A return sums the rest of the decision's own tick and the next n - 1 ticks, and is bootstrapped
    from the first decision of the tick after. So no decision is bootstrapped from another one of
    its own tick: a chain of maxima over decisions that take no time would add up their errors.

    Args:
        elapsed: ticks that each decision took, 0 or 1.
        is_cut: whether the next column belongs to another episode.
    """
    tick = elapsed.cumsum(dim=1) - elapsed
    weight = gamma ** tick.double()
    before = _sums_before(weight * reward)
    later = torch.searchsorted(tick, tick + num_ticks)
    is_known = later < reward.shape[1]
    later = later.clamp(max=reward.shape[1] - 1)
    cuts_before = _sums_before(is_cut.long())
    return NStepReturns(
        total=((before.gather(1, later) - before) / weight).to(reward.dtype),
        discount=(gamma ** (tick.gather(1, later) - tick).double()).to(reward.dtype),
        later=later,
        is_known=is_known,
        is_whole=cuts_before.gather(1, later) == cuts_before,
    )


def _sums_before(table: Tensor) -> Tensor:
    return table.cumsum(dim=1) - table


class ColumnReplay:
    """Keeps the last `capacity` decisions of each of E clusters.

    Args:
        capacity: decisions of a cluster, C.
        num_ticks: n of the n-step returns.
        gamma: discount of a tick.
        device: where the memory lives.
    """

    def __init__(
        self, capacity: int, *, num_ticks: int, gamma: float, device: torch.device | str
    ) -> None:
        self._capacity = capacity
        self._num_ticks = num_ticks
        self._gamma = gamma
        self._device = torch.device(device)
        self._observation: dict[str, Tensor] = {}  # (E, C, ...) each
        self._columns: dict[str, Tensor] = {}  # (E, C) each
        self._head = 0
        self._size = 0
        self._num_open = 0  # newest decisions of a cluster whose n ticks are not over, at most

    @property
    def num_known(self) -> int:
        """Decisions that can be drawn, over all clusters."""
        return len(self._columns["action"]) * (self._size - self._num_open)

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
            self._allocate(observation, columns)
        num_steps = action.shape[1]
        places = self._places(self._head, num_steps)
        for kept, new in ((self._observation, observation), (self._columns, columns)):
            for name, table in new.items():
                kept[name].index_copy_(1, places, table.to(self._device))
        self._head = (self._head + num_steps) % self._capacity
        self._size = min(self._size + num_steps, self._capacity)
        self._look_ahead(min(self._num_open + num_steps, self._size))

    def sample(self, count: int) -> NStepBatch:
        """Draw decisions, each with its n-step return."""
        age_B = torch.randint(self._size - self._num_open, (count,), device=self._device)
        place_B = (self._head - self._size + age_B) % self._capacity
        cluster_B = torch.randint(len(self._columns["action"]), (count,), device=self._device)
        rows = {name: table[cluster_B, place_B] for name, table in self._columns.items()}
        later_B = rows["later"]
        return NStepBatch(
            observation={k: v[cluster_B, place_B] for k, v in self._observation.items()},
            action=rows["action"],
            n_step_reward=rows["total"],
            discount=rows["discount"],
            next_observation={k: v[cluster_B, later_B] for k, v in self._observation.items()},
            is_valid=rows["is_whole"].to(rows["total"].dtype),
        )

    def _look_ahead(self, num_newest: int) -> None:
        """Work out the returns of the newest decisions."""
        places = self._places(self._head - num_newest, num_newest)
        reward, elapsed, is_cut = (
            self._columns[name].index_select(1, places) for name in ("reward", "elapsed", "is_cut")
        )
        returns = n_step_returns(
            reward, elapsed, is_cut, num_ticks=self._num_ticks, gamma=self._gamma
        )
        found = {
            "total": returns.total,
            "discount": returns.discount,
            "later": places[returns.later],
            "is_whole": returns.is_whole,
        }
        for name, table in found.items():
            self._columns[name].index_copy_(1, places, table)
        self._num_open = int((~returns.is_known).sum(dim=1).max())

    def _places(self, first: int, count: int) -> Tensor:
        return (first + torch.arange(count, device=self._device)) % self._capacity

    def _allocate(self, observation: dict[str, Tensor], columns: dict[str, Tensor]) -> None:
        reward, elapsed, is_cut = columns["reward"], columns["elapsed"], columns["is_cut"]
        found = {"total": reward, "discount": reward, "later": elapsed, "is_whole": is_cut}
        for kept, like in ((self._observation, observation), (self._columns, columns | found)):
            for name, table in like.items():
                shape = (table.shape[0], self._capacity, *table.shape[2:])
                kept[name] = torch.zeros(shape, dtype=table.dtype, device=self._device)
