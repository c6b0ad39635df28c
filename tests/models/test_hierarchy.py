import numpy as np
import torch

from cloudsched.config import ClusterConfig, FleetConfig
from cloudsched.models.hierarchy import MODULES, SUB_AGENTS, HierarchyNetwork
from cloudsched.models.hierarchy_rollout import HierarchyCollector
from cloudsched.models.masking import log_prob, log_probs
from cloudsched.models.networks import NetworkConfig, ObservationSizes
from cloudsched.models.rollout import training_env

SETTINGS = {"episode_ticks": 25, "fleet": {"num_servers": 4}, "visible_jobs": 3}
CLUSTER = ClusterConfig(episode_ticks=25, fleet=FleetConfig(num_servers=4), visible_jobs=3)
SLA_WEIGHTS = {"power": 0.5, "sla": 4.0}
STEPS, CLUSTERS = 150, 8


def build_networks():
    torch.manual_seed(0)
    network = HierarchyNetwork.build(ObservationSizes.of(CLUSTER), NetworkConfig(width=8))
    return network, {name: network.get_submodule(name) for name in MODULES}


def collected(group_size=1):
    """Return a rollout by module, the collector, and what the environment was told and said."""
    env = training_env(CLUSTERS, settings=SETTINGS, load=2.0)
    seen = []
    step = env.step

    def recording_step(actions):
        result = step(actions)
        seen.append((actions.copy(), result[1].copy(), result[4]["cost"].copy()))
        return result

    env.step = recording_step
    collector = HierarchyCollector(
        env,
        num_steps=STEPS,
        gamma=0.9,
        lambda_=0.8,
        group_size=group_size,
        sla_weights=SLA_WEIGHTS,
    )
    collector.reset(list(range(CLUSTERS)))
    columns = collector.collect_all(build_networks()[1])
    return columns, collector, [np.stack(table) for table in zip(*seen, strict=True)]


def test_what_was_executed_is_what_each_module_stores():
    columns, collector, (executed, _, _) = collected()
    owners = {name: tables.is_own.numpy() for name, tables in collector._tables.items()}
    assert [owners[name].sum() for name in MODULES] == [STEPS * 4, STEPS * 2, STEPS * 2]
    assert (sum(table.astype(int) for table in owners.values()) == 1).all()
    chosen = collector._tables["supervisor"].action.numpy()
    said = np.stack([collector._tables[name].action.numpy() for name in SUB_AGENTS])
    np.testing.assert_array_equal(executed, np.where(chosen == 0, *said))
    led = chosen[:, owners["supervisor"].all(axis=0)]
    assert 0.2 < led.mean() < 0.8, "an untrained supervisor leaves decisions to both"
    networks = build_networks()[1]
    for name in SUB_AGENTS:
        mine = columns[name]
        np.testing.assert_array_equal(mine.action, executed[owners[name]])
        assert mine.observation["action_mask"][range(len(mine.action)), mine.action].all()
        with torch.no_grad():
            logits, value = networks[name](mine.observation)
        want = log_prob(log_probs(logits), mine.action)
        torch.testing.assert_close(mine.log_prob, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.value, value, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(columns["supervisor"].action, chosen[owners["supervisor"]])


def test_advantages_of_each_module_agree_with_a_scalar_loop_over_its_own_reward():
    _, collector, (_, reward, cost) = collected()
    price = CLUSTER.reward.beta / CLUSTER.num_servers
    for name, tables in collector._tables.items():
        surcharge = 0.0 if name == "supervisor" else (SLA_WEIGHTS[name] - 1.0) * price
        own_reward = 0.1 * (reward - surcharge * cost)
        for e in range(CLUSTERS):
            advantage = 0.0
            for t in reversed(range(STEPS - 1)):
                if t == STEPS - 2:  # the last row is bootstrapped from outside the table
                    advantage = tables.advantage[STEPS - 1, e].item()
                is_cut = collector._is_cut[t, e]
                elapsed = collector._elapsed[t, e]
                follows = 0.0 if is_cut else 0.8**elapsed * advantage
                if is_cut:  # its next value is that of the last observation, not in the table
                    advantage = tables.advantage[t, e].item()
                    continue
                next_value = tables.value[t + 1, e].item()
                surprise = own_reward[t, e] + 0.9**elapsed * next_value - tables.value[t, e].item()
                advantage = surprise + 0.9**elapsed * follows
                np.testing.assert_allclose(tables.advantage[t, e], advantage, rtol=1e-3, atol=1e-3)
    assert (cost > 0).any(), "the sub-agents' rewards differ"


def test_the_hierarchy_acts_as_the_sub_agent_that_its_supervisor_prefers():
    network, parts = build_networks()
    observation = collected()[0]["supervisor"].observation
    for number, name in enumerate(SUB_AGENTS):
        with torch.no_grad():
            parts["supervisor"].out.bias[number] = 100.0
            torch.testing.assert_close(network(observation)[0], parts[name](observation)[0])
            parts["supervisor"].out.bias[number] = 0.0
    with torch.no_grad():
        mixed = network(observation)[0]
        choice = parts["supervisor"](observation)[0].argmax(dim=1)
        each = torch.stack([parts[name](observation)[0] for name in SUB_AGENTS])
    torch.testing.assert_close(mixed, each[choice, torch.arange(len(choice))])
