"""The compiled network and its torch twin agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cloudsched.config import ClusterConfig, FleetConfig
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.models.compiled import compile_network
from cloudsched.models.networks import NetworkConfig, ObservationSizes, QNetwork, build_network
from cloudsched.rl.policy import NetworkPolicy


def observations(num_servers: int, *, sleep: bool = True) -> list[dict[str, Any]]:
    """Return observations from an episode of random decisions."""
    settings = {"fleet": {"num_servers": num_servers}, "sleep": sleep, "episode_ticks": 50}
    env = ClusterVectorEnv(8, settings=settings, workload="diurnal", load=0.8)
    observation, _ = env.reset(seed=5)
    seen = []
    generator = np.random.default_rng(0)
    for _ in range(60):
        mask = observation["action_mask"]
        actions = np.array([generator.choice(np.flatnonzero(row)) for row in mask])
        observation, *_ = env.step(actions)
        seen.append(observation)
    return seen


def network(num_servers: int, *, sleep: bool = True, is_balanced: bool = True) -> Any:
    """Return a network whose every weight matters."""
    torch.manual_seed(3)
    cluster = ClusterConfig(fleet=FleetConfig(num_servers=num_servers), sleep=sleep)
    config = NetworkConfig(width=16, context_width=24, pair_width=8, is_balanced=is_balanced)
    built = build_network(ObservationSizes.of(cluster), config)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return built.eval()


@pytest.mark.parametrize("sleep", [True, False])
@pytest.mark.parametrize("is_balanced", [True, False])
@pytest.mark.parametrize("num_servers", [1, 15, 40])
def test_compiled_logits_are_those_of_torch(
    num_servers: int, sleep: bool, is_balanced: bool
) -> None:
    net = network(num_servers, sleep=sleep, is_balanced=is_balanced)
    compiled = compile_network(net)
    assert compiled is not None
    for observation in observations(num_servers, sleep=sleep):
        tensors = {name: torch.from_numpy(array) for name, array in observation.items()}
        with torch.inference_mode():
            expected = net(tensors)[0].numpy()
        logits = compiled.logits(observation)
        is_legal = observation["action_mask"] != 0
        assert (logits[~is_legal] == np.finfo(np.float32).min).all()
        np.testing.assert_allclose(logits[is_legal], expected[is_legal], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("rule", ["kind", "argmax"])
def test_a_frozen_policy_weighs_and_acts_as_a_live_one(rule: str) -> None:
    net = network(15)
    frozen, live = NetworkPolicy(net, rule=rule, is_frozen=True), NetworkPolicy(net, rule=rule)
    num_same = num_all = 0
    rows = np.arange(8)
    for observation in observations(15):
        actions, chances = frozen.weigh(observation)
        assert (frozen.act(observation) == actions).all()
        assert (observation["action_mask"][rows, actions] != 0).all()
        live_actions, live_chances = live.weigh(observation)
        # Servers of one tier in the same state tie, and torch breaks ties otherwise on other CPUs.
        with torch.inference_mode():
            tensors = {name: torch.from_numpy(part) for name, part in observation.items()}
            logits = net(tensors)[0].numpy()
        np.testing.assert_allclose(logits[rows, actions], logits[rows, live_actions], atol=1e-5)
        num_same += int((actions == live_actions).sum())
        num_all += len(actions)
        if rule == "kind":
            np.testing.assert_allclose(chances, live_chances, atol=1e-3)
            np.testing.assert_allclose(chances.sum(axis=1), 1.0, atol=1e-5)
    assert num_same > 0.9 * num_all


def test_a_decision_does_not_depend_on_the_batch() -> None:
    frozen = NetworkPolicy(network(15), is_frozen=True)
    for observation in observations(15)[::10]:
        _, together = frozen.weigh(observation)
        for e in range(8):
            alone = {name: array[e : e + 1] for name, array in observation.items()}
            assert (frozen.weigh(alone)[1][0] == together[e]).all()


def test_action_values_are_compiled_and_what_is_unknown_is_not() -> None:
    net = network(15)
    assert compile_network(QNetwork(net)) is not None
    flat = build_network(ObservationSizes.of(ClusterConfig()), NetworkConfig(kind="flat"))
    assert compile_network(flat) is None
