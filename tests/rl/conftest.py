import logging

import pytest

from cloudsched.rl.algorithms.ppo import ClusterPPOConfig

TINY = {"settings": {"episode_ticks": 30, "fleet": {"num_servers": 4}, "visible_jobs": 3}}


@pytest.fixture(scope="session")
def local_ray():
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _system_config={"worker_niceness": 0},  # or workers starve on a busy machine
    )
    yield ray
    ray.shutdown()


@pytest.fixture
def tiny_config():
    config = ClusterPPOConfig()
    config.environment(env_config=TINY)
    config.env_runners(num_envs_per_env_runner=8)
    config.rl_module(model_config={"network": {"width": 16, "context_width": 16, "pair_width": 8}})
    config.training(train_batch_size_per_learner=512, minibatch_size=128, num_epochs=2)
    config.debugging(seed=0, log_level="ERROR")
    return config
