import itertools
import math

import numpy as np
import pytest
import torch

from cloudsched.models.losses import (
    double_q_target,
    generalised_advantages,
    ppo_loss,
    q_loss,
    shared_luck,
)
from cloudsched.models.masking import mask_logits


def scalar_advantages(reward, value, next_value, discount, trace):
    """GAE as a sum over the future of one cluster, written as in the paper."""
    num_steps = len(reward)
    surprise = [reward[t] + discount[t] * next_value[t] - value[t] for t in range(num_steps)]
    result = []
    for t in range(num_steps):
        total, weight = 0.0, 1.0
        for later in range(t, num_steps):
            total += weight * surprise[later]
            weight *= discount[later] * trace[later]
        result.append(total)
    return result


def test_advantages_agree_with_the_scalar_sum():
    rng = np.random.default_rng(0)
    shape = (40, 5)
    elapsed = rng.integers(0, 2, shape)
    is_cut = rng.random(shape) < 0.1
    arrays = [rng.normal(size=shape).astype(np.float32) for _ in range(3)]
    arrays += [(0.9**elapsed).astype(np.float32), np.where(is_cut, 0, 0.95).astype(np.float32)]
    advantage = np.zeros(shape, np.float32)
    generalised_advantages(*arrays, advantage)
    for e in range(shape[1]):
        want = scalar_advantages(*(array[:, e].astype(float) for array in arrays))
        np.testing.assert_allclose(advantage[:, e], want, rtol=1e-4, atol=1e-4)


def test_decisions_that_take_no_time_do_not_discount():
    reward = np.array([[0.0], [0.0], [-1.0]], np.float32)
    zeros, ones = np.zeros((3, 1), np.float32), np.ones((3, 1), np.float32)
    discount = np.array([[1.0], [1.0], [0.5]], np.float32)
    advantage = np.zeros((3, 1), np.float32)
    generalised_advantages(reward, zeros, zeros, discount, ones, advantage)
    assert advantage.ravel().tolist() == [-1.0, -1.0, -1.0]


def test_truncation_bootstraps_from_the_last_observation_and_stops_the_trace():
    reward = np.array([[1.0], [100.0]], np.float32)
    value = np.zeros((2, 1), np.float32)
    next_value = np.array([[10.0], [0.0]], np.float32)
    discount = np.full((2, 1), 0.5, np.float32)
    trace = np.array([[0.0], [1.0]], np.float32)
    advantage = np.zeros((2, 1), np.float32)
    generalised_advantages(reward, value, next_value, discount, trace, advantage)
    assert advantage.ravel().tolist() == [6.0, 100.0]


def scalar_ppo(logits, mask, value, action, old_log_prob, old_value, advantage, target):
    """PPO's terms for one decision, with plain floats."""
    weights = [math.exp(x) if legal else 0.0 for x, legal in zip(logits, mask, strict=True)]
    probabilities = [w / sum(weights) for w in weights]
    ratio = probabilities[action] / math.exp(old_log_prob)
    policy = -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    near = old_value + min(max(value - old_value, -0.3), 0.3)
    error = 0.5 * max((value - target) ** 2, (near - target) ** 2)
    entropy = -sum(p * math.log(p) for p in probabilities if p > 0)
    return policy, error, entropy, ratio - 1 - math.log(ratio), abs(ratio - 1) > 0.2


def test_every_term_of_the_ppo_loss_agrees_with_scalars():
    rng = np.random.default_rng(3)
    size = 64
    logits = rng.normal(size=(size, 6)).astype(np.float32)
    mask = (rng.random((size, 6)) < 0.5).astype(np.int8)
    action = rng.integers(0, 6, size)
    mask[np.arange(size), action] = 1
    value, old_value, advantage, target = rng.normal(size=(4, size)).astype(np.float32)
    old_log_prob = rng.uniform(-2.5, -0.1, size).astype(np.float32)
    loss = ppo_loss(
        logits_BA=mask_logits(torch.tensor(logits), torch.tensor(mask)),
        value_B=torch.tensor(value),
        action_B=torch.tensor(action),
        old_log_prob_B=torch.tensor(old_log_prob),
        old_value_B=torch.tensor(old_value),
        advantage_B=torch.tensor(advantage),
        return_B=torch.tensor(target),
        clip=0.2,
        value_clip=0.3,
        value_weight=0.5,
        entropy_weight=0.01,
    )
    rows = zip(logits, mask, value, action, old_log_prob, old_value, advantage, target, strict=True)
    want = np.mean([scalar_ppo(*row) for row in rows], axis=0)
    got = [loss.policy, loss.value, loss.entropy, loss.approximate_kl, loss.clip_fraction]
    np.testing.assert_allclose([term.item() for term in got], want, rtol=1e-4, atol=1e-5)
    assert loss.total.item() == pytest.approx(want[0] + 0.5 * want[1] - 0.01 * want[2], abs=1e-5)


def test_shared_luck_is_the_mean_surprise_of_the_others_over_the_same_tick():
    rng = np.random.default_rng(1)
    num_steps, group_size = 50, 3
    surprise = rng.normal(size=(num_steps, 6)).astype(np.float32)
    elapsed = rng.integers(0, 2, (num_steps, 6))
    first_tick = np.array([4, 0, 9, 100, 103, 101])
    by_tick = []  # of each cluster, the ticks that it saw from their beginning
    for e in range(6):
        ends = np.flatnonzero(elapsed[:, e])
        sums = [surprise[a + 1 : b + 1, e].sum() for a, b in itertools.pairwise(ends)]
        by_tick.append({first_tick[e] + 1 + i: total for i, total in enumerate(sums)})
    luck = np.full((num_steps, 6), np.nan, np.float32)
    scratch = np.zeros((2, 100), np.float32)
    shared_luck(surprise, elapsed, first_tick, group_size, scratch, luck)
    for e in range(6):
        tick = first_tick[e]
        group = [g for g in range(6) if g // group_size == e // group_size and g != e]
        for t in range(num_steps):
            want = 0.0
            if elapsed[t, e]:
                others = [by_tick[g][tick] for g in group if tick in by_tick[g]]
                want = np.mean(others) if others and tick in by_tick[e] else 0.0
                tick += 1
            assert luck[t, e] == pytest.approx(want, abs=1e-5)


def test_the_double_q_target_never_uses_an_illegal_action():
    mask = torch.tensor([[1, 0, 1], [0, 1, 0]])
    online = mask_logits(torch.tensor([[1.0, 9.0, 2.0], [5.0, -3.0, 7.0]]), mask)
    target = mask_logits(torch.tensor([[10.0, 90.0, 20.0], [50.0, -30.0, 70.0]]), mask)
    got = double_q_target(
        reward_B=torch.tensor([1.0, 2.0]),
        discount_B=torch.tensor([0.5, 0.9]),
        online_next_BA=online,
        target_next_BA=target,
    )
    torch.testing.assert_close(got, torch.tensor([1.0 + 0.5 * 20.0, 2.0 + 0.9 * -30.0]))


def test_rows_without_weight_do_not_count_in_the_q_loss():
    q = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    loss = q_loss(
        q_BA=q,
        action_B=torch.tensor([1, 0]),
        target_B=torch.tensor([2.5, 99.0]),
        weight_B=torch.tensor([1.0, 0.0]),
    )
    assert loss.total.item() == pytest.approx(0.5 * 0.5**2)
    assert loss.mean_error.item() == pytest.approx(0.5)
    loss.total.backward()
    assert (q.grad[1] == 0.0).all()
