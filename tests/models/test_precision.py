"""Rounded matrix products: where they are taken, and that they change little."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cloudsched.config import ClusterConfig, FleetConfig
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.errors import ConfigError
from cloudsched.models import precision
from cloudsched.models.networks import NetworkConfig, ObservationSizes, build_network
from cloudsched.models.precision import (
    RoundedCopy,
    products_dtype,
    take_products_in,
)

NUM_SERVERS = 6


@pytest.fixture
def observation() -> dict[str, torch.Tensor]:
    """What 200 clusters look like after some random decisions."""
    env = ClusterVectorEnv(200, settings={"fleet": {"num_servers": NUM_SERVERS}}, load=0.8)
    seen, _ = env.reset(seed=5)
    generator = np.random.default_rng(0)
    for _ in range(40):
        actions = [generator.choice(np.flatnonzero(row)) for row in seen["action_mask"]]
        seen, *_ = env.step(np.array(actions))
    return {name: torch.from_numpy(array) for name, array in seen.items()}


def network_of(kind: str) -> Any:
    torch.manual_seed(0)
    cluster = ClusterConfig(fleet=FleetConfig(num_servers=NUM_SERVERS))
    return build_network(ObservationSizes.of(cluster), NetworkConfig(kind=kind))


def gradient(network: Any, observation: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the gradient of something that all outputs have a part in."""
    network.zero_grad()
    logits, value = network(observation)
    is_legal = observation["action_mask"] != 0
    (torch.where(is_legal, logits, 0.0).square().mean() + (value - 1.0).square().mean()).backward()
    return torch.cat([parameter.grad.flatten() for parameter in network.parameters()])


@pytest.fixture
def capabilities(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say what the CPU can do; what was found out about it before is forgotten, and afterwards."""
    found: dict[str, bool] = {}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    precision.has_fast_bfloat16.cache_clear()
    yield found
    precision.has_fast_bfloat16.cache_clear()


@pytest.mark.parametrize("name", ["avx512_bf16", "amx_bf16"])
def test_bfloat16_is_the_default_where_there_are_instructions_for_it(
    name: str, capabilities: dict[str, bool]
) -> None:
    capabilities[name] = True
    assert products_dtype("auto", "cpu") == torch.bfloat16
    assert products_dtype("float32", "cpu") == torch.float32


def test_without_such_instructions_everything_stays_float32(
    capabilities: dict[str, bool],
) -> None:
    capabilities.update(avx512_f=True, avx512_bf16=False)
    assert products_dtype("auto", "cpu") == torch.float32
    assert products_dtype("bfloat16", "cpu") == torch.bfloat16, "who asks for it gets it"


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected one of auto, float32, bfloat16"):
        products_dtype("float16", "cpu")


def test_rounded_products_give_nearly_the_same_outputs_and_gradients(
    observation: dict[str, torch.Tensor],
) -> None:
    network = network_of("flat")
    exact, (logits, value) = gradient(network, observation), network(observation)
    take_products_in(torch.bfloat16, network)
    rounded, (rounded_logits, rounded_value) = gradient(network, observation), network(observation)
    assert rounded_logits.dtype == rounded_value.dtype == rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact), "something was rounded"
    assert (rounded - exact).norm() < 0.02 * exact.norm()
    torch.testing.assert_close(rounded_logits, logits, rtol=0.0, atol=0.01)
    torch.testing.assert_close(rounded_value, value, rtol=0.0, atol=0.01)


def test_the_set_network_is_not_rounded(observation: dict[str, torch.Tensor]) -> None:
    network = network_of("set")
    exact = gradient(network, observation)
    take_products_in(torch.bfloat16, network)
    assert torch.equal(gradient(network, observation), exact)


def test_values_are_finer_than_bfloat16_can_tell_apart(
    observation: dict[str, torch.Tensor],
) -> None:
    network = network_of("flat")
    with torch.no_grad():
        network.critic[-1].bias += 3.0  # where bfloat16 goes in steps of 1/64
    _, value = network(observation)
    take_products_in(torch.bfloat16, network)
    error = (network(observation)[1] - value).abs().max().item()
    assert 0.0 < error < 1 / 640


def test_a_rounded_copy_acts_as_the_learner_sees_it_and_leaves_the_network_alone(
    observation: dict[str, torch.Tensor],
) -> None:
    network = network_of("flat")
    rounded = RoundedCopy(network, torch.bfloat16)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    exact = network(observation)
    copied = rounded.updated()(observation)
    for output, same in zip(exact, network(observation), strict=True):
        assert torch.equal(output, same)
    take_products_in(torch.bfloat16, network)
    learned = network(observation)
    for output, other, rough in zip(copied, learned, exact, strict=True):
        torch.testing.assert_close(output, other, rtol=0.0, atol=1e-5)
        assert not torch.equal(output, rough)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_condensed_observations_give_the_same_outputs(
    dtype: torch.dtype, observation: dict[str, torch.Tensor]
) -> None:
    network = network_of("flat")
    take_products_in(dtype, network)
    for output, other in zip(
        network(observation), network(network.condensed(observation)), strict=True
    ):
        assert torch.equal(output, other)
