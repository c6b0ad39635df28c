"""Shared by all tests."""

from __future__ import annotations

import os

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
