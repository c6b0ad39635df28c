"""The maths of policy gradients: advantages of decisions that may take no time, PPO's loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from cloudsched.models.masking import entropy, log_prob, log_probs

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class PPOLoss:
    """PPO's loss and its terms; all are scalars."""

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    approximate_kl: Tensor
    """Schulman's low-variance estimate of KL(old || new)."""
    clip_fraction: Tensor
    """Share of decisions whose ratio was clipped."""


def ppo_loss(
    *,
    logits_BA: Tensor,
    value_B: Tensor,
    action_B: Tensor,
    old_log_prob_B: Tensor,
    old_value_B: Tensor,
    advantage_B: Tensor,
    return_B: Tensor,
    clip: float,
    value_clip: float | None,
    value_weight: float,
    entropy_weight: float,
) -> PPOLoss:
    """Return the clipped surrogate, with a clipped value loss and an entropy bonus.

    Args:
        logits_BA: masked.
        value_clip: how far the value may move from `old_value_B`; None for any distance.
    """
    log_probs_BA = log_probs(logits_BA)
    log_ratio_B = log_prob(log_probs_BA, action_B) - old_log_prob_B
    ratio_B = log_ratio_B.exp()
    clipped_B = ratio_B.clamp(1.0 - clip, 1.0 + clip)
    policy = -torch.minimum(ratio_B * advantage_B, clipped_B * advantage_B).mean()

    error_B = (value_B - return_B).square()
    if value_clip is not None:
        near_B = old_value_B + (value_B - old_value_B).clamp(-value_clip, value_clip)
        error_B = torch.maximum(error_B, (near_B - return_B).square())
    value = 0.5 * error_B.mean()

    mean_entropy = entropy(log_probs_BA).mean()
    with torch.no_grad():
        approximate_kl = (ratio_B - 1.0 - log_ratio_B).mean()
        clip_fraction = ((ratio_B - 1.0).abs() > clip).float().mean()
    return PPOLoss(
        total=policy + value_weight * value - entropy_weight * mean_entropy,
        policy=policy,
        value=value,
        entropy=mean_entropy,
        approximate_kl=approximate_kl,
        clip_fraction=clip_fraction,
    )


@dataclass(frozen=True, kw_only=True)
class QLoss:
    """The loss of double Q-learning and what it was made from; all are scalars."""

    total: Tensor
    mean_q: Tensor
    mean_target: Tensor
    mean_error: Tensor
    """Mean absolute TD error."""


def double_q_target(
    *, reward_B: Tensor, discount_B: Tensor, online_next_BA: Tensor, target_next_BA: Tensor
) -> Tensor:
    """Return the double-Q target; next values are masked, so that only legal actions are chosen.

    Args:
        discount_B: zero where the episode terminated.
    """
    best_B1 = online_next_BA.argmax(dim=-1, keepdim=True)
    return reward_B + discount_B * target_next_BA.gather(-1, best_B1).squeeze(-1)


def q_loss(*, q_BA: Tensor, action_B: Tensor, target_B: Tensor, weight_B: Tensor) -> QLoss:
    """Return the Huber loss of the actions taken, a mean over rows with weight."""
    q_B = q_BA.gather(-1, action_B.unsqueeze(-1)).squeeze(-1)
    loss_B = torch.nn.functional.smooth_l1_loss(q_B, target_B, reduction="none")
    count = weight_B.sum().clamp(min=1.0)
    return QLoss(
        total=(weight_B * loss_B).sum() / count,
        mean_q=(weight_B * q_B).sum().detach() / count,
        mean_target=(weight_B * target_B).sum() / count,
        mean_error=(weight_B * (q_B - target_B).abs()).sum().detach() / count,
    )


@njit(cache=True, nogil=True, error_model="numpy")
def generalised_advantages(
    reward: FloatArray,
    value: FloatArray,
    next_value: FloatArray,
    discount: FloatArray,
    trace: FloatArray,
    out_advantage: FloatArray,
) -> None:
    """Write the GAE of every decision of a rollout; all arrays are (T, E).

    Args:
        next_value: of the observation that the decision led to; at the end of a truncated episode
            that is its last observation, not the first of the next episode.
        discount: `gamma ** elapsed_ticks`, zero where an episode terminated.
        trace: lambda, zero where the next row belongs to another episode.
        out_advantage: overwritten.
    """
    num_steps, num_envs = reward.shape
    for e in range(num_envs):
        advantage = np.float32(0.0)
        for t in range(num_steps - 1, -1, -1):
            surprise = reward[t, e] + discount[t, e] * next_value[t, e] - value[t, e]
            advantage = surprise + discount[t, e] * trace[t, e] * advantage
            out_advantage[t, e] = advantage


@njit(cache=True, nogil=True, error_model="numpy")
def shared_luck(
    surprise: FloatArray,
    elapsed: NDArray[np.int64],
    first_tick: NDArray[np.int64],
    group_size: int,
    scratch: FloatArray,
    out_luck: FloatArray,
) -> None:
    """Write what each tick brought to the other clusters that see the same arrivals.

    The surprises (TD errors) of a tick's decisions hold the luck of the arrivals that follow. Their
    sum, averaged over the other clusters of the group, does not depend on the cluster's own
    decisions, so it may be subtracted from the reward: less noise, no bias.

    Args:
        surprise: (T, E).
        elapsed: (T, E) ticks that each decision took, 0 or 1.
        first_tick: (E,) ticks since the first episode began, before the first row.
        group_size: clusters e with the same `e // group_size` see the same arrivals.
        scratch: (2, W) overwritten; ticks more than W after the group's slowest get no luck.
        out_luck: (T, E) overwritten; not zero where a tick ended that others lived through too.
    """
    num_steps, num_envs = surprise.shape
    num_ticks = scratch.shape[1]
    for first in range(0, num_envs, group_size):
        last = min(first + group_size, num_envs)
        start = first_tick[first]
        for e in range(first, last):
            start = min(start, first_tick[e])
        scratch[:] = 0.0
        for e in range(first, last):
            tick = first_tick[e] - start
            is_whole = False  # the rows may begin in the middle of a tick
            total = np.float32(0.0)
            for t in range(num_steps):
                out_luck[t, e] = 0.0
                total += surprise[t, e]
                if elapsed[t, e] > 0:
                    if is_whole and tick < num_ticks:
                        scratch[0, tick] += total
                        scratch[1, tick] += 1.0
                        out_luck[t, e] = total  # for now: its own part, to be taken out again
                    tick += 1
                    is_whole = True
                    total = np.float32(0.0)
        for e in range(first, last):
            tick = first_tick[e] - start
            is_whole = False
            for t in range(num_steps):
                if elapsed[t, e] > 0:
                    if is_whole and tick < num_ticks:
                        others = scratch[1, tick] - 1.0
                        own = out_luck[t, e]
                        out_luck[t, e] = (scratch[0, tick] - own) / others if others > 0 else 0.0
                    tick += 1
                    is_whole = True
