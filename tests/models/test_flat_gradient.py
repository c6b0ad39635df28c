"""Gradients and decisions of the flat network worked out by hand are those of plain torch."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from plain_ppo import NUM_ROWS, WEIGHTS, decisions, gradients, observed, plain_gradient, shake

from cloudsched.config import ClusterConfig, FleetConfig
from cloudsched.models.flat_acting import FlatActing
from cloudsched.models.flat_gradient import FlatGradient
from cloudsched.models.flat_pass import FlatRows
from cloudsched.models.masking import log_prob, log_probs
from cloudsched.models.networks import FlatNetwork, NetworkConfig, ObservationSizes, build_network
from cloudsched.models.precision import take_products_in
from cloudsched.models.rollout import RolloutCollector, training_env
from cloudsched.models.threads import FEWEST_ROWS, Threads, one_thread

NUM_SERVERS = 6
DTYPES = [torch.float32, torch.bfloat16]
CLUSTER = ClusterConfig(fleet=FleetConfig(num_servers=NUM_SERVERS))


@pytest.fixture(scope="module")
def observation() -> dict[str, torch.Tensor]:
    """What clusters look like after some random decisions."""
    return observed(NUM_SERVERS, load=0.8)


@pytest.fixture
def network() -> FlatNetwork:
    """A network whose last layers tell actions apart."""
    torch.manual_seed(0)
    built = build_network(ObservationSizes.of(CLUSTER), NetworkConfig(kind="flat", flat_width=64))
    assert isinstance(built, FlatNetwork)
    shake(built)
    return built


@pytest.fixture(params=[1, 2, 5])
def num_threads(request: pytest.FixtureRequest) -> Any:
    """Let torch use some threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_one_fleet", [True, False])
def test_gradients_and_terms_are_those_of_autograd(
    network: FlatNetwork,
    observation: dict[str, torch.Tensor],
    dtype: torch.dtype,
    is_one_fleet: bool,
    num_threads: int,
) -> None:
    if not is_one_fleet:
        observation = {name: array.clone() for name, array in observation.items()}
        observation["servers"][7, 0, 2] += 0.25  # another capacity
    columns = decisions(network, observation)
    chosen = torch.randperm(NUM_ROWS)[: NUM_ROWS - 5]
    expected_terms, expected = plain_gradient(network, network, observation, columns, chosen)
    take_products_in(dtype, network)
    _, plain = plain_gradient(network, network, observation, columns, chosen)
    rows = FlatRows.of(network, observation, dtype)
    assert len(rows.fixed_X) == (5 * NUM_SERVERS if is_one_fleet else 0)
    with one_thread():
        terms = FlatGradient(network).write(rows, columns, chosen, WEIGHTS)

    is_exact = dtype == torch.float32
    torch.testing.assert_close(terms, expected_terms, rtol=1e-4 if is_exact else 2e-2, atol=1e-3)
    assert 0.05 < terms[-1] < 0.95, "some ratios are clipped, some are not"
    for name, found in gradients(network).items():
        size, error = expected[name].norm(), (found - expected[name]).norm()
        rounding = (plain[name] - expected[name]).norm()
        assert size > 1e-3, name
        assert error < 1e-4 * size + 1.5 * rounding, f"{name}: rounding costs more than in torch"
        assert error < 0.1 * size, name


def test_gradients_have_the_same_bits_each_time(
    network: FlatNetwork, observation: dict[str, torch.Tensor], num_threads: int
) -> None:
    columns, rows = decisions(network, observation), FlatRows.of(network, observation, DTYPES[1])
    found = []
    for _ in range(3):
        gradient = FlatGradient(network)
        with one_thread():
            gradient.write(rows, columns, torch.arange(NUM_ROWS), WEIGHTS)
        found.append(gradient.whole.clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_only_flat_networks_with_few_legal_actions_are_taken(
    network: FlatNetwork, observation: dict[str, torch.Tensor]
) -> None:
    mask = observation["action_mask"]
    assert FlatGradient.suits(network, mask)
    assert not FlatGradient.suits(network, torch.ones_like(mask))
    other = build_network(ObservationSizes.of(CLUSTER), NetworkConfig(kind="set"))
    assert not FlatGradient.suits(other, mask)


@pytest.mark.parametrize("dtype", DTYPES)
def test_acting_gives_the_logits_and_values_of_the_network(
    network: FlatNetwork,
    observation: dict[str, torch.Tensor],
    dtype: torch.dtype,
    num_threads: int,
) -> None:
    acting = FlatActing(network, dtype)
    for _ in range(2):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        acting.updated()
        take_products_in(dtype, network)
        is_legal = observation["action_mask"] != 0
        for _ in range(2):  # with weights that were rounded before, too
            with torch.inference_mode(), one_thread():
                logits, value = acting(observation)
                action, chance, kept = acted(acting, observation)
            expected_logits, expected_value = network(observation)
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            assert torch.equal(logits == logits.min(), ~is_legal)
            torch.testing.assert_close(
                logits[is_legal], expected_logits[is_legal], rtol=tolerance, atol=tolerance
            )
            torch.testing.assert_close(value, expected_value, rtol=tolerance, atol=tolerance)
            assert is_legal.gather(1, action[:, None]).all()
            assert all(torch.equal(kept[name][0], table) for name, table in observation.items())
            torch.testing.assert_close(chance, log_prob(log_probs(logits), action))
    assert all(parameter.grad is None for parameter in network.parameters())


def acted(
    acting: FlatActing, observation: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return actions of one step, their log-probabilities, and what is kept of it."""
    tables = {name: torch.zeros(1, *table.shape).to(table) for name, table in observation.items()}
    action = torch.zeros(1, NUM_ROWS, dtype=torch.int64)
    chance = torch.zeros(1, NUM_ROWS)
    acting.begin(observation, tables).act(0, action.numpy(), chance.numpy())
    return action[0], chance[0], tables


def test_a_rollout_has_the_values_and_chances_of_the_network(network: FlatNetwork) -> None:
    settings = {"fleet": {"num_servers": NUM_SERVERS}, "episode_ticks": 12}
    columns = []
    for act in (network, FlatActing(network, torch.float32)):
        torch.manual_seed(3)
        env = training_env(4, settings=settings)
        collector = RolloutCollector(env, num_steps=150, gamma=0.99, lambda_=0.95)
        collector.reset([1, 2, 3, 4])
        columns.append(collector.collect(act))
        assert collector.finished, "episodes end within the rollout"
    plain, fast = columns
    assert torch.equal(plain.action, fast.action)
    for name in ("log_prob", "value", "advantage", "value_target"):
        torch.testing.assert_close(getattr(fast, name), getattr(plain, name), rtol=1e-3, atol=1e-4)


def test_threads_compute_alone_and_torch_keeps_its_number(num_threads: int) -> None:
    threads, meeting = Threads(), threading.Barrier(num_threads)

    def look(number: int) -> int:
        meeting.wait()  # so that each thread has one share
        return torch.get_num_threads()

    with one_thread():
        assert torch.get_num_threads() == 1
        assert threads.run(look, num_threads) == [1] * num_threads
    assert torch.get_num_threads() == num_threads


def test_an_error_in_a_thread_comes_out_when_all_are_done(num_threads: int) -> None:
    threads, done = Threads(), []

    def fail(number: int) -> None:
        if number == 0:
            raise ValueError("first")
        done.append(number)

    with one_thread(), pytest.raises(ValueError, match="first"):
        threads.run(fail, num_threads)
    assert sorted(done) == list(range(1, num_threads))


def test_two_threads_give_the_bits_of_one(
    network: FlatNetwork, observation: dict[str, torch.Tensor]
) -> None:
    columns, rows = decisions(network, observation), FlatRows.of(network, observation, DTYPES[1])
    before, found = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        gradient = FlatGradient(network)
        with one_thread():
            gradient.write(rows, columns, torch.arange(NUM_ROWS), WEIGHTS)
        found.append(gradient.whole)
    torch.set_num_threads(before)
    assert torch.equal(*found)


def test_shares_are_all_rows_and_never_tiny(num_threads: int) -> None:
    threads = Threads()
    for num_rows in (1, FEWEST_ROWS, 3 * FEWEST_ROWS, 1000):
        shares = threads.shares(torch.arange(num_rows))
        assert torch.equal(torch.cat(list(shares)), torch.arange(num_rows))
        assert len(shares) == 1 or min(map(len, shares)) >= FEWEST_ROWS
    assert len(shares) == num_threads
