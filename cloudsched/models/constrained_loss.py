"""The loss of constrained learning from logs, term by term.

This is what is meant, and what runs anywhere; on the CPU `cloudsched.models.constrained_gradient`
takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cloudsched.models.heads import Heads, better_logits
from cloudsched.models.kinds import kinds, sums_by_kind
from cloudsched.models.masking import likeliest_kind, log_prob, log_probs, log_total, mask_logits
from cloudsched.models.prepared import FOLLOWING, IS_ASLEEP, KIND, NEXT, OUTCOME, STRAINED_KIND

ADVANTAGE_WEIGHT = 0.1


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


class Scales(NamedTuple):
    """In what the terms are measured, and how much they count; for the kernels, as arrays."""

    value_2: Any  # what one of the network's values stands for
    advantage: float  # what one of its advantages stands for, in the same
    nats_2: tuple[float, float]  # the same of reward and of cost, in nats
    price: float  # of costs
    reach: float  # nats
    pessimism: float
    unit_4: Any  # squares of luck (2) and of advantages (2)
    kind_4: Any  # what an action of each kind counts in imitation
    strained_4: Any  # what a strained row counts, by what was meant


def constrained_loss(
    heads: Heads,
    luck_B2: Tensor,
    next_U2: Tensor,
    batch: Mapping[str, Tensor],
    scales: Scales,
) -> ConstrainedLoss:
    """Return the loss of a batch (`cloudsched.models.prepared`).

    Args:
        heads: of the B logged rows and those that follow them, as the network gave them.
        luck_B2: what is predicted of the surprise from what happened whatever was decided.
        next_U2: values of the next rows.
    """
    action_B, meant_B, kind_B = batch["action"], batch["behaviour_probability"], batch[KIND]
    unit_4, weight_4, is_asleep_RT = scales.unit_4, scales.kind_4, batch[IS_ASLEEP]
    logged, strained = apart(heads, len(action_B))
    is_asleep_BT, is_asleep_ST = is_asleep_RT[: len(action_B)], is_asleep_RT[len(action_B) :]

    next_B2 = next_U2.index_select(0, batch[FOLLOWING])
    target_B2 = constrained_target(
        reward_B2=batch[OUTCOME], discount_B=batch["discount"], next_B2=next_B2
    )
    value_error_B2 = logged.value_B2 - target_B2 / scales.value_2
    value_2 = nn.functional.smooth_l1_loss(
        value_error_B2, torch.zeros_like(value_error_B2), reduction="none"
    ).mean(dim=0)
    surprise_B2 = -value_error_B2.detach()
    luck_2 = (luck_B2 - surprise_B2).square().mean(dim=0)
    left_B2 = surprise_B2 - luck_B2.detach()
    taken_B1 = action_B.unsqueeze(1)
    own = [advantage_BA.gather(1, taken_B1) for advantage_BA in (logged.reward_BA, logged.cost_BA)]
    advantage_2 = (torch.cat(own, dim=1) * scales.advantage - left_B2).square().mean(dim=0)

    own_log_prob_B = log_prob(log_probs(logged.prior_BA), action_B)
    prior = -(meant_B * weight_4[kind_B] * own_log_prob_B).mean()
    with torch.no_grad():
        wanted_BA = torch.softmax(better(*logged[:2], is_asleep_BT, scales), dim=1)
        weight_B = sums_by_kind(wanted_BA, is_asleep_BT) @ weight_4
    policy = -(weight_B * (wanted_BA * log_probs(logged.policy_BA)).sum(dim=1)).mean()
    strain = shortfall(strained, is_asleep_ST, batch[STRAINED_KIND], scales) / len(action_B)
    cost_BA = scales.nats_2[1] * logged.cost_BA
    gap = cost_pessimism(cost_BA, logged.mask_BA, action_B)
    # In the units of the squared error beside it: a shift of `pessimism` nats where the policy
    # takes an action twice as often as the data does.
    curvature = 2.0 * (scales.advantage / scales.nats_2[1]) ** 2 / unit_4[3]
    total = (
        prior
        + policy
        + strain
        + value_2.sum()
        # Each in units of its own noise, or the loudest term would own the shared layers.
        + (luck_2 / unit_4[:2]).sum()
        # Mostly noise, which must not drown what the prior teaches the shared layers; the
        # heads themselves learn as fast, whatever the weight: Adam sees to that.
        + ADVANTAGE_WEIGHT * ((advantage_2 / unit_4[2:]).sum() + scales.pessimism * curvature * gap)
    )
    share_4 = torch.zeros_like(weight_4).index_add(0, kind_B, meant_B) / meant_B.sum()
    return ConstrainedLoss(
        total=total,
        prior=prior.detach(),
        policy=policy.detach(),
        value_reward=value_2[0].detach(),
        value_cost=value_2[1].detach(),
        advantage_reward=advantage_2[0].detach(),
        advantage_cost=advantage_2[1].detach(),
        luck=(luck_2 / unit_4[:2]).mean().detach(),
        pessimism=gap.detach(),
        estimated_excess=-next_B2[:, 0].mean(),
        estimated_cost=next_B2[:, 1].mean(),
        noise_4=torch.cat([surprise_B2.square().mean(dim=0), left_B2.square().mean(dim=0)]),
        share_4=share_4,
    )


def next_actions(advice_BHA: Tensor, batch: Mapping[str, Tensor], scales: Scales) -> Tensor:
    """Return (B,) what the better policy does next, as bundles decide: kind first."""
    mask_BA, is_asleep_BT = batch[NEXT + "action_mask"], batch[NEXT + IS_ASLEEP]
    num_pairs = mask_BA.shape[1] - 1 - is_asleep_BT.shape[1]
    score_BA = better(advice_BHA, mask_BA, is_asleep_BT, scales)
    return likeliest_kind(score_BA, num_servers=1, num_jobs=num_pairs).argmax(dim=1)


def better(outputs_BHA: Tensor, mask_BA: Tensor, is_asleep_BT: Tensor, scales: Scales) -> Tensor:
    """Return (B, A) masked logits of the policy to imitate."""
    return better_logits(
        outputs_BHA,
        mask_BA,
        is_asleep_BT,
        price=scales.price,
        nats_2=scales.nats_2,
        reach=scales.reach,
    )


def constrained_target(*, reward_B2: Tensor, discount_B: Tensor, next_B2: Tensor) -> Tensor:
    """Return targets (B, 2) of reward and cost.

    Args:
        discount_B: zero where the episode terminated.
        next_B2: what the slow network says of the legal action that follows. Chosen by the online
            network, this is double Q.
    """
    return reward_B2 + discount_B.unsqueeze(1) * next_B2


def cost_pessimism(cost_BA: Tensor, mask_BA: Tensor, action_B: Tensor) -> Tensor:
    """Return CQL's penalty for costs: the data's own minus the soft minimum of the legal ones."""
    own_B = cost_BA.gather(1, action_B.unsqueeze(1)).squeeze(1)
    return (own_B + log_total(mask_logits(-cost_BA, mask_BA)).squeeze(1)).mean()


def shortfall(heads: Heads, is_asleep_ST: Tensor, kind_S: Tensor, scales: Scales) -> Tensor:
    """Return by how many nats prior and policy miss what was meant under strain, summed.

    Only the kind of action counts; which one it is, they learn from what was logged.

    Args:
        kind_S: what was meant; negative where a row does not count.
    """
    does_count_S = kind_S >= 0
    kind_S, is_asleep_ST = kind_S[does_count_S], is_asleep_ST[does_count_S]
    weight_S = (scales.strained_4 * scales.kind_4)[kind_S]
    total = torch.zeros((), device=weight_S.device)
    for logits_SA in (heads.prior_BA[does_count_S], heads.policy_BA[does_count_S]):
        is_wanted_SA = kinds(is_asleep_ST, logits_SA.shape[1]) == kind_S.unsqueeze(1)
        missed_S1 = log_total(logits_SA) - log_total(mask_logits(logits_SA, is_wanted_SA))
        total = total + (weight_S * missed_S1.squeeze(1)).sum()
    return total


def apart(heads: Heads, count: int) -> tuple[Heads, Heads]:
    """Return the heads of the first rows and those of the rest."""
    first, rest = zip(*(part.tensor_split([count]) for part in heads), strict=True)
    return Heads(*first), Heads(*rest)


def loss_means(losses: list[ConstrainedLoss]) -> dict[str, float]:
    """Return the mean of each term over some steps."""
    return {
        f.name: torch.stack([getattr(loss, f.name).detach() for loss in losses]).mean().item()
        for f in fields(ConstrainedLoss)
        if f.name not in ("noise_4", "share_4")
    }
