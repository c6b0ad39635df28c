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
from functools import partial

import torch
from torch import Tensor, nn

from cloudsched.config import Settings
from cloudsched.models.constrained_gradient import compiled_loss, compiled_next_actions
from cloudsched.models.constrained_loss import (
    ConstrainedLoss,
    Scales,
    constrained_loss,
    next_actions,
)
from cloudsched.models.head_networks import FIXED, HeadNetwork, build_heads
from cloudsched.models.heads import POLICY, PRIOR
from cloudsched.models.kinds import NUM_KINDS, kind_weights
from cloudsched.models.lagrange import LagrangeConfig
from cloudsched.models.networks import NetworkConfig, Observation, ObservationSizes
from cloudsched.models.one_piece import Weights
from cloudsched.models.precision import DEFAULT_PRECISION, check_precision
from cloudsched.models.prepared import (
    EXOGENOUS,
    KIND,
    NEXT,
    NEXT_ACTION,
    SEEN,
    Prepare,
    cut,
    prepare,
)
from cloudsched.models.strain import SHARES

POWER_SCALE = 0.1  # of full power; brings values of reward to order one
RATE_SCALE = 0.05  # of jobs; brings values of cost to order one
LUCK_WIDTH = 64
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
    reach: float = 3.0
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
    strained_4: Tensor
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
        self.register_buffer("strained_4", torch.tensor(SHARES), persistent=False)
        # How loud the targets of luck (2) and of advantages (2) are, and how common each kind of
        # action is: running means, and their weight.
        self.register_buffer("noise_4", torch.zeros(4))
        self.register_buffer("share_4", torch.zeros(NUM_KINDS))
        self.register_buffer("heard", torch.zeros(()))

    def forward(
        self, batch: Mapping[str, Tensor], price: Tensor, config: ConstrainedConfig
    ) -> ConstrainedLoss:
        """Return the loss of a batch of transitions, prepared (`prepare`) or not."""
        batch, scales = self.prepared(batch), self.scales(price, config)
        is_compiled = price.device.type == "cpu"
        with torch.no_grad():
            following = {
                name: batch[NEXT + name] for name in (*SEEN, FIXED) if NEXT + name in batch
            }
            if NEXT_ACTION in batch:  # a given policy is evaluated
                next_action_U = batch[NEXT_ACTION]
            else:
                choose = compiled_next_actions if is_compiled else next_actions
                next_action_U = choose(self.heads.advice(following), batch, scales)
            next_U2 = self._values(self.target, following, next_action_U, config)
        loss = compiled_loss if is_compiled else constrained_loss
        return loss(self.heads(batch), self.luck(batch[EXOGENOUS]), next_U2, batch, scales)

    def prepared(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a batch as losses take it in, whether it was prepared before or not."""
        if KIND in batch:
            return batch
        count = len(batch["action"])
        order_B = torch.arange(count, device=batch["action"].device)
        return next(cut(self.prepare(batch), order_B, count))

    def prepare(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return transitions (`cloudsched.datasets.transitions`) as `forward` takes them in."""
        return self.preparation()(columns)

    def preparation(self) -> Prepare:
        """Return what `prepare` does, for other processes: it holds no weights."""
        return partial(prepare, condense=self.heads.condensing(), arrivals=self._arrivals)

    def scales(self, price: Tensor, config: ConstrainedConfig) -> Scales:
        """Return in what the terms of the loss are measured now, and how much they count."""
        unit_4, weight_4 = torch.ones_like(self.noise_4), torch.ones_like(self.share_4)
        heard = float(self.heard)
        if heard > 0.0:
            unit_4 = (self.noise_4 / heard).clamp(min=1e-6)
            weight_4 = kind_weights(self.share_4 / heard)
        advantage = 1.0 - config.gamma  # what one tick can change
        nat = advantage / config.nat
        return Scales(
            value_2=self.scale_2,
            advantage=advantage,
            nats_2=(POWER_SCALE * nat, RATE_SCALE * nat),
            price=float(price),
            reach=config.reach,
            pessimism=config.pessimism,
            unit_4=unit_4,
            kind_4=weight_4,
            strained_4=self.strained_4,
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

    def in_one_piece(self) -> Weights:
        """Move all weights into one tensor, and those of the slow copy into another."""
        alone = list(self.luck.parameters())
        online, slow = _fast_last(self.heads), _fast_last(self.target)
        return Weights.of(alone, online, slow, num_fast=len(self.heads.fast_parameters()))

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


def _fast_last(network: HeadNetwork) -> list[nn.Parameter]:
    fast = network.fast_parameters()
    is_fast = {id(p) for p in fast}
    return [*(p for p in network.parameters() if id(p) not in is_fast), *fast]
