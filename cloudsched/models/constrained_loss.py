"""The terms of constrained learning from logs: targets, pessimism, and what imitation weighs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from cloudsched.models.heads import is_asleep
from cloudsched.models.masking import likeliest_kind, log_total

NUM_KINDS = 4  # of actions: place, wake, sleep, wait
PLACE, WAKE, SLEEP, WAIT = range(NUM_KINDS)
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


def constrained_target(*, reward_B2: Tensor, discount_B: Tensor, next_B2: Tensor) -> Tensor:
    """Return targets (B, 2) of reward and cost.

    Args:
        discount_B: zero where the episode terminated.
        next_B2: what the slow network says of the legal action that follows. Chosen by the online
            network, this is double Q.
    """
    return reward_B2 + discount_B.unsqueeze(1) * next_B2


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


def kinds_of(action_B: Tensor, observation: Mapping[str, Tensor]) -> Tensor:
    """Return (B,) the kinds of some actions, as in `kinds`."""
    num_servers = observation["servers"].shape[1]
    num_pairs = num_servers * observation["jobs"].shape[1]
    server_B1 = (action_B - num_pairs).clamp(0, num_servers - 1).unsqueeze(1)
    kind_B = torch.where(is_asleep(observation).gather(1, server_B1).squeeze(1), WAKE, SLEEP)
    kind_B = torch.where(action_B == observation["action_mask"].shape[1] - 1, WAIT, kind_B)
    return torch.where(action_B < num_pairs, PLACE, kind_B)


def sums_by_kind(chance_BA: Tensor, observation: Mapping[str, Tensor]) -> Tensor:
    """Return (B, 4) the sum over the actions of each kind."""
    num_pairs = observation["servers"].shape[1] * observation["jobs"].shape[1]
    toggle_BN = chance_BA[:, num_pairs:-1]
    place_B1 = chance_BA[:, :num_pairs].sum(dim=1, keepdim=True)
    toggle_B1 = toggle_BN.sum(dim=1, keepdim=True)
    wake_B1 = torch.zeros_like(place_B1)
    if toggle_BN.shape[1]:
        wake_B1 = (toggle_BN * is_asleep(observation)).sum(dim=1, keepdim=True)
    return torch.cat([place_B1, wake_B1, toggle_B1 - wake_B1, chance_BA[:, -1:]], dim=1)


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
