"""Kinds of actions: to place a job, to wake a server, to put one to sleep, to wait.

Which toggles wake and which put to sleep is told by `is_asleep_BT`, the servers that can be toggled
(`toggled`); it and the number of actions are all that is needed to tell the kinds.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

NUM_KINDS = 4
PLACE, WAKE, SLEEP, WAIT = range(NUM_KINDS)
RARITY = 0.5  # the weight of a kind of action in imitation is its share to this power, inverted
MIN_SHARE = 1e-4  # of decisions; what is rarer weighs no more


def toggled(observation: Mapping[str, Tensor]) -> Tensor:
    """Return (B, T) which servers sleep, of those that can be toggled: all or, where nothing may
    sleep, none.
    """
    servers_BNF, jobs_BKF = observation["servers"], observation["jobs"]
    num_pairs = servers_BNF.shape[1] * jobs_BKF.shape[1]
    num_toggles = observation["action_mask"].shape[1] - 1 - num_pairs
    return is_asleep(observation)[:, :num_toggles]


def is_asleep(observation: Mapping[str, Tensor]) -> Tensor:
    """Return (B, N) which servers sleep."""
    servers_BNF = observation["servers"]
    num_resources = (servers_BNF.shape[2] - 12) // 2
    return servers_BNF[:, :, 2 * num_resources + 5] != 0.0


def kinds(is_asleep_BT: Tensor, num_actions: int) -> Tensor:
    """Return (B, A) the kind of each action."""
    num_toggles = is_asleep_BT.shape[1]
    kind_BA = is_asleep_BT.new_full((len(is_asleep_BT), num_actions), PLACE, dtype=torch.int64)
    kind_BA[:, num_actions - 1 - num_toggles : -1] = torch.where(is_asleep_BT, WAKE, SLEEP)
    kind_BA[:, -1] = WAIT
    return kind_BA


def kinds_of(action_B: Tensor, is_asleep_BT: Tensor, num_actions: int) -> Tensor:
    """Return (B,) the kinds of some actions."""
    num_pairs = num_actions - 1 - is_asleep_BT.shape[1]
    kind_B = torch.where(action_B < num_pairs, PLACE, WAIT)
    toggled_B = ((action_B >= num_pairs) & (action_B < num_actions - 1)).nonzero().squeeze(1)
    is_wake = is_asleep_BT[toggled_B, action_B[toggled_B] - num_pairs]
    return kind_B.index_put((toggled_B,), torch.where(is_wake, WAKE, SLEEP))


def sums_by_kind(chance_BA: Tensor, is_asleep_BT: Tensor) -> Tensor:
    """Return (B, 4) the sum over the actions of each kind."""
    num_toggles = is_asleep_BT.shape[1]
    parts = [chance_BA.shape[1] - 1 - num_toggles, num_toggles, 1]
    place_BP, toggle_BT, wait_B1 = torch.split(chance_BA, parts, dim=1)
    wake_B1 = (toggle_BT * is_asleep_BT).sum(dim=1, keepdim=True)
    sleep_B1 = toggle_BT.sum(dim=1, keepdim=True) - wake_B1
    return torch.cat([place_BP.sum(dim=1, keepdim=True), wake_B1, sleep_B1, wait_B1], dim=1)


def kind_weights(share_4: Tensor) -> Tensor:
    """Return (4,) what a decision of each kind counts in imitation: the rarer, the more.

    A kind's weight is `share ** -RARITY`, scaled so that a decision counts one on average.
    """
    weight_4 = share_4.clamp(min=MIN_SHARE) ** -RARITY
    return weight_4 / (weight_4 * share_4).sum()
