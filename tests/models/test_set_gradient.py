"""Gradients and decisions of the set network worked out by hand are those of plain torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from plain_ppo import (
    NUM_ROWS,
    WEIGHTS,
    Observation,
    decisions,
    gradients,
    observed,
    plain_gradient,
    shake,
)

from cloudsched.config import ClusterConfig, FleetConfig
from cloudsched.models.flat_gradient import PPOWeights
from cloudsched.models.masking import log_prob, log_probs
from cloudsched.models.networks import NetworkConfig, ObservationSizes, SetNetwork, build_network
from cloudsched.models.rollout import RolloutCollector, training_env
from cloudsched.models.set_acting import FEWEST_SERVERS, SetActing
from cloudsched.models.set_gradient import NAMES, SetGradient
from cloudsched.models.threads import one_thread

SMALL, LARGE = 6, 150


@pytest.fixture(scope="module", params=[SMALL, LARGE])
def observation(request: pytest.FixtureRequest) -> Observation:
    """Fleets of which many, and of which none, go into a block of products."""
    seen = observed(request.param, load=0.9)
    twice = seen["jobs"][:, 1, -1] != 0
    seen["jobs"][twice, 1] = seen["jobs"][twice, 0]  # equal jobs share the gradient of the highest
    num_servers = request.param
    first, second = (seen["action_mask"][:, k * num_servers :][:, :num_servers] for k in range(2))
    second[twice] = first[twice]
    assert twice.sum() > 10
    return seen


def set_network(is_balanced: bool = True) -> SetNetwork:
    """Build a network whose last layers tell actions apart."""
    torch.manual_seed(0)
    cluster = ClusterConfig(fleet=FleetConfig(num_servers=SMALL))
    config = NetworkConfig(is_balanced=is_balanced, width=24, context_width=48, pair_width=16)
    built = build_network(ObservationSizes.of(cluster), config)
    assert isinstance(built, SetNetwork)
    shake(built)
    return built


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest) -> Any:
    """Let torch use some threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def plain(network: SetNetwork, observation: Observation) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and values without any kernel."""
    outputs: list[torch.Tensor] = []

    def keep(*brought: torch.Tensor) -> torch.Tensor:
        scores = network.score(observation, *brought[:3])
        outputs.append(scores)
        return scores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cloudsched.models.networks.ActionScores.apply", keep)
        logits, value = network(observation)
    assert outputs, "the kernels took part"
    return logits, value


def assert_gradients_agree(
    network: SetNetwork, observation: Observation, weights: PPOWeights = WEIGHTS
) -> torch.Tensor:
    columns = decisions(partial(plain, network), observation)
    chosen = torch.randperm(NUM_ROWS)[: NUM_ROWS - 5]
    expected_terms, expected = plain_gradient(
        network, partial(plain, network), observation, columns, chosen, weights
    )
    gradient = SetGradient(network)
    for _ in range(2):  # the second time in room that was used before
        with one_thread():
            terms = gradient.write(gradient.read(observation), columns, chosen, weights)
        torch.testing.assert_close(terms, expected_terms, rtol=1e-4, atol=1e-4)
        for name, found in gradients(network).items():
            size, error = expected[name].norm(), (found - expected[name]).norm()
            assert size > 1e-4, name
            assert error < 2e-4 * size, f"{name}: {error / size:.1e}"
    return terms


@pytest.mark.parametrize("is_balanced", [True, False])
def test_gradients_and_terms_are_those_of_autograd(
    observation: Observation, is_balanced: bool, num_threads: int
) -> None:
    terms = assert_gradients_agree(set_network(is_balanced), observation)
    assert 0.05 < terms[-1] < 0.95, "some ratios are clipped, some are not"


def test_values_need_no_bound_and_clusters_no_job(num_threads: int) -> None:
    observation = observed(SMALL, load=0.9)
    observation["jobs"][::2] = 0.0
    num_placements = SMALL * observation["jobs"].shape[1]
    observation["action_mask"][::2, :num_placements] = 0
    assert_gradients_agree(set_network(), observation, WEIGHTS._replace(value_clip=None))


def test_servers_that_cannot_be_toggled_have_gradients_too() -> None:
    observation = observed(SMALL, load=0.9)
    num_placements = SMALL * observation["jobs"].shape[1]
    mask = observation["action_mask"]
    observation["action_mask"] = torch.cat([mask[:, :num_placements], mask[:, -1:]], dim=1)
    network = set_network()
    columns, chosen = decisions(partial(plain, network), observation), torch.arange(NUM_ROWS)
    _, expected = plain_gradient(network, partial(plain, network), observation, columns, chosen)
    gradient = SetGradient(network)
    with one_thread():
        gradient.write(gradient.read(observation), columns, chosen, WEIGHTS)
    for name, found in gradients(network).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-3, atol=1e-5)


def test_gradients_have_the_same_bits_each_time(observation: Observation, num_threads: int) -> None:
    network = set_network()
    columns, found = decisions(partial(plain, network), observation), []
    for _ in range(3):
        gradient = SetGradient(network)
        with one_thread():
            gradient.write(gradient.read(observation), columns, torch.arange(NUM_ROWS), WEIGHTS)
        found.append(gradient.whole.clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_room_is_made_anew_for_another_fleet() -> None:
    network = set_network()
    gradient, chosen = SetGradient(network), torch.arange(NUM_ROWS)
    for num_servers in (SMALL, SMALL + 3, SMALL):
        observation = observed(num_servers, load=0.9)
        columns = decisions(partial(plain, network), observation)
        _, expected = plain_gradient(network, partial(plain, network), observation, columns, chosen)
        with one_thread():
            gradient.write(gradient.read(observation), columns, chosen, WEIGHTS)
        for name, found in gradients(network).items():
            torch.testing.assert_close(found, expected[name], rtol=1e-3, atol=1e-5)


def test_all_parameters_have_a_place_and_only_set_networks_are_taken(
    observation: Observation,
) -> None:
    network, mask = set_network(), observation["action_mask"]
    assert sorted(NAMES) == sorted(dict(network.named_parameters()))
    assert SetGradient.suits(network, mask)
    sizes = ObservationSizes.of(ClusterConfig())
    assert not SetGradient.suits(build_network(sizes, NetworkConfig(kind="flat")), mask)


def test_acting_gives_the_logits_and_values_of_the_network(
    observation: Observation, num_threads: int
) -> None:
    assert observation["servers"][:, :, 0].numel() >= 3 * FEWEST_SERVERS, "each thread has a share"
    network = set_network()
    acting = SetActing(network)
    is_legal = observation["action_mask"] != 0
    for _ in range(2):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
            expected_logits, expected_value = plain(network, observation)
        acting.updated()
        with torch.inference_mode(), one_thread():
            logits, value = acting(observation)
            action, chance = acting.draw(observation)
        assert torch.equal(logits == logits.min(), ~is_legal)
        torch.testing.assert_close(
            logits[is_legal], expected_logits[is_legal], rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(value, expected_value, rtol=1e-4, atol=1e-4)
        assert is_legal.gather(1, action[:, None]).all()
        torch.testing.assert_close(chance, log_prob(log_probs(logits), action))
    assert all(parameter.grad is None for parameter in network.parameters())


def test_a_rollout_has_the_values_and_chances_of_the_network() -> None:
    network = set_network()
    settings = {"fleet": {"num_servers": SMALL}, "episode_ticks": 12}
    columns = []
    for act in (network, SetActing(network)):
        torch.manual_seed(3)
        env = training_env(4, settings=settings)
        collector = RolloutCollector(env, num_steps=150, gamma=0.99, lambda_=0.95)
        collector.reset([1, 2, 3, 4])
        columns.append(collector.collect(act))
        assert collector.finished, "episodes end within the rollout"
    slow, fast = columns
    assert torch.equal(slow.action, fast.action)
    for name in ("log_prob", "value", "advantage", "value_target"):
        torch.testing.assert_close(getattr(fast, name), getattr(slow, name), rtol=1e-3, atol=1e-4)
