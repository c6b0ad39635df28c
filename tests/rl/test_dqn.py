import numpy as np
import pytest
import torch

from cloudsched.errors import ConfigError
from cloudsched.models.masking import epsilon_greedy, log_probs, mask_logits
from cloudsched.rl.algorithms.dqn import ClusterDQN, ClusterDQNConfig


def test_exploration_is_legal_balanced_over_kinds_and_rare():
    # Two servers and two jobs: two legal placements, one legal toggle, and waiting.
    mask = torch.tensor([[1, 0, 1, 0, 0, 1, 1]])
    q = mask_logits(torch.tensor([[1.0, 9.0, 2.0, 9.0, 9.0, 3.0, 4.0]]), mask)
    chances = log_probs(epsilon_greedy(q, num_servers=2, num_jobs=2, epsilon=0.3)).exp()
    want = [0.05, 0.0, 0.05, 0.0, 0.0, 0.1, 0.8]
    np.testing.assert_allclose(chances[0], want, rtol=1e-5)


@pytest.fixture
def dqn_config(tiny_config):
    config = ClusterDQNConfig()
    config.environment(env_config=tiny_config.env_config)
    config.env_runners(num_envs_per_env_runner=8)
    config.rl_module(model_config={"network": {"width": 16, "context_width": 16}})
    config.training(
        train_batch_size_per_learner=256,
        minibatch_size=64,
        replay_capacity=2000,
        learning_starts=100,
    )
    config.debugging(seed=0, log_level="ERROR")
    return config


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_dqn_trains_and_a_checkpoint_restores_online_and_target_network(dqn_config, tmp_path):
    algorithm = dqn_config.build_algo()
    for _ in range(3):
        result = algorithm.train()
    assert np.isfinite(result["learners"]["default_policy"]["total_loss"])
    assert result["env_runners"]["num_env_steps_sampled_lifetime"] == 3 * 256
    assert np.isfinite(result["env_runners"]["mean_power_w"])
    algorithm.save_to_path(str(tmp_path))
    restored = ClusterDQN.from_checkpoint(str(tmp_path))
    learner, other = algorithm.learner_group._learner, restored.learner_group._learner
    online = learner.module["default_policy"].network.state_dict()
    target = learner._targets["default_policy"].state_dict()
    assert any((online[name] != target[name]).any() for name in online)
    for name, array in other.module["default_policy"].network.state_dict().items():
        torch.testing.assert_close(array, online[name])
    for name, array in other._targets["default_policy"].state_dict().items():
        torch.testing.assert_close(array, target[name])
    algorithm.stop()
    restored.train()
    restored.stop()


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_dqn_learns_with_two_remote_runners(dqn_config):
    dqn_config.env_runners(num_env_runners=2)
    algorithm = dqn_config.build_algo()
    result = algorithm.train()
    assert result["env_runners"]["num_env_steps_sampled"] == 256
    memory = algorithm.learner_group._learner._memories["default_policy"]
    assert memory._columns["action"].shape == (16, 125)
    algorithm.stop()


def test_an_unknown_clock_is_refused():
    with pytest.raises(ConfigError, match="clock='second': expected one of tick, decision"):
        ClusterDQNConfig().training(clock="second")
