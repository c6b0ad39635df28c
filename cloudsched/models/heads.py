"""What networks of offline learning say: a prior, two values of each action and a policy.

The logits of the prior are those of a policy that imitates the data. Advantages say how much better
or worse an action is than what the data would do, in power (reward) and in SLA violations (cost);
values are those of doing as the data for one decision and following the learned policy afterwards.
The policy imitates the best of what is near the prior (`better_logits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cloudsched.models.masking import mask_logits

PRIOR, REWARD, COST, POLICY = range(4)
NUM_HEADS = 4


class Heads(NamedTuple):
    """What the network says of B observations; advantages of illegal actions mean nothing."""

    outputs_BHA: Tensor  # prior, reward, cost and policy
    mask_BA: Tensor
    value_B2: Tensor  # of reward and of cost

    @property
    def prior_BA(self) -> Tensor:
        """Masked logits."""
        return mask_logits(self.outputs_BHA[:, PRIOR], self.mask_BA)

    @property
    def reward_BA(self) -> Tensor:
        """Advantages in reward."""
        return self.outputs_BHA[:, REWARD]

    @property
    def cost_BA(self) -> Tensor:
        """Advantages in cost."""
        return self.outputs_BHA[:, COST]

    @property
    def policy_BA(self) -> Tensor:
        """Masked logits."""
        return mask_logits(self.outputs_BHA[:, POLICY], self.mask_BA)


def better_logits(
    outputs_BHA: Tensor,
    mask_BA: Tensor,
    is_asleep_BT: Tensor,
    *,
    price: float | Tensor,
    nats_2: Sequence[float],
    reach: float,
) -> Tensor:
    """Return (B, A) masked logits of a better policy that keeps to what the data supports.

    Near the prior it maximises reward - price * cost - KL(policy || prior), in nats. No action
    gains or loses more than `reach` of them: what is hopeless under the prior stays so, however
    good it looks to heads that never saw what comes of it.

    Which job goes where and which server wakes is free within that, but only sleeping may gain on
    other kinds of action, and only where no job can be placed; placing, waking and waiting keep
    their odds against each other. Whoever holds jobs back or wakes too late pays for it long
    afterwards, in states that the data lacks. Whoever sleeps too early is soon corrected by waking,
    but not whoever spends the decisions of a tick on sleeping while jobs wait.

    Args:
        outputs_BHA: as in `Heads`; the policy is not read.
        is_asleep_BT: see `cloudsched.models.kinds`.
        nats_2: what one of reward and of cost is worth.
    """
    reward_BA, cost_BA = outputs_BHA[:, REWARD], outputs_BHA[:, COST]
    gain_BA = (nats_2[0] * reward_BA - price * nats_2[1] * cost_BA) / reach
    gain_BA = reach * gain_BA.tanh()
    num_toggles = is_asleep_BT.shape[1]
    parts = [gain_BA.shape[1] - 1 - num_toggles, num_toggles, 1]
    place_BP, toggle_BT, wait_B1 = torch.split(gain_BA, parts, dim=1)
    prior_BA = mask_logits(outputs_BHA[:, PRIOR], mask_BA)
    prior_BP, prior_BT, _ = torch.split(prior_BA, parts, dim=1)
    place_BP = place_BP - _growth(prior_BP, place_BP)
    if num_toggles:
        can_place_B1 = (mask_BA[:, : parts[0]] != 0).any(1, keepdim=True)
        toggle_BT = toggle_BT.masked_fill(can_place_B1 & ~is_asleep_BT, 0.0)
        growth_B1 = _growth(mask_logits(prior_BT, is_asleep_BT), toggle_BT)
        toggle_BT = torch.where(is_asleep_BT, toggle_BT - growth_B1, toggle_BT)
    return prior_BA + torch.cat([place_BP, toggle_BT, torch.zeros_like(wait_B1)], dim=1)


def _growth(logits_BG: Tensor, gain_BG: Tensor) -> Tensor:
    """Return (B, 1) how much likelier some actions become together, in nats; gains are few."""
    return (torch.softmax(logits_BG, dim=1) * gain_BG.exp()).sum(dim=1, keepdim=True).log()
