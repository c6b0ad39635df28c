import numpy as np
import pytest
import torch

from cloudsched.config import ClusterConfig, FleetConfig
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.errors import ConfigError
from cloudsched.models.masking import log_probs, sample
from cloudsched.models.networks import NetworkConfig, ObservationSizes, build_network


def observations(num_envs=8, steps=200, **settings):
    env = ClusterVectorEnv(num_envs, copy=False, settings=settings)
    observation, _ = env.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        mask = observation["action_mask"]
        env.advance((rng.random(mask.shape) * mask).argmax(axis=1))
    return {name: torch.from_numpy(array.copy()) for name, array in observation.items()}


def network(kind, **settings):
    config = ClusterConfig(**settings)
    return build_network(ObservationSizes.of(config), NetworkConfig(kind=kind))


@pytest.mark.parametrize("kind", ["set", "flat"])
@pytest.mark.parametrize("sleep", [True, False])
def test_a_network_gives_only_legal_actions_probability(kind, sleep):
    observation = observations(sleep=sleep)
    logits, value = network(kind, sleep=sleep)(observation)
    assert logits.shape == observation["action_mask"].shape
    assert value.shape == (8,)
    probabilities = log_probs(logits).exp()
    assert (probabilities[observation["action_mask"] == 0] == 0.0).all()
    np.testing.assert_allclose(probabilities.sum(dim=1).detach(), 1.0, rtol=1e-5)


@pytest.mark.parametrize("kind", ["set", "flat"])
def test_every_weight_gets_a_finite_gradient(kind):
    net = network(kind)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    logits, value = net(observations(num_envs=64))
    table = log_probs(logits)
    (table[:, -1].sum() + value.sum() + table.exp().square().sum()).backward()
    for name, parameter in net.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
        assert (parameter.grad != 0.0).any(), name


def test_a_set_policy_built_for_15_servers_acts_on_500():
    small = network("set")
    fleet = {"num_servers": 500}
    large = network("set", fleet=FleetConfig(**fleet), visible_jobs=7)
    large.load_state_dict(small.state_dict())
    observation = observations(num_envs=2, steps=50, fleet=fleet, visible_jobs=7)
    logits, _ = large(observation)
    actions = sample(logits)
    assert (observation["action_mask"].gather(1, actions.unsqueeze(1)) == 1).all()


def test_a_set_policy_does_not_care_in_which_order_servers_stand():
    net = network("set")
    with torch.no_grad():
        net.pair_out.weight.normal_()
        net.server_out.weight.normal_()
    observation = observations()
    order = torch.randperm(15)

    def moved(table):
        pairs = table[:, :75].view(-1, 5, 15)[:, :, order].flatten(1)
        return torch.cat([pairs, table[:, 75:90][:, order], table[:, 90:]], dim=1)

    logits, value = net(observation)
    moved_logits, moved_value = net(
        {
            **observation,
            "servers": observation["servers"][:, order],
            "action_mask": moved(observation["action_mask"]),
        }
    )
    torch.testing.assert_close(value, moved_value)
    torch.testing.assert_close(moved(logits), moved_logits)


def test_a_kind_is_not_likelier_because_it_has_more_actions():
    net = network("set")
    with torch.no_grad():
        for layer in (net.pair_out, net.server_out, net.kind_out):
            layer.weight.zero_()
            layer.bias.zero_()
    observation = observations()
    probabilities = log_probs(net(observation)[0]).exp()
    is_asleep = observation["servers"][:, :, 9] != 0
    place = probabilities[:, :75].sum(dim=1)
    wake = (probabilities[:, 75:90] * is_asleep).sum(dim=1)
    wait = probabilities[:, 90]
    for kind in (place, wake):
        torch.testing.assert_close(kind[kind > 0], wait[kind > 0])
    assert (place > 0).any()
    assert (wake > 0).any()


def test_an_unknown_network_is_refused():
    with pytest.raises(ConfigError, match="kind='deep'"):
        NetworkConfig(kind="deep")
