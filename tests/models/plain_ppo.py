"""PPO's loss and gradients in plain torch, and decisions to take them of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.models.flat_gradient import PPOColumns, PPOWeights
from cloudsched.models.losses import PPOLoss, ppo_loss
from cloudsched.models.masking import log_prob, log_probs
from cloudsched.models.threads import FEWEST_ROWS

NUM_ROWS = 4 * FEWEST_ROWS
WEIGHTS = PPOWeights(clip=0.2, value_clip=0.5, value_weight=0.7, entropy_weight=0.05)

Observation = dict[str, torch.Tensor]
Forward = Callable[[Observation], tuple[torch.Tensor, torch.Tensor]]
"""Logits and values of a network."""


def observed(num_servers: int, load: float) -> Observation:
    """Return what clusters look like after some random decisions."""
    env = ClusterVectorEnv(NUM_ROWS, settings={"fleet": {"num_servers": num_servers}}, load=load)
    seen, _ = env.reset(seed=5)
    generator = np.random.default_rng(0)
    for _ in range(30):
        actions = [generator.choice(np.flatnonzero(row)) for row in seen["action_mask"]]
        seen, *_ = env.step(np.array(actions))
    return {name: torch.from_numpy(array.copy()) for name, array in seen.items()}


@torch.no_grad()
def shake(network: torch.nn.Module) -> None:
    """Let last layers, which begin near zero, tell actions apart."""
    for parameter in network.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))


def decisions(forward: Forward, observation: Observation) -> PPOColumns:
    """Return decisions of a policy that is not quite the network's."""
    generator = torch.Generator().manual_seed(1)

    def normal() -> torch.Tensor:
        return torch.randn(NUM_ROWS, generator=generator)

    with torch.no_grad():
        logits, value = forward(observation)
    action = torch.distributions.Categorical(logits=logits).sample()
    return PPOColumns(
        mask_BA=observation["action_mask"],
        action_B=action,
        old_log_prob_B=log_prob(log_probs(logits), action) + 0.3 * normal(),
        old_value_B=value + 0.5 * normal(),
        advantage_B=normal(),
        return_B=normal(),
    )


def plain_gradient(
    network: torch.nn.Module,
    forward: Forward,
    observation: Observation,
    columns: PPOColumns,
    chosen: torch.Tensor,
    weights: PPOWeights = WEIGHTS,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the terms of the loss and the gradients by name, by autograd."""
    network.zero_grad()
    logits, value = forward({name: part[chosen] for name, part in observation.items()})
    known = {name: column[chosen] for name, column in columns._asdict().items()}
    del known["mask_BA"]
    loss = ppo_loss(logits_BA=logits, value_B=value, **known, **weights._asdict())
    loss.total.backward()
    terms = [getattr(loss, name).detach() for name in PPOLoss.__dataclass_fields__]
    return torch.stack(terms), gradients(network)


def gradients(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the gradients, by name."""
    found = {}
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    return found
