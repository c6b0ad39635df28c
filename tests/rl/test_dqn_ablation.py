import pytest
import torch
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from cloudsched.rl.algorithms.dqn import ClusterDQNConfig, ReplayEnvRunner
from tune.dqn_ablation import VARIANTS, DqnAblation

SETTINGS = {"episode_ticks": 30, "fleet": {"num_servers": 4}, "visible_jobs": 3}


def learned(variant):
    """Return the learner of a variant after two updates; all variants see the same columns."""
    torch.manual_seed(0)
    config = ClusterDQNConfig()
    config.environment(env_config={"settings": SETTINGS})
    config.env_runners(num_envs_per_env_runner=8)
    config.rl_module(model_config={"network": {"width": 8, "context_width": 8, "pair_width": 8}})
    config.training(
        train_batch_size_per_learner=512, minibatch_size=64, learning_starts=100, **variant
    )
    config.debugging(seed=0, log_level="ERROR")
    runner = ReplayEnvRunner(config=config, worker_index=0)
    learner = config.build_learner(spaces=runner.get_spaces())
    for _ in range(2):
        columns = {name: SampleBatch(part) for name, part in runner.sample().items()}
        torch.manual_seed(1)
        learner.update(batch=MultiAgentBatch(columns, env_steps=512), num_updates=2)
    return learner


def test_every_part_that_is_left_out_changes_what_is_learned():
    sums = []
    for variant in VARIANTS:
        learner = learned(variant)
        memory = learner._memories["default_policy"]
        elapsed = memory._columns["elapsed"][:, : 2 * 512 // 8]
        assert bool((elapsed == 1).all()) == (variant["clock"] == "decision")
        network = learner.module["default_policy"].network
        sums.append(sum(tensor.double().sum().item() for tensor in network.parameters()))
    assert len({round(total, 9) for total in sums}) == len(VARIANTS)


def test_the_ablation_can_be_built_without_running_it(tmp_path):
    pytest.importorskip("ray.tune")
    tuner = DqnAblation(out=tmp_path, steps=1000).tuner()
    assert tuner is not None
    assert VARIANTS[0] == {
        name: getattr(ClusterDQNConfig(), name) for name in ("target_mask", "n_step", "clock")
    }
