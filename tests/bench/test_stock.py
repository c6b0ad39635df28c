import numpy as np

from cloudsched.bench.stock import MaskedClusters
from cloudsched.envs.cluster import ClusterVectorEnv


def test_rllibs_masking_example_sees_what_our_module_sees():
    ours, theirs = ClusterVectorEnv(3, workload="poisson"), MaskedClusters(3, workload="poisson")
    seen, _ = ours.reset(seed=[1, 2, 3])
    row, _ = theirs.reset(seed=[1, 2, 3])
    rng = np.random.default_rng(0)
    for _ in range(60):
        parts = [seen[name].reshape(3, -1) for name in ("servers", "jobs", "context")]
        assert (row["observations"] == np.concatenate(parts, axis=1)).all()
        assert (row["action_mask"] == seen["action_mask"]).all()
        assert theirs.observation_space.contains(row)
        actions = np.array([rng.choice(np.flatnonzero(mask)) for mask in seen["action_mask"]])
        seen, reward, *_ = ours.step(actions)
        row, their_reward, *_ = theirs.step(actions)
        assert (reward == their_reward).all()
    assert row["action_mask"].dtype == np.float32
