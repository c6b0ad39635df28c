import numpy as np
import torch

from cloudsched.models.replay import ColumnReplay


def stream(num_clusters, num_steps, seed=0):
    rng = np.random.default_rng(seed)
    shape = (num_clusters, num_steps)
    # The observation is its own address: cluster and time.
    cluster, time = np.indices(shape)
    return {
        "observation": {"context": torch.tensor(np.stack([cluster, time], axis=2))},
        "action": torch.tensor(rng.integers(0, 9, shape)),
        "reward": torch.tensor(rng.normal(size=shape).astype(np.float32)),
        "elapsed": torch.tensor(rng.integers(0, 2, shape)),
        "is_cut": torch.tensor(rng.random(shape) < 0.05),
    }


def filled(capacity, num_steps, part=10):
    data = stream(4, num_steps)
    replay = ColumnReplay(capacity, "cpu")
    for start in range(0, num_steps, part):
        piece = {
            name: {k: v[:, start : start + part] for k, v in column.items()}
            if isinstance(column, dict)
            else column[:, start : start + part]
            for name, column in data.items()
        }
        replay.add(piece.pop("observation"), **piece)
    return replay, data


def test_n_step_returns_agree_with_a_scalar_loop():
    replay, data = filled(capacity=64, num_steps=200)
    batch = replay.sample(500, num_steps=5, gamma=0.9)
    for row in range(500):
        cluster, time = batch.observation["context"][row].tolist()
        assert time >= 200 - 64, "only the newest decisions are kept"
        total, discount, is_valid = 0.0, 1.0, True
        for later in range(time, time + 5):
            total += discount * data["reward"][cluster, later].item()
            discount *= 0.9 ** data["elapsed"][cluster, later].item()
            is_valid = is_valid and not data["is_cut"][cluster, later]
        np.testing.assert_allclose(batch.n_step_reward[row], total, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(batch.discount[row], discount, rtol=1e-5)
        assert bool(batch.is_valid[row]) == is_valid
        assert batch.next_observation["context"][row].tolist() == [cluster, time + 5]
        assert batch.action[row] == data["action"][cluster, time]


def test_every_kept_decision_with_a_known_future_can_be_drawn():
    replay, _ = filled(capacity=30, num_steps=50)
    times = replay.sample(5000, num_steps=3, gamma=0.9).observation["context"][:, 1]
    assert sorted(set(times.tolist())) == list(range(20, 47))
