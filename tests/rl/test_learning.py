import pytest
import torch

from cloudsched.envs.scenario import Scenario
from cloudsched.evaluation import evaluate
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


def test_ppo_learns_that_an_empty_cluster_should_sleep():
    torch.manual_seed(0)
    config = ClusterPPOConfig()
    config.environment(env_config=EMPTY.to_dict())
    config.env_runners(num_envs_per_env_runner=16)
    config.training(
        train_batch_size_per_learner=1024, minibatch_size=256, lr=3e-3, entropy_coeff=0.0
    )
    config.debugging(seed=0, log_level="ERROR")
    algorithm = config.build_algo()
    optimum = best_return_without_jobs()
    policy = NetworkPolicy(algorithm.env_runner_group.local_env_runner.module.network)
    untrained = evaluate(policy, EMPTY, range(3)).metrics["episode_return"].mean()
    assert untrained < 2 * optimum
    for _ in range(40):
        algorithm.train()
        learned = evaluate(policy, EMPTY, range(3)).metrics["episode_return"].mean()
        if learned > optimum - 1e-6:
            break
    algorithm.stop()
    assert learned == pytest.approx(optimum)
