"""The terms of constrained learning from logs: targets, pessimism, and what imitation weighs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from cloudsched.models.heads import Heads, is_asleep
from cloudsched.models.masking import likeliest_kind, log_total

NUM_KINDS = 4  # of actions: place, wake, sleep, wait
PLACE, WAKE = 0, 1
RARITY = 0.5  # the weight of a kind of action in imitation is its share to this power, inverted
MIN_SHARE = 1e-4  # of decisions; what is rarer weighs no more


@dataclass(frozen=True, kw_only=True)
class ConstrainedLoss:
    """The loss and what it was made from; scalars but for `noise_4` and `share_4`."""

    total: Tensor
    prior: Tensor
    """Cross-entropy with the data, in nats, weighed by kind of action."""
    policy: Tensor
    """Cross-entropy of the policy with what it imitates, in nats, weighed by kind of action."""
    value_reward: Tensor
    value_cost: Tensor
    advantage_reward: Tensor
    advantage_cost: Tensor
    luck: Tensor
    pessimism: Tensor
    """By how much the data's own cost lies above the soft minimum over all legal actions."""
    estimated_excess: Tensor
    """Share of full power that the policy draws beyond its use of CPU, on the data's states."""
    estimated_cost: Tensor
    """Violation rate of the policy, on the states of the data."""
    noise_4: Tensor
    """(4,) mean squares of the targets of luck and of advantages."""
    share_4: Tensor
    """(4,) shares of the kinds of action in what was meant."""


def constrained_target(
    *, reward_B2: Tensor, discount_B: Tensor, next_action_B: Tensor, target_next: Heads
) -> tuple[Tensor, Tensor]:
    """Return targets (B, 2) of reward and cost, and the next values in them.

    Args:
        discount_B: zero where the episode terminated.
        next_action_B: what follows, legal. Chosen by the online network, this is double Q.
    """
    best_B1 = next_action_B.unsqueeze(1)
    gain_B2 = torch.cat(
        [target_next.reward_BA.gather(1, best_B1), target_next.cost_BA.gather(1, best_B1)], dim=1
    )
    next_B2 = target_next.value_B2 + gain_B2
    return reward_B2 + discount_B.unsqueeze(1) * next_B2, next_B2


def cost_pessimism(cost_BA: Tensor, mask_BA: Tensor, action_B: Tensor, scale: float) -> Tensor:
    """Return CQL's penalty for costs: the data's own minus the soft minimum of the legal ones."""
    legal_BA = (-cost_BA / scale).masked_fill(mask_BA == 0, torch.finfo(cost_BA.dtype).min)
    own_B = cost_BA.gather(1, action_B.unsqueeze(1)).squeeze(1) / scale
    return (own_B + log_total(legal_BA).squeeze(1)).mean()


def decisions(logits_BA: Tensor, observation: Mapping[str, Tensor]) -> Tensor:
    """Return (B,) what a policy with these masked logits does, as bundles decide: kind first."""
    num_servers, num_jobs = observation["servers"].shape[1], observation["jobs"].shape[1]
    return likeliest_kind(logits_BA, num_servers, num_jobs).argmax(dim=1)


def kinds(observation: Mapping[str, Tensor]) -> Tensor:
    """Return (B, A) the kind of each action: 0 to place, 1 to wake, 2 to sleep, 3 to wait."""
    num_pairs = observation["servers"].shape[1] * observation["jobs"].shape[1]
    kind_BA = torch.zeros_like(observation["action_mask"], dtype=torch.int64)
    if kind_BA.shape[1] > num_pairs + 1:
        kind_BA[:, num_pairs:-1] = torch.where(is_asleep(observation), 1, 2)
    kind_BA[:, -1] = 3
    return kind_BA


def kind_weights(share_4: Tensor) -> Tensor:
    """Return (4,) what a decision of each kind counts in imitation: the rarer, the more.

    A kind's weight is `share ** -RARITY`, scaled so that a decision counts one on average.
    """
    weight_4 = share_4.clamp(min=MIN_SHARE) ** -RARITY
    return weight_4 / (weight_4 * share_4).sum()


def loss_means(losses: list[ConstrainedLoss]) -> dict[str, float]:
    """Return the mean of each term over some steps."""
    return {
        f.name: torch.stack([getattr(loss, f.name).detach() for loss in losses]).mean().item()
        for f in fields(ConstrainedLoss)
        if f.name not in ("noise_4", "share_4")
    }
