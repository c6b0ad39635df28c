"""No algorithm ever samples an illegal action."""

import numpy as np
import pytest

from cloudsched.rl.algorithms.dqn import ClusterDQNConfig, ReplayEnvRunner
from cloudsched.rl.algorithms.hierarchical import HierarchicalConfig, HierarchyEnvRunner
from cloudsched.rl.algorithms.ppo import ClusterPPOConfig
from cloudsched.rl.runner import BatchedEnvRunner

SETTINGS = {"episode_ticks": 40, "fleet": {"num_servers": 4}, "visible_jobs": 3}
CASES = [
    (ClusterPPOConfig, BatchedEnvRunner),
    (ClusterDQNConfig, ReplayEnvRunner),
    (HierarchicalConfig, HierarchyEnvRunner),
]


@pytest.mark.parametrize(("config_class", "runner_class"), CASES, ids=["ppo", "dqn", "hierarchy"])
def test_masks_are_never_violated_in_a_million_sampled_actions(config_class, runner_class):
    num_clusters, num_steps = 4096, 85  # times three algorithms: more than a million
    config = config_class()
    config.environment(env_config={"settings": SETTINGS, "load": 0.8})
    config.env_runners(num_envs_per_env_runner=num_clusters)
    config.rl_module(model_config={"network": {"width": 4, "context_width": 4, "pair_width": 4}})
    config.training(train_batch_size_per_learner=num_clusters * num_steps)
    config.debugging(seed=0)
    runner = runner_class(config=config, worker_index=0)
    env, step, counts = runner.env, runner.env.step, []

    def checked_step(actions):
        assert env.engine.mask[np.arange(num_clusters), actions].all()
        counts.append(len(actions))
        return step(actions)

    env.step = checked_step
    runner.sample()
    assert sum(counts) == num_clusters * num_steps > 1_000_000 / len(CASES)
    runner.stop()
