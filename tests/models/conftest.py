"""Transitions that the tests of offline learning share."""

import pytest
import torch

from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.heuristics.catalog import make_heuristic
from cloudsched.models.prepared import NEXT, NEXT_NUMBER, OBSERVATION

SHARED = 3  # decisions in a row that are followed by the same observation


@pytest.fixture(scope="module")
def columns():
    """Transitions of a rule that sleeps and wakes, of which some share what follows."""
    env = ClusterVectorEnv(16, workload="diurnal")
    policy = make_heuristic("power_aware+band", env.config)
    seen, _ = env.reset(seed=0)
    rows = []
    for _ in range(60):
        before = {name: torch.from_numpy(seen[name].copy()) for name in OBSERVATION}
        action = torch.from_numpy(policy.act(seen).copy())
        seen, *_ = env.step(action.numpy())
        rows.append({**before, "action": action})
    found = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    count = len(found["action"])
    torch.manual_seed(1)
    number = torch.arange(count) // SHARED
    found |= {NEXT + name: found[name][number * SHARED] for name in OBSERVATION}
    found[NEXT_NUMBER] = number
    found["behaviour_probability"] = torch.rand(count)
    found |= {name: torch.rand(count) for name in ("reward", "cost", "discount")}
    return found
