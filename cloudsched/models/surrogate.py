"""PPO's loss and its gradient in one pass over the legal actions, and drawing from masked logits.

Autograd takes a dozen passes over all (B, A) logits for what concerns the few legal actions of a
row. On the CPU these kernels take the place of `ppo_loss` and its backward pass, and of `sample`
and `log_prob`; anywhere else those are called. `tests/models/test_surrogate.py` holds the two
together.
"""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from cloudsched.models.losses import PPOLoss, ppo_loss
from cloudsched.models.masking import log_prob, log_probs, sample

FloatArray = NDArray[np.float32]

LOWEST = float(np.finfo(np.float32).min)
NUM_TERMS = 6


def backward_ppo(
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
    share: float = 1.0,
) -> PPOLoss:
    """Add the gradient of `ppo_loss` to that of the weights, and return its terms.

    Args:
        logits_BA: masked.
        value_clip: how far the value may move from `old_value_B`; None for any distance.
        share: of the minibatch that these rows are; gradient and terms are multiplied by it.
    """
    if logits_BA.device.type != "cpu" or logits_BA.dtype != torch.float32:
        loss = ppo_loss(
            logits_BA=logits_BA,
            value_B=value_B,
            action_B=action_B,
            old_log_prob_B=old_log_prob_B,
            old_value_B=old_value_B,
            advantage_B=advantage_B,
            return_B=return_B,
            clip=clip,
            value_clip=value_clip,
            value_weight=value_weight,
            entropy_weight=entropy_weight,
        )
        (share * loss.total).backward()  # type: ignore[no-untyped-call]
        return PPOLoss(**{f.name: share * getattr(loss, f.name) for f in fields(PPOLoss)})
    logits_gradient_BA = torch.empty(logits_BA.shape)
    value_gradient_B = torch.empty(value_B.shape)
    terms = np.zeros(NUM_TERMS)
    ppo_gradient(
        logits_BA.detach().contiguous().numpy(),
        value_B.detach().contiguous().numpy(),
        action_B.numpy(),
        old_log_prob_B.numpy(),
        old_value_B.numpy(),
        advantage_B.numpy(),
        return_B.numpy(),
        clip,
        math.inf if value_clip is None else value_clip,
        value_weight,
        entropy_weight,
        share / len(logits_BA),
        np.empty(logits_BA.shape[1], np.int64),
        logits_gradient_BA.numpy(),
        value_gradient_B.numpy(),
        terms,
    )
    torch.autograd.backward([logits_BA, value_B], [logits_gradient_BA, value_gradient_B])
    names = (field.name for field in fields(PPOLoss))
    return PPOLoss(**dict(zip(names, torch.from_numpy(terms).float().unbind(), strict=True)))


def draw(logits_EA: Tensor) -> tuple[Tensor, Tensor]:
    """Draw (E,) actions from masked logits; return them with their log-probabilities."""
    if logits_EA.device.type != "cpu" or logits_EA.dtype != torch.float32:
        action_E = sample(logits_EA)
        return action_E, log_prob(log_probs(logits_EA), action_E)
    action_E = torch.empty(len(logits_EA), dtype=torch.int64)
    log_prob_E = torch.empty(len(logits_EA))
    # In double precision, so that unlikely actions are drawn as often as they should be.
    uniform_E = torch.rand(len(logits_EA), dtype=torch.float64)
    invert(logits_EA.contiguous().numpy(), uniform_E.numpy(), action_E.numpy(), log_prob_E.numpy())
    return action_E, log_prob_E


@njit(cache=True, nogil=True, error_model="numpy")
def ppo_gradient(
    logits: FloatArray,
    value: FloatArray,
    action: NDArray[np.int64],
    old_log_prob: FloatArray,
    old_value: FloatArray,
    advantage: FloatArray,
    target: FloatArray,
    clip: float,
    value_clip: float,
    value_weight: float,
    entropy_weight: float,
    share: float,
    scratch: NDArray[np.int64],
    out_logits: FloatArray,
    out_value: FloatArray,
    out_terms: NDArray[np.float64],
) -> None:
    """Write the gradients of `ppo_loss` by logits and values, and the terms of the loss.

    Args:
        logits: (B, A) masked.
        share: what a row counts: one over the number of rows in the minibatch.
        scratch: (A,) overwritten.
        out_logits: (B, A) overwritten.
        out_value: (B,) overwritten.
        out_terms: (6,) overwritten, in the order of `PPOLoss`.
    """
    num_rows, num_actions = logits.shape
    out_terms[:] = 0.0
    for b in range(num_rows):
        num_legal = 0
        for a in range(num_actions):
            out_logits[b, a] = 0.0
            # Not `>`, so that a NaN is not taken for an illegal action.
            if not logits[b, a] <= LOWEST:
                scratch[num_legal] = a
                num_legal += 1
        policy_gradient(
            logits[b],
            scratch[:num_legal],
            action[b],
            old_log_prob[b],
            advantage[b],
            clip,
            entropy_weight,
            share,
            out_logits[b],
            out_terms,
        )
        out_value[b] = value_gradient(
            value[b], old_value[b], target[b], value_clip, value_weight, share, out_terms
        )
    out_terms[0] = out_terms[1] + value_weight * out_terms[2] - entropy_weight * out_terms[3]


@njit(cache=True, nogil=True, error_model="numpy")
def policy_gradient(
    logits: FloatArray,
    legal: NDArray[np.int64],
    chosen: int,
    old_log_prob: float,
    advantage: float,
    clip: float,
    entropy_weight: float,
    share: float,
    out_logits: FloatArray,
    out_terms: NDArray[np.float64],
) -> None:
    """Write the gradient by the logits of one decision, and add to the terms of the loss.

    Args:
        logits: (A,).
        legal: the actions that count; one at least.
        out_logits: (A,) overwritten at these.
        out_terms: (6,) added to, but for the first.
    """
    highest = np.float32(LOWEST)
    for a in legal:
        highest = max(highest, logits[a])
    total = np.float32(0.0)
    mean_excess = np.float32(0.0)
    for a in legal:
        excess = logits[a] - highest
        weight = np.float32(math.exp(excess))
        out_logits[a] = weight
        total += weight
        mean_excess += weight * excess
    mean_excess /= total
    log_total = np.float32(math.log(total))

    log_ratio = logits[chosen] - highest - log_total - old_log_prob
    ratio = float(np.float32(math.exp(log_ratio)))
    bounded = min(ratio, 1.0 + clip) if advantage > 0.0 else max(ratio, 1.0 - clip)
    slope = 0.0 if bounded != ratio else -ratio * advantage * share
    for a in legal:
        chance = out_logits[a] / total
        surprise = logits[a] - highest - mean_excess
        out_logits[a] = chance * (entropy_weight * share * surprise - slope)
    out_logits[chosen] += slope
    out_terms[1] -= bounded * advantage * share
    out_terms[3] += (log_total - mean_excess) * share
    out_terms[4] += (ratio - 1.0 - log_ratio) * share
    out_terms[5] += share if abs(ratio - 1.0) > clip else 0.0


@njit(cache=True, nogil=True, error_model="numpy")
def value_gradient(
    value: float,
    old_value: float,
    target: float,
    value_clip: float,
    value_weight: float,
    share: float,
    out_terms: NDArray[np.float64],
) -> float:
    """Return the gradient by one value, and add to the terms of the loss."""
    error = value - target
    move = value - old_value
    near_error = old_value + min(max(move, -value_clip), value_clip) - target
    if near_error * near_error > error * error:
        out_terms[2] += 0.5 * near_error * near_error * share
        return 0.0 if abs(move) > value_clip else value_weight * share * near_error
    out_terms[2] += 0.5 * error * error * share
    return value_weight * share * error


@njit(cache=True, nogil=True, error_model="numpy")
def invert(
    logits: FloatArray,
    uniform: NDArray[np.float64],
    out_action: NDArray[np.int64],
    out_log_prob: FloatArray,
) -> None:
    """Write the actions at which the cumulative probabilities pass given numbers in [0, 1).

    Args:
        logits: (E, A) masked.
        uniform: (E,).
        out_action: (E,) overwritten.
        out_log_prob: (E,) overwritten.
    """
    num_envs, num_actions = logits.shape
    for e in range(num_envs):
        highest = np.float32(LOWEST)
        for a in range(num_actions):
            highest = max(highest, logits[e, a])
        total = 0.0
        for a in range(num_actions):
            if logits[e, a] > LOWEST:
                total += math.exp(logits[e, a] - highest)
        left = uniform[e] * total
        chosen = num_actions - 1
        for a in range(num_actions):
            if logits[e, a] > LOWEST:
                chosen = a  # also where rounding leaves a rest at the end
                left -= math.exp(logits[e, a] - highest)
                if left < 0.0:
                    break
        out_action[e] = chosen
        out_log_prob[e] = logits[e, chosen] - highest - math.log(total)
