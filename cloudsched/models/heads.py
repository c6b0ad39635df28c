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
    gains or loses more than `reach` of them, nor does a kind of action: what is hopeless under the
    prior stays so, however good it looks to heads that never saw what comes of it.

    Which job goes where and which server wakes or sleeps is free within that, but kinds of action
    keep their odds against each other where a job can be placed. Elsewhere there is one price of a
    server that is awake: what waking one costs is what sleeping one saves, so that the policy does
    not wake what it puts to sleep. It is read off the wakes. Logged sleeps do not tell it: where a
    server is missed their author wakes one at once, so that they show as a loss; a server that was
    woken stays awake for a while. Waking never gains, as jams teach when to wake
    (`cloudsched.models.strain`).

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
        can_wake_B1 = (mask_BA[:, parts[0] : -1] * is_asleep_BT != 0).any(1, keepdim=True)
        wake_B1 = _growth(mask_logits(prior_BT, is_asleep_BT), toggle_BT)
        sleep_B1 = _growth(mask_logits(prior_BT, ~is_asleep_BT), toggle_BT)
        # Where all are awake there is only what sleeping did for itself.
        fewer_B1 = torch.where(can_wake_B1, -wake_B1, sleep_B1)
        waking_BT = toggle_BT - torch.where(can_place_B1, wake_B1, wake_B1.clamp(min=0.0))
        sleeping_BT = (toggle_BT - sleep_B1 + fewer_B1).masked_fill(can_place_B1, 0.0)
        toggle_BT = torch.where(is_asleep_BT, waking_BT, sleeping_BT)
    return prior_BA + torch.cat([place_BP, toggle_BT, torch.zeros_like(wait_B1)], dim=1)


def _growth(logits_BG: Tensor, gain_BG: Tensor) -> Tensor:
    """Return (B, 1) how much likelier some actions become together, in nats; gains are few."""
    return (torch.softmax(logits_BG, dim=1) * gain_BG.exp()).sum(dim=1, keepdim=True).log()
