"""The kernels that score actions agree with torch, in values and in gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cloudsched.config import ClusterConfig, FleetConfig
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.models.networks import NetworkConfig, ObservationSizes, build_network
from cloudsched.models.scoring import ActionScores, Scene


def observation_of(num_servers: int, *, sleep: bool) -> dict[str, torch.Tensor]:
    """Return what 24 clusters look like after some random decisions."""
    settings = {"fleet": {"num_servers": num_servers}, "sleep": sleep, "episode_ticks": 50}
    env = ClusterVectorEnv(24, settings=settings, workload="diurnal", load=0.8)
    observation, _ = env.reset(seed=5)
    generator = np.random.default_rng(0)
    for _ in range(60):
        mask = observation["action_mask"]
        actions = np.array([generator.choice(np.flatnonzero(row)) for row in mask])
        observation, *_ = env.step(actions)
    return {name: torch.from_numpy(array) for name, array in observation.items()}


@pytest.mark.parametrize("sleep", [True, False])
@pytest.mark.parametrize("is_balanced", [True, False])
@pytest.mark.parametrize("num_servers", [1, 15, 150])  # with 150, a cluster's pairs fill blocks
def test_kernels_score_and_differentiate_as_torch_does(
    num_servers: int, is_balanced: bool, sleep: bool
) -> None:
    torch.manual_seed(0)
    observation = observation_of(num_servers, sleep=sleep)
    cluster = ClusterConfig(fleet=FleetConfig(num_servers=num_servers), sleep=sleep)
    config = NetworkConfig(is_balanced=is_balanced)
    network: Any = build_network(ObservationSizes.of(cluster), config)
    num_rows, num_jobs = observation["jobs"].shape[:2]
    embeddings = [
        torch.randn(num_rows, num_servers, config.pair_width + 2),
        torch.randn(num_rows, num_jobs, config.pair_width),
        torch.randn(num_rows, 4),
    ]
    weights = [network.pair_features.weight, network.pair_out.weight, network.pair_out.bias]
    with torch.no_grad():
        for weight in weights:
            weight.add_(0.5 * torch.randn_like(weight))
    up = torch.randn(observation["action_mask"].shape)

    def compiled(observation: Any, *embedded: torch.Tensor) -> Any:
        seen = Scene.of(observation, network.num_resources, is_balanced)
        return ActionScores.apply(*embedded, *weights, seen)

    results = []
    for function in (network.score, compiled):
        leaves = [embedding.clone().requires_grad_() for embedding in embeddings]
        logits = function(observation, *leaves)
        gradients = torch.autograd.grad(logits, [*leaves, *weights], up)
        results.append((logits.detach(), gradients))
    (expected, gradients), (logits, others) = results
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    for gradient, other in zip(gradients, others, strict=True):
        scale = gradient.abs().max().item()
        assert scale > 0.0
        torch.testing.assert_close(other, gradient, rtol=1e-3, atol=1e-4 * scale)


def test_a_nan_among_the_embeddings_is_not_hidden() -> None:
    observation = observation_of(4, sleep=True)
    network: Any = build_network(
        ObservationSizes.of(ClusterConfig(fleet=FleetConfig(num_servers=4))), NetworkConfig()
    )
    with torch.no_grad():
        network.server_in.bias[0] = torch.nan
    logits, value = network(observation)
    is_legal = observation["action_mask"] != 0
    assert logits[is_legal].isnan().any()
    assert value.isnan().all()
