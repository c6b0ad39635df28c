import pytest
import torch

from cloudsched.envs.scenario import Scenario
from cloudsched.evaluation import evaluate
from cloudsched.rl.algorithms.dqn import ClusterDQNConfig
from cloudsched.rl.algorithms.ppo import ClusterPPOConfig
from cloudsched.rl.policy import NetworkPolicy
from cloudsched.sim.engine import ClusterEngine

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

TICKS = 20
EMPTY = Scenario(
    load=1e-9, settings={"episode_ticks": TICKS, "fleet": {"num_servers": 3}, "visible_jobs": 1}
)


def best_return_without_jobs():
    """All servers go to sleep in the first tick and stay there."""
    engine = ClusterEngine(EMPTY.config)
    reward, fleet = EMPTY.config.reward, engine.fleet
    power = EMPTY.config.standby_factor * fleet.idle_w.sum() / fleet.max_w.sum()
    return -(reward.alpha * power * TICKS + 3 * reward.toggle_penalty * 15 / 3)


def ppo_config():
    config = ClusterPPOConfig()
    config.training(
        train_batch_size_per_learner=1024, minibatch_size=256, lr=3e-3, entropy_coeff=0.0
    )
    return config


def dqn_config():
    config = ClusterDQNConfig()
    config.training(
        train_batch_size_per_learner=256,
        minibatch_size=128,
        replay_capacity=10_000,
        learning_starts=500,
        updates_per_iteration=8,
        epsilon=0.2,
        n_step=5,
        gamma=0.9,
        lr=3e-3,
    )
    return config


@pytest.mark.parametrize(
    ("make_config", "rule"), [(ppo_config, "kind"), (dqn_config, "argmax")], ids=["ppo", "dqn"]
)
def test_an_empty_cluster_is_learned_to_sleep(make_config, rule):
    torch.manual_seed(0)
    config = make_config()
    config.environment(env_config=EMPTY.to_dict())
    config.env_runners(num_envs_per_env_runner=16)
    config.debugging(seed=0, log_level="ERROR")
    algorithm = config.build_algo()
    optimum = best_return_without_jobs()
    network = algorithm.env_runner_group.local_env_runner.module.network
    policy = NetworkPolicy(network, rule=rule)
    untrained = evaluate(policy, EMPTY, range(3)).metrics["episode_return"].mean()
    assert untrained < 2 * optimum
    for _ in range(40):
        algorithm.train()
        learned = evaluate(policy, EMPTY, range(3)).metrics["episode_return"].mean()
        if learned > optimum - 1e-6:
            break
    algorithm.stop()
    assert learned == pytest.approx(optimum)
