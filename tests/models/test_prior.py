"""A network that corrects a rule starts as the rule, and can leave it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cloudsched.bundle import Bundle, load_bundle, save_bundle
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.observation import columns
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.evaluation import evaluate
from cloudsched.heuristics.catalog import HEURISTICS, make_heuristic
from cloudsched.models.masking import log_probs
from cloudsched.models.networks import NetworkConfig, ObservationSizes, build_network
from cloudsched.rl.policy import NetworkPolicy

NAME = "headroom@slow_wake/diurnal"
RULE = HEURISTICS[NAME].config
SHORT = Scenario(preset="slow_wake", workload="diurnal", settings={"episode_ticks": 80})


def network(scenario: Scenario = SHORT, **settings: object) -> torch.nn.Module:
    torch.manual_seed(0)
    config = NetworkConfig(**{"prior": RULE, **settings})
    return build_network(ObservationSizes.of(scenario.config), config)


@pytest.mark.parametrize("kind", ["set", "flat"])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_without_training_it_decides_as_the_rule(kind: str, is_frozen: bool) -> None:
    corrected = NetworkPolicy(network(kind=kind), is_frozen=is_frozen)
    ours = evaluate(corrected, SHORT, range(4)).metrics
    rule = evaluate(make_heuristic(NAME, SHORT.config), SHORT, range(4)).metrics
    for name in ("episode_return", "toggles", "energy_kwh"):
        np.testing.assert_array_equal(ours[name], rule[name])


def test_the_rule_is_as_likely_in_a_large_fleet_as_in_a_small_one() -> None:
    shares = []
    for num_servers in (15, 300):
        scenario = Scenario(settings={"fleet": {"num_servers": num_servers}})
        env = ClusterVectorEnv(4, copy=False, **scenario.to_dict())
        observation, _ = env.reset(seed=0)
        net, chances = network(scenario), ([], [])
        for _ in range(150):
            actions = net.prior.actions(observation)
            tensors = {name: torch.from_numpy(array) for name, array in observation.items()}
            with torch.inference_mode():
                table = log_probs(net(tensors)[0]).exp().numpy()
            for e, action in enumerate(actions):
                is_toggle = 5 * num_servers <= action < 6 * num_servers
                chances[int(is_toggle)].append(table[e, action])
            env.step(actions)
        shares.append([np.mean(part) for part in chances])
    assert np.min(shares) > 0.8
    np.testing.assert_allclose(*shares, atol=0.03)


def test_learning_can_overrule_the_rule() -> None:
    net = network()
    env = ClusterVectorEnv(4, **SHORT.to_dict())
    observation, _ = env.reset(seed=0)
    tensors = {name: torch.from_numpy(array) for name, array in observation.items()}
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        (-log_probs(net(tensors)[0])[:, -1]).mean().backward()  # to wait is always legal
        optimizer.step()
    assert (NetworkPolicy(net).act(observation) == env.single_action_space.n - 1).all()


def test_a_bundle_keeps_the_rule(tmp_path) -> None:
    net = network()
    config = NetworkConfig(prior=RULE)
    bundle = Bundle(network=config, cluster=SHORT.config, weights=net.state_dict())
    loaded = load_bundle(save_bundle(bundle, tmp_path / "bundle"))
    assert loaded.network == config
    again = evaluate(loaded.policy(SHORT.config), SHORT, range(2)).metrics["episode_return"]
    rule = evaluate(make_heuristic(NAME, SHORT.config), SHORT, range(2)).metrics["episode_return"]
    np.testing.assert_array_equal(again, rule)


def test_a_rule_that_remembers_is_refused() -> None:
    with pytest.raises(ConfigError, match="remembers the last one"):
        NetworkConfig(prior=HEURISTICS["rr"].config)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_kinds_with_a_lead_that_nothing_makes_up_for_are_left_to_the_rule(is_frozen: bool) -> None:
    env = ClusterVectorEnv(16, copy=False, **SHORT.to_dict())
    num_pairs, wait = 75, 90
    at = columns(2)
    kinds: set[int] = set()
    policies = []
    for free in range(4):
        leads = tuple(0.0 if kind == free else 1e3 for kind in range(4))
        net = network(prior_weight=0.0, prior_leads=leads, is_balanced=False)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.normal_(0.0, 0.5)  # as wrong as can be
        policies.append(NetworkPolicy(net, rule="argmax", is_frozen=is_frozen))
    rule = make_heuristic(NAME, SHORT.config)
    observation, _ = env.reset(seed=0)
    for _ in range(150):
        own = rule.act(observation)
        is_asleep = observation["servers"][:, :, at.is_asleep] != 0.0
        for free, policy in enumerate(policies):
            actions = policy.act(observation)
            for e in np.flatnonzero(actions != own):
                action = actions[e]
                kind = 0 if action < num_pairs else 3
                if num_pairs <= action < wait:
                    kind = 1 if is_asleep[e, action - num_pairs] else 2
                assert kind == free
                kinds.add(kind)
        env.step(own)
    assert kinds == {0, 1, 2, 3}


@pytest.mark.parametrize("is_frozen", [True, False])
def test_no_network_holds_back_a_job_that_is_due(is_frozen: bool) -> None:
    env = ClusterVectorEnv(16, copy=False, **SHORT.to_dict())
    at = columns(2)
    policies = {}
    for due in (None, 3):
        net = network(prior_weight=0.0, prior_due_ticks=due, is_balanced=False)
        with torch.no_grad():
            net.network.kind_out.bias[:] = torch.tensor([0.0, -9.0, -9.0, 9.0])  # always waits
        policies[due] = NetworkPolicy(net, rule="argmax", is_frozen=is_frozen)
    rule = make_heuristic(NAME, SHORT.config)
    observation, _ = env.reset(seed=0)
    num_held = num_due = 0
    for _ in range(150):
        own, free, bound = (one.act(observation).copy() for one in (rule, *policies.values()))
        jobs = observation["jobs"]
        is_due = ((jobs[:, :, at.laxity] < 3.5 / 33.5) & (jobs[:, :, -1] != 0.0)).any(axis=1)
        assert (free == 90).all()
        np.testing.assert_array_equal(bound[~is_due], 90)
        np.testing.assert_array_equal(bound[is_due & (own == 90)], 90)
        assert (bound[is_due & (own != 90)] != 90).all()
        num_held += (~is_due & (own < 75)).sum()
        num_due += (is_due & (own < 75)).sum()
        env.step(own)
    assert num_held > 20
    assert num_due > 20


def test_caution_multiplies_the_lead_of_the_rule() -> None:
    env = ClusterVectorEnv(16, copy=False, **SHORT.to_dict())
    leads = (0.5, 0.5, 0.5, 0.5)
    observation, _ = env.reset(seed=0)
    rows = []
    for rule, by in ((RULE, 1.0), (RULE.replace(caution=8.0), 1.0), (RULE, 8.0)):
        net = network(prior=rule, prior_weight=0.0, prior_leads=tuple(by * lead for lead in leads))
        rows.append(net.prior(observation))
    assert (rows[0] != rows[1]).any()
    np.testing.assert_array_equal(rows[1], rows[2])


def test_leads_that_make_no_sense_are_refused() -> None:
    wrong = [(0.1, 0.1), (0.1, 0.1, 0.1, -1.0), (0.0, 0.0, 0.0, float("nan")), ("a",) * 4, None]
    for leads in wrong:
        with pytest.raises(ConfigError, match="prior_leads"):
            NetworkConfig(prior=RULE, prior_leads=leads)
