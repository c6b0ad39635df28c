"""Constrained learning from logged decisions: least power, with violations below a limit.

A fitted Q iteration with two heads. `Q_r` is power, `Q_c` is the violation rate, and both are split
into a value and an advantage: the value is fitted to the double-Q target, the advantage to what is
left of it. What the arrivals of the tick did to the target is predicted from the arrivals alone and
taken out first: they are the same whatever was decided, so this is less noise and no bias. The
policy maximises `Q_r - lambda * Q_c` near a prior that imitates the data, and within its reach: it
does nothing that nobody meant to do.

The data should be one author's: a rule, with and without random decisions. A mixture of rules is
nobody's rule. Where one would sleep a server and another would not, the mixture half wants to, at
any time, so that a small push makes it sleep all; one rule has sharp edges, and a push moves them.

Jams are not in the data, so what to do in one is put there (`cloudsched.models.strain`).

What is rare counts more in imitation. A rule may wake a server once in two thousand decisions; a
clone that never does is right 99.95 % of the time, and its queue grows without end.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from cloudsched.config import Settings
from cloudsched.models.constrained_loss import (
    NUM_KINDS,
    ConstrainedLoss,
    constrained_target,
    cost_pessimism,
    decisions,
    kind_weights,
    kinds_of,
    sums_by_kind,
)
from cloudsched.models.heads import POLICY, PRIOR, HeadNetwork, Heads, build_heads
from cloudsched.models.lagrange import LagrangeConfig
from cloudsched.models.masking import log_prob, log_probs
from cloudsched.models.networks import NetworkConfig, Observation, ObservationSizes
from cloudsched.models.precision import DEFAULT_PRECISION, check_precision
from cloudsched.models.strain import apart, in_one, shortfall, strained_rows

NEXT, NEXT_ACTION = "next_", "next_action"
OBSERVATION = ("servers", "jobs", "context", "action_mask")
POWER_SCALE = 0.1  # of full power; brings values of reward to order one
RATE_SCALE = 0.05  # of jobs; brings values of cost to order one
LUCK_WIDTH = 64
ADVANTAGE_WEIGHT = 0.1
NOISE_RATE = 0.02  # of the running means of squared targets and of shares


@dataclass(frozen=True, kw_only=True)
class ConstrainedConfig(Settings):
    """How a policy is learned from logs."""

    network: NetworkConfig = field(default_factory=NetworkConfig)
    """The network of the policy; its heads share all but the last layer."""
    constraint: LagrangeConfig = field(default_factory=LagrangeConfig)
    """The limit of the violation rate, and how its price is found."""
    gamma: float = 0.97
    """Discount of a tick."""
    num_ticks: int = 5
    """Ticks until a decision's outcome is bootstrapped."""
    temperature: float = 0.015
    """Price of leaving the data: ticks of full power that one nat of divergence is worth."""
    reach: float = 2.0
    """Most nats that an action can gain or lose against the data."""
    pessimism: float = 0.1
    """Weight of CQL on the cost head: actions that the data lacks look costlier."""
    learning_rate: float = 2e-3
    """Adam's learning rate at the start; it falls to a tenth along a cosine."""
    batch_size: int = 512
    """Transitions of a gradient step, over all workers."""
    target_rate: float = 0.05
    """Share of the target network that is replaced by the online one at each step."""
    gradient_clip: float = 5.0
    """Largest norm of the gradient."""
    precision: str = DEFAULT_PRECISION
    """Of matrix products: `float32`, `bfloat16`, or `auto` for whichever the hardware is faster at.
    Weights, losses and the policy at work are in float32."""

    def __post_init__(self) -> None:
        if not isinstance(self.network, NetworkConfig):
            object.__setattr__(self, "network", NetworkConfig.from_dict(self.network))
        self._number("gamma", low=0.0, high=0.99999)
        for name in ("num_ticks", "batch_size"):
            self._integer(name, low=1)
        for name in ("temperature", "reach", "learning_rate", "gradient_clip"):
            self._number(name, low=0.0, exclusive=True)
        self._number("pessimism", low=0.0)
        self._number("target_rate", low=0.0, high=1.0, exclusive=True)
        check_precision(self.precision)

    @property
    def nat(self) -> float:
        """What one nat of divergence is worth, on the scale of values."""
        return self.temperature * (1.0 - self.gamma)


class ConstrainedModel(nn.Module):
    """Everything with weights: heads, their slow copy, and the predictor of luck."""

    scale_2: Tensor
    noise_4: Tensor
    share_4: Tensor
    heard: Tensor

    def __init__(self, sizes: ObservationSizes, config: ConstrainedConfig) -> None:
        super().__init__()
        self.heads = build_heads(sizes, config.network)
        self.target = copy.deepcopy(self.heads).requires_grad_(False)
        # Jobs and work arriving a tick, over three horizons: see `cloudsched.envs.observation`.
        self._arrivals = slice(sizes.num_resources + 1, sizes.num_resources + 7)
        self.luck = nn.Sequential(
            nn.Linear(sizes.context_features + 6, LUCK_WIDTH),
            nn.ReLU(),
            nn.Linear(LUCK_WIDTH, LUCK_WIDTH),
            nn.ReLU(),
            nn.Linear(LUCK_WIDTH, 2),
        )
        self.register_buffer("scale_2", torch.tensor([POWER_SCALE, RATE_SCALE]))
        # How loud the targets of luck (2) and of advantages (2) are, and how common each kind of
        # action is: running means, and their weight.
        self.register_buffer("noise_4", torch.zeros(4))
        self.register_buffer("share_4", torch.zeros(NUM_KINDS))
        self.register_buffer("heard", torch.zeros(()))

    def forward(
        self, batch: Mapping[str, Tensor], price: Tensor, config: ConstrainedConfig
    ) -> ConstrainedLoss:
        """Return the loss of a batch of transitions (`cloudsched.datasets.transitions`)."""
        mask_BA, action_B = batch["action_mask"], batch["action"]
        observation = {name: batch[name] for name in OBSERVATION}
        following = {name: batch[NEXT + name] for name in OBSERVATION}
        # Weighed with their own probability, random decisions do not count as what anyone meant.
        meant_B = batch["behaviour_probability"]
        own_kind_B = kinds_of(action_B, observation)
        strained = strained_rows(observation, following["jobs"], own_kind_B, meant_B > 0.5)
        together = self._heads(self.heads, in_one(observation, *strained), config)
        heads, *strained_heads = apart(together, observation, *strained)
        with torch.no_grad():
            if NEXT_ACTION in batch:  # a given policy is evaluated
                next_action_B = batch[NEXT_ACTION]
            else:
                online = self._heads(self.heads, following, config)
                next_action_B = decisions(_score(online, price, config, following), following)
            reward_B2 = torch.stack([batch["reward"], batch["cost"]], dim=1)
            next_B2 = self._values(self.target, following, next_action_B, config)
            target_B2 = constrained_target(
                reward_B2=reward_B2, discount_B=batch["discount"], next_B2=next_B2
            )
        value_error_B2 = (heads.value_B2 - target_B2) / self.scale_2
        value_2 = nn.functional.smooth_l1_loss(
            value_error_B2, torch.zeros_like(value_error_B2), reduction="none"
        ).mean(dim=0)
        surprise_B2 = -value_error_B2.detach()
        exogenous = torch.cat([batch["context"], following["context"][:, self._arrivals]], dim=1)
        luck_B2 = self.luck(exogenous)
        luck_2 = (luck_B2 - surprise_B2).square().mean(dim=0)
        taken_B1 = action_B.unsqueeze(1)
        own_B2 = torch.cat(
            [heads.reward_BA.gather(1, taken_B1), heads.cost_BA.gather(1, taken_B1)], dim=1
        )
        left_B2 = surprise_B2 - luck_B2.detach()
        advantage_2 = (own_B2 / self.scale_2 - left_B2).square().mean(dim=0)
        # Each in units of its own noise, or the loudest term would own the shared layers.
        has_heard, heard = self.heard > 0.0, self.heard.clamp(min=1e-8)
        unit_4 = torch.where(has_heard, self.noise_4 / heard, torch.ones_like(self.noise_4))
        unit_4 = unit_4.clamp(min=1e-6)
        weight_4 = torch.where(
            has_heard, kind_weights(self.share_4 / heard), torch.ones_like(self.share_4)
        )
        share_4 = torch.zeros_like(self.share_4).index_add(0, own_kind_B, meant_B) / meant_B.sum()
        own_log_prob_B = log_prob(log_probs(heads.prior_BA), action_B)
        prior = -(meant_B * weight_4[own_kind_B] * own_log_prob_B).mean()
        with torch.no_grad():
            wanted_BA = torch.softmax(_score(heads, price, config, observation), dim=1)
            weight_B = sums_by_kind(wanted_BA, observation) @ weight_4
        policy = -(weight_B * (wanted_BA * log_probs(heads.policy_BA)).sum(dim=1)).mean()
        strain = shortfall(strained, strained_heads, weight_4) / len(action_B)
        gap = cost_pessimism(heads.cost_BA, mask_BA, action_B, config.nat)
        # In the units of the squared error beside it: a shift of `pessimism` nats where the policy
        # takes an action twice as often as the data does.
        curvature = 2.0 * (config.nat / RATE_SCALE) ** 2 / unit_4[3]
        total = (
            prior
            + policy
            + strain
            + value_2.sum()
            + (luck_2 / unit_4[:2]).sum()
            # Mostly noise, which must not drown what the prior teaches the shared layers; the
            # heads themselves learn as fast, whatever the weight: Adam sees to that.
            + ADVANTAGE_WEIGHT
            * ((advantage_2 / unit_4[2:]).sum() + config.pessimism * curvature * gap)
        )
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

    def hear(self, noise_4: Tensor, share_4: Tensor) -> None:
        """Take in how loud a batch's targets were and how common each kind of action.

        The next batch is weighed with it.
        """
        self.noise_4.lerp_(noise_4, NOISE_RATE)
        self.share_4.lerp_(share_4, NOISE_RATE)
        self.heard.lerp_(torch.ones_like(self.heard), NOISE_RATE)

    def values(
        self, observation: Mapping[str, Tensor], action_B: Tensor, config: ConstrainedConfig
    ) -> Tensor:
        """Return (B, 2) values of reward and cost of taking the actions, then the policy's own."""
        return self._values(self.heads, observation, action_B, config)

    def start_at(self, power_share: float, violation_rate: float) -> None:
        """Begin with the means of the data as the value of everything."""
        means_2 = torch.tensor([-power_share, violation_rate]) / self.scale_2.cpu()
        for network in (self.heads, self.target):
            network.start_at(means_2)

    def update_target(self, rate: float) -> None:
        """Move the slow copy towards the online heads."""
        with torch.no_grad():
            online: list[Tensor] = list(self.heads.parameters())
            slow: list[Tensor] = list(self.target.parameters())
            torch._foreach_lerp_(slow, online, rate)

    def policy_weights(self) -> dict[str, Tensor]:
        """Return the weights of an ordinary network that decides as the learned policy does."""
        return self.heads.single(POLICY)

    def cloned_weights(self) -> dict[str, Tensor]:
        """Return the weights of an ordinary network that imitates the data."""
        return self.heads.single(PRIOR)

    def _values(
        self,
        network: HeadNetwork,
        observation: Observation,
        action_B: Tensor,
        config: ConstrainedConfig,
    ) -> Tensor:
        value_B2, gain_B2 = network.taken(observation, action_B)
        return (value_B2 + gain_B2 * (1.0 - config.gamma)) * self.scale_2

    def _heads(
        self, network: nn.Module, observation: Mapping[str, Tensor], config: ConstrainedConfig
    ) -> Heads:
        """Return what a network says, on the scale of values; its outputs are of order one."""
        raw = network(observation)
        unit = 1.0 - config.gamma  # of advantages: what one tick can change
        return Heads(
            prior_BA=raw.prior_BA,
            reward_BA=raw.reward_BA * (POWER_SCALE * unit),
            cost_BA=raw.cost_BA * (RATE_SCALE * unit),
            policy_BA=raw.policy_BA,
            value_B2=raw.value_B2 * self.scale_2,
        )


def _score(
    heads: Heads, price: Tensor, config: ConstrainedConfig, observation: Mapping[str, Tensor]
) -> Tensor:
    return heads.score(
        price=price, temperature=config.nat, reach=config.reach, observation=observation
    )
