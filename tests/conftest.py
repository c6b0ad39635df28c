"""Shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Compiled code is slow the first time it runs, which is no fault of the example that ran first.
settings.register_profile("cloudsched", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("cloudsched")


@pytest.fixture(scope="session", autouse=True)
def _compiled_kernels() -> None:
    """Compile (or load) the kernels once, so that no test pays for it inside its timeout."""
    import numpy as np

    from cloudsched.envs.cluster import ClusterVectorEnv
    from cloudsched.heuristics.catalog import make_heuristic

    env = ClusterVectorEnv(2, settings={"episode_ticks": 2})
    policy = make_heuristic("rr+headroom", env.config)
    observation, _ = env.reset(seed=0)
    env.step(policy.act(observation))
    env.step(np.full(2, env.engine.wait_action))


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small dataset of logged decisions; not to be changed."""
    from cloudsched.commands.policies import make_policy
    from cloudsched.datasets.manifest import Behaviour
    from cloudsched.datasets.record import RecordingConfig, in_process, record
    from cloudsched.envs.scenario import Scenario

    folder = tmp_path_factory.mktemp("data") / "recorded"
    record(
        Scenario(
            workload="poisson",
            settings={"episode_ticks": 60, "fleet": {"num_servers": 4}, "visible_jobs": 3},
        ),
        RecordingConfig(
            num_episodes=12,
            episodes_per_file=8,
            behaviours=(
                Behaviour(policy="rr"),
                Behaviour(policy="best_fit+sleep", epsilon=0.2),
                Behaviour(policy="power_aware+headroom", epsilon=0.5),
                Behaviour(policy="random"),
            ),
            seed=3,
        ),
        folder,
        make_policy,
        lambda *_: None,
        {},
        in_process,
    )
    return folder
