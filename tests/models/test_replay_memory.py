import numpy as np
import pytest
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


def filled(capacity, num_steps, num_ticks, part=10):
    data = stream(4, num_steps)
    replay = ColumnReplay(capacity, num_ticks=num_ticks, gamma=0.9, device="cpu")
    for start in range(0, num_steps, part):
        piece = {
            name: {k: v[:, start : start + part] for k, v in column.items()}
            if isinstance(column, dict)
            else column[:, start : start + part]
            for name, column in data.items()
        }
        replay.add(piece.pop("observation"), **piece)
    return replay, data


def scalar_n_step(data, cluster, time, num_ticks):
    """Walk on until n ticks are over; returns are bootstrapped from the decision after."""
    total, tick, is_whole = 0.0, 0, True
    while tick < num_ticks:
        total += 0.9**tick * data["reward"][cluster, time].item()
        tick += data["elapsed"][cluster, time].item()
        is_whole = is_whole and not data["is_cut"][cluster, time]
        time += 1
    return total, 0.9**tick, is_whole, time


@pytest.mark.parametrize("num_ticks", [1, 4])
def test_n_step_returns_over_ticks_agree_with_a_scalar_loop(num_ticks):
    replay, data = filled(capacity=64, num_steps=200, num_ticks=num_ticks)
    batch = replay.sample(2000)
    for row in range(2000):
        cluster, time = batch.observation["context"][row].tolist()
        assert time >= 200 - 64, "only the newest decisions are kept"
        total, discount, is_whole, later = scalar_n_step(data, cluster, time, num_ticks)
        np.testing.assert_allclose(batch.n_step_reward[row], total, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(batch.discount[row], discount, rtol=1e-5)
        assert bool(batch.is_valid[row]) == is_whole
        assert batch.next_observation["context"][row].tolist() == [cluster, later]
        assert batch.action[row] == data["action"][cluster, time]


def test_every_kept_decision_with_a_known_future_can_be_drawn():
    replay, data = filled(capacity=30, num_steps=50, num_ticks=3)
    last_known = min(  # the newest decision of which three ticks are over, in the slowest cluster
        max(t for t in range(50) if data["elapsed"][cluster, t:49].sum() >= 3)
        for cluster in range(4)
    )
    assert replay.num_known == 4 * (last_known - 19)
    times = replay.sample(5000).observation["context"][:, 1]
    assert sorted(set(times.tolist())) == list(range(20, last_known + 1))
