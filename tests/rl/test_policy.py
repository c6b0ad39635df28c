import numpy as np
import pytest
import torch

from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.evaluation import evaluate
from cloudsched.models.networks import NetworkConfig, ObservationSizes, build_network
from cloudsched.rl.policy import RULES, NetworkPolicy

SCENARIO = Scenario(settings={"episode_ticks": 20, "fleet": {"num_servers": 4}})


def network():
    torch.manual_seed(0)
    return build_network(ObservationSizes.of(SCENARIO.config), NetworkConfig())


@pytest.mark.parametrize("rule", RULES)
def test_a_network_policy_acts_legally_and_the_same_again(rule):
    policy = NetworkPolicy(network(), rule=rule, seed=3)
    first = evaluate(policy, SCENARIO, range(4)).metrics
    second = evaluate(policy, SCENARIO, range(4)).metrics
    assert (first["illegal"] == 0).all()
    for name, values in first.items():
        np.testing.assert_array_equal(values, second[name], err_msg=name)


def test_an_unknown_rule_is_refused():
    with pytest.raises(ConfigError, match="rule='best'"):
        NetworkPolicy(network(), rule="best")
