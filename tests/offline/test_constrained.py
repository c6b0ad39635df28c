"""The constrained learner: its terms against scalar loops, its price on a CMDP with an answer."""

import math
import os

import numpy as np
import pytest
import torch

from cloudsched.config import ClusterConfig, FleetConfig
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.observation import columns
from cloudsched.heuristics.random import RandomPolicy
from cloudsched.models.constrained import ConstrainedConfig, ConstrainedModel
from cloudsched.models.constrained_learner import ConstrainedLearner
from cloudsched.models.constrained_loss import constrained_target, cost_pessimism
from cloudsched.models.head_networks import build_heads
from cloudsched.models.heads import POLICY, PRIOR, better_logits
from cloudsched.models.kinds import kind_weights, kinds, kinds_of, sums_by_kind, toggled
from cloudsched.models.lagrange import LagrangeConfig, LagrangeMultiplier
from cloudsched.models.networks import NetworkConfig, ObservationSizes, build_network
from cloudsched.models.prepared import OBSERVATION
from cloudsched.rl.offline import mean_of_workers

torch.set_num_threads(1)

SMALL = {"width": 8, "context_width": 8, "pair_width": 8, "flat_width": 16}


@pytest.fixture(scope="module")
def observation():
    env = ClusterVectorEnv(32, settings={"fleet": {"num_servers": 4}, "visible_jobs": 3})
    policy = RandomPolicy()
    arrays, _ = env.reset(seed=0)
    for _ in range(40):
        arrays, *_ = env.step(policy.act(arrays))
    return env.config, {name: torch.from_numpy(array) for name, array in arrays.items()}


@pytest.mark.parametrize("kind", ["set", "flat"])
@pytest.mark.parametrize("is_balanced", [True, False])
def test_each_head_is_one_ordinary_network(observation, kind, is_balanced):
    cluster, tensors = observation
    torch.manual_seed(0)
    config = NetworkConfig(kind=kind, is_balanced=is_balanced, **SMALL)
    sizes = ObservationSizes.of(cluster)
    heads = build_heads(sizes, config)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    is_legal = tensors["action_mask"] != 0
    found = heads(tensors)
    for head, logits in ((PRIOR, found.prior_BA), (POLICY, found.policy_BA)):
        network = build_network(sizes, config)
        network.load_state_dict(heads.single(head))
        expected = network(tensors)[0]
        torch.testing.assert_close(logits[is_legal], expected[is_legal], rtol=1e-4, atol=1e-4)
        assert (logits[~is_legal] < -1e30).all()


def a_better_policy(prior, reward, cost, *, can_place=False, can_wake=True):
    """Score two pairs, a server that sleeps, one that does not, and waiting."""
    mask = torch.tensor([[can_place, can_place, can_wake, 1, 1]], dtype=torch.int8)
    outputs = torch.tensor([[prior, reward, cost]], dtype=torch.float32)
    is_asleep = torch.tensor([[True, False]])
    score = better_logits(outputs, mask, is_asleep, price=2.0, nats_2=(10.0, 10.0), reach=2.0)
    return score[0], torch.softmax(score, 1)[0], torch.softmax(outputs[0, 0], 0)


def odds_of(chances, action, other=4):
    return (chances[action] / chances[other]).item()


def test_no_action_gains_more_than_the_reach_against_the_prior():
    score, _, _ = a_better_policy([0.0, 0.0, 0.0, -9.0, 0.0], [0, 0, -50.0, 0, 0], [0.0] * 5)
    assert score[2:].tolist() == pytest.approx([-2.0, -7.0, 0.0])
    score, _, _ = a_better_policy([0.0] * 5, [0, 0, -0.001, 0, 0], [0, 0, -0.002, 0, 0])
    assert score[3].item() == pytest.approx(-0.03, rel=1e-3)  # small gains count in full


def test_a_server_fewer_saves_what_waking_one_costs():
    """What was logged of sleeping tells of authors who woke a server again at once."""
    prior, reward = [0.3, 0.0, -1.0, -2.0, 0.5], [0.2, -0.1, -0.05, -3.0, 3.0]
    _, after, before = a_better_policy(prior, reward, [0.0] * 5)
    lost = np.log(odds_of(after, 2) / odds_of(before, 2))
    assert lost == pytest.approx(-2.0 * np.tanh(0.25), rel=1e-4)
    assert np.log(odds_of(after, 3) / odds_of(before, 3)) == pytest.approx(-lost, rel=1e-4)
    reward[2] = 0.05  # where it pays to wake, sleeping loses, but waking gains nothing
    _, after, before = a_better_policy(prior, reward, [0.0] * 5)
    assert odds_of(after, 2) == pytest.approx(odds_of(before, 2), rel=1e-5)
    assert np.log(odds_of(after, 3) / odds_of(before, 3)) == pytest.approx(lost, rel=1e-4)


def test_sleeping_counts_for_itself_where_no_server_can_be_woken():
    score, *_ = a_better_policy([0.0] * 5, [0, 0, 9.0, 0.03, 0], [0.0] * 5, can_wake=False)
    assert score[3].item() == pytest.approx(2.0 * np.tanh(0.15), rel=1e-4)


def test_kinds_of_action_keep_their_odds_while_a_job_can_be_placed():
    prior, reward = [0.3, 0.0, -1.0, -2.0, 0.5], [0.2, -0.1, -3.0, 0.1, 3.0]
    score, after, before = a_better_policy(prior, reward, [0.0] * 5, can_place=True)
    place = (after[:2].sum() / after[4], before[:2].sum() / before[4])
    assert place[0].item() == pytest.approx(place[1].item(), rel=1e-5)
    assert odds_of(after, 2) == pytest.approx(odds_of(before, 2), rel=1e-5)
    assert after[0] / after[1] > before[0] / before[1]  # but where a job goes is free
    assert torch.isfinite(score).all()


def test_sleeping_gains_nothing_while_a_job_can_be_placed():
    prior, reward = [0.3, 0.0, -1.0, -2.0, 0.5], [0.2, -0.1, -3.0, 3.0, 3.0]
    _, after, before = a_better_policy(prior, reward, [0.0] * 5, can_place=True)
    assert after[3].item() == pytest.approx(before[3].item(), rel=1e-5)
    assert after[0] / after[1] > before[0] / before[1]


def test_the_target_agrees_with_a_scalar_loop():
    generator = torch.Generator().manual_seed(1)
    following = torch.rand(5, 2, generator=generator)
    outcome, discount = torch.rand(5, 2, generator=generator), torch.rand(5, generator=generator)
    discount[2] = 0.0  # terminated
    target = constrained_target(reward_B2=outcome, discount_B=discount, next_B2=following)
    for i in range(5):
        for k in range(2):
            expected = outcome[i, k].item() + discount[i].item() * following[i, k].item()
            assert target[i, k].item() == pytest.approx(expected)
    torch.testing.assert_close(target[2], outcome[2])


@pytest.mark.parametrize("kind", ["set", "flat"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_value_of_an_action_is_that_of_the_state_and_its_advantage(
    observation, kind, precision
):
    cluster, tensors = observation
    torch.manual_seed(0)
    config = ConstrainedConfig(network=NetworkConfig(kind=kind, **SMALL), precision=precision)
    model = ConstrainedModel(ObservationSizes.of(cluster), config)
    for parameter in model.heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ConstrainedLearner(model, config, num_steps=1)
    action = torch.multinomial((tensors["action_mask"] != 0).float(), 1).squeeze(1)
    found = model.values(tensors, action, config)
    heads = model.heads(tensors)
    for i in range(len(action)):
        for k, gain in enumerate((heads.reward_BA, heads.cost_BA)):
            in_a_tick = (1.0 - config.gamma) * gain[i, action[i]].item()
            expected = (heads.value_B2[i, k].item() + in_a_tick) * model.scale_2[k].item()
            assert found[i, k].item() == pytest.approx(expected, rel=0.02, abs=1e-3)


def test_the_kind_of_an_action_is_found_without_those_of_all(observation):
    cluster, tensors = observation
    is_asleep = toggled(tensors)
    every = kinds(is_asleep, cluster.num_actions)
    for action in range(cluster.num_actions):
        chosen = torch.full((len(every),), action)
        assert torch.equal(kinds_of(chosen, is_asleep, cluster.num_actions), every[:, action])
    chance = torch.rand(every.shape)
    expected = torch.stack([(chance * (every == kind)).sum(dim=1) for kind in range(4)], dim=1)
    torch.testing.assert_close(sums_by_kind(chance, is_asleep), expected)


def test_pessimism_agrees_with_a_scalar_loop_and_ignores_illegal_actions():
    cost = torch.tensor([[0.3, -0.1, 9.0], [0.2, 0.4, -5.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]], dtype=torch.int8)
    action = torch.tensor([0, 1])
    expected = 0.0
    for row, taken in ((cost[0], 0), (cost[1], 1)):
        soft_minimum = -0.5 * math.log(sum(math.exp(-row[a].item() / 0.5) for a in (0, 1)))
        expected += (row[taken].item() - soft_minimum) / 0.5 / 2
    assert cost_pessimism(cost / 0.5, mask, action).item() == pytest.approx(expected, rel=1e-5)


def test_pessimism_makes_what_the_data_lacks_look_costlier():
    cost = torch.zeros(1, 3, requires_grad=True)
    mask = torch.ones(1, 3, dtype=torch.int8)
    cost_pessimism(cost, mask, torch.tensor([0])).backward()
    assert cost.grad[0, 0] > 0.0  # descent lowers the cost of what was done
    assert (cost.grad[0, 1:] < 0.0).all()  # and raises that of what was not


def test_lambda_rises_while_the_limit_is_broken_and_falls_while_it_holds():
    multiplier = LagrangeMultiplier(LagrangeConfig(limit=0.1, min_price=1e-3, initial_price=1.0))
    start = multiplier.price
    assert multiplier.update(0.2) > start
    high = multiplier.price
    assert multiplier.update(0.05) < high
    for _ in range(100_000):
        multiplier.update(0.0)
    assert multiplier.price == pytest.approx(1e-3)


@pytest.mark.parametrize("initial", [0.3, 6.0])
def test_lambda_finds_the_price_of_a_soft_policy_to_within_two_percent(initial):
    """Two states: in the first, the risky action earns 1 and costs 1; the second only passes time.

    A softmax policy of temperature T takes the risk with probability p = sigmoid((1 - lambda) / T),
    and is in the first state half of the time, so that the cost is p / 2.
    """
    limit, temperature = 0.1, 0.3
    answer = 1.0 - temperature * math.log(0.2 / 0.8)  # p = 0.2
    config = LagrangeConfig(limit=limit, initial_price=initial, min_price=1e-3, learning_rate=0.02)
    multiplier = LagrangeMultiplier(config)
    for _ in range(2000):
        risk = 1.0 / (1.0 + math.exp(-(1.0 - multiplier.price) / temperature))
        multiplier.update(0.5 * risk)
    assert multiplier.price == pytest.approx(answer, rel=0.02)


TWO_ACTIONS = ClusterConfig(fleet=FleetConfig(num_servers=2), visible_jobs=1, sleep=False)


def two_state_batch(generator, size, gamma):
    """Draw transitions of the two-state CMDP above; the risk earns 0.075 and costs 0.05."""
    sizes = ObservationSizes.of(TWO_ACTIONS)
    state = torch.randint(2, (size,), generator=generator)
    action = torch.randint(2, (size,), generator=generator)  # 0 is the risk
    context = torch.zeros(size, sizes.context_features)
    context[:, 0] = state
    following = torch.zeros_like(context)
    following[:, 0] = 1 - state
    risk = 0.05 * ((state == 0) & (action == 0)).float() * (1.0 - gamma)
    mask = torch.ones(size, 3, dtype=torch.int8)
    mask[:, 2] = 0  # no waiting: the job goes to one server or the other
    parts = {
        "servers": torch.zeros(size, 2, sizes.server_features),
        "jobs": torch.zeros(size, 1, sizes.job_features),
        "action_mask": mask,
    }
    return {
        **parts,
        "context": context,
        **{f"next_{name}": values for name, values in parts.items()},
        "next_context": following,
        "action": action,
        "behaviour_probability": torch.full((size,), 0.5),
        "reward": 1.5 * risk,
        "cost": risk,
        "discount": torch.full((size,), gamma),
    }


@pytest.mark.parametrize("initial", [0.5, 1.0, 4.0])
def test_the_learner_finds_the_price_of_the_two_state_cmdp_to_within_two_percent(initial):
    """Both actions are equally good at a price of 1.5; the limit lies between their costs."""
    torch.manual_seed(0)
    config = ConstrainedConfig(
        network=NetworkConfig(kind="flat", flat_width=16),
        constraint=LagrangeConfig(limit=0.0125, initial_price=initial, min_price=0.01),
        gamma=0.8,
        pessimism=0.0,
        learning_rate=1e-2,
    )
    model = ConstrainedModel(ObservationSizes.of(TWO_ACTIONS), config)
    num_steps = 1500
    learner = ConstrainedLearner(model, config, num_steps=num_steps)
    generator = torch.Generator().manual_seed(0)
    prices = []
    for _ in range(num_steps):
        learner.step(two_state_batch(generator, 64, config.gamma))
        prices.append(learner.multiplier.price)
    assert np.mean(prices[-num_steps // 3 :]) == pytest.approx(1.5, rel=0.02)


def test_what_was_drawn_at_random_does_not_count_as_what_anyone_meant():
    torch.manual_seed(0)
    config = ConstrainedConfig(
        network=NetworkConfig(kind="flat", flat_width=16), gamma=0.8, learning_rate=1e-2
    )
    model = ConstrainedModel(ObservationSizes.of(TWO_ACTIONS), config)
    learner = ConstrainedLearner(model, config, num_steps=300)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        batch = two_state_batch(generator, 64, config.gamma)
        is_meant = batch["action"] == 1
        batch["behaviour_probability"] = torch.where(is_meant, 0.9, 0.05)
        learner.step(batch)
    prior = torch.softmax(model.heads({k: batch[k] for k in OBSERVATION}).prior_BA, dim=1)
    assert prior[:, 1].mean().item() == pytest.approx(0.9 / 0.95, abs=0.03)


def test_every_action_has_its_kind(observation):
    cluster, tensors = observation
    kind = kinds(toggled(tensors), cluster.num_actions)
    asleep = tensors["servers"][:, :, columns(cluster.num_resources).is_asleep]
    num_pairs = cluster.visible_jobs * cluster.num_servers
    for row, states in zip(kind.tolist(), asleep.tolist(), strict=True):
        toggles = [1 if state else 2 for state in states]
        assert row == [0] * num_pairs + toggles + [3]
    assert {1, 2} <= set(kind[:, num_pairs:-1].flatten().tolist())
    awake = {**tensors, "action_mask": tensors["action_mask"][:, : num_pairs + 1]}
    assert kinds(toggled(awake), num_pairs + 1).tolist() == [[0] * num_pairs + [3]] * len(asleep)


def test_rare_kinds_of_action_count_more_and_a_decision_counts_one_on_average():
    share = torch.tensor([0.81, 0.0004, 0.0096, 0.18])
    weight = kind_weights(share)
    assert (weight * share).sum().item() == pytest.approx(1.0)
    assert (weight[1] / weight[0]).item() == pytest.approx(math.sqrt(0.81 / 0.0004), rel=1e-4)
    assert kind_weights(torch.tensor([0.9, 0.0, 0.0, 0.1])).isfinite().all()


def test_imitation_agrees_with_a_scalar_loop_in_which_rare_kinds_count_more(observation):
    cluster, tensors = observation
    config = ConstrainedConfig(network=NetworkConfig(kind="flat", **SMALL))
    torch.manual_seed(0)
    model = ConstrainedModel(ObservationSizes.of(cluster), config)
    for parameter in model.heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    share = torch.tensor([0.7, 0.01, 0.04, 0.25])
    model.hear(torch.ones(4), share)
    is_legal = tensors["action_mask"] != 0
    count = len(is_legal)
    action = torch.multinomial(is_legal.float(), 1).squeeze(1)
    meant = torch.rand(count)
    batch = {
        **tensors,
        **{f"next_{name}": values for name, values in tensors.items()},
        "action": action,
        "behaviour_probability": meant,
        "reward": torch.zeros(count),
        "cost": torch.zeros(count),
        "discount": torch.full((count,), config.gamma),
    }
    loss = model(batch, torch.tensor(1.0), config)
    found = torch.log_softmax(model.heads(tensors).prior_BA, dim=1)
    mean = sum(math.sqrt(part) for part in share.tolist())
    kind_of_all = kinds(toggled(tensors), cluster.num_actions)
    total, seen = 0.0, [0.0] * 4
    for i in range(count):
        kind = int(kind_of_all[i, action[i]])
        weight = 1.0 / math.sqrt(share[kind].item()) / mean
        total -= meant[i].item() * weight * found[i, action[i]].item()
        seen[kind] += meant[i].item()
    assert len({kind for kind in range(4) if seen[kind]}) > 2
    assert loss.prior.item() == pytest.approx(total / count, rel=1e-4)
    assert loss.share_4.tolist() == pytest.approx([part / meant.sum().item() for part in seen])


def test_a_continued_run_has_the_weights_of_one_that_never_stopped():
    config = ConstrainedConfig(network=NetworkConfig(kind="flat", flat_width=16), gamma=0.8)

    def fresh():
        torch.manual_seed(3)
        model = ConstrainedModel(ObservationSizes.of(TWO_ACTIONS), config)
        return ConstrainedLearner(model, config, num_steps=40)

    batches = [
        two_state_batch(torch.Generator().manual_seed(i), 64, config.gamma) for i in range(40)
    ]
    whole, first, second = fresh(), fresh(), fresh()
    for batch in batches:
        whole.step(batch)
    for batch in batches[:17]:
        first.step(batch)
    second.load_state_dict(first.state_dict())
    for batch in batches[17:]:
        second.step(batch)
    for name, tensor in whole.module.state_dict().items():
        assert torch.equal(tensor, second.module.state_dict()[name]), name
    assert whole.multiplier.price == second.multiplier.price


def a_worker(rank, folder, precision):
    """One of two distributed workers: half of the batch, gradients averaged."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    half = {name: values[32 * rank : 32 * rank + 32] for name, values in a_batch().items()}
    gradients = gradients_of_a_step(precision, half, mean_of_workers)
    if rank == 0:
        torch.save(gradients, f"{folder}/gradient")
    torch.distributed.barrier()
    os._exit(0)  # torch's teardown of its threads aborts once in some hundred runs


def a_batch():
    return two_state_batch(torch.Generator().manual_seed(9), 64, 0.8)


def gradients_of_a_step(precision, batch, mean=None):
    torch.manual_seed(3)
    network = NetworkConfig(kind="flat", flat_width=16)
    config = ConstrainedConfig(network=network, gamma=0.8, precision=precision)
    model = ConstrainedModel(ObservationSizes.of(TWO_ACTIONS), config)
    for parameter in model.heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ConstrainedLearner(model, config, num_steps=10).step(batch, mean_of_workers=mean)
    return [p.grad for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_two_distributed_workers_have_the_gradient_of_one(tmp_path, precision, tolerance):
    torch.multiprocessing.spawn(a_worker, (str(tmp_path), precision), nprocs=2)
    found = torch.load(tmp_path / "gradient")
    expected = gradients_of_a_step(precision, a_batch())
    assert max(gradient.abs().max() for gradient in expected) > 1e-3
    for ours, one in zip(found, expected, strict=True):
        assert (ours - one).norm() <= tolerance * one.norm() + 1e-6
