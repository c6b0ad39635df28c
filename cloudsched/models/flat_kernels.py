"""Compiled passes of `flat_gradient`: last layers with the loss, and the sum over shares."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cloudsched.models.surrogate import policy_gradient, value_gradient

Array = NDArray[np.float32]


class LastLayer(NamedTuple):
    """Weights of a last layer, or their gradients."""

    weight: Array  # (A, W); of a critic (1, W)
    bias: Array  # (A,)


class Scratch(NamedTuple):
    """Room for what is computed on the way; (A,) each."""

    legal: NDArray[np.int64]
    scores: Array
    ups: Array


# Sums may be taken in any order, always the same one: without it they are not vectorised.
@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def actor_gradients(
    mask: NDArray[np.int8],
    action: NDArray[np.int64],
    old_log_prob: Array,
    advantage: Array,
    chosen: NDArray[np.int64],
    hidden: Array,
    layer: LastLayer,
    clip: float,
    entropy_weight: float,
    share: float,
    scratch: Scratch,
    out_hidden: Array,
    out_layer: LastLayer,
    out_terms: NDArray[np.float64],
) -> None:
    """Write the gradient of the actor's last layer and of the rectifier before it, and the terms.

    Args:
        mask: (B, A), of which some rows are chosen, as of the columns that follow.
        chosen: (M,) these.
        hidden: (M, W) what the rectifier gave.
        share: what a row counts: one over the number of rows in the minibatch.
        out_hidden: (M, W) overwritten, and so are all that follow.
    """
    num_actions, width = layer.weight.shape
    legal, scores, ups = scratch
    out_layer.weight[:] = 0.0
    out_layer.bias[:] = 0.0
    out_terms[:] = 0.0
    for m in range(chosen.shape[0]):
        b = chosen[m]
        row, out_row = hidden[m], out_hidden[m]
        num_legal = 0
        for a in range(num_actions):
            if mask[b, a] != 0:
                legal[num_legal] = a
                num_legal += 1
                towards = layer.weight[a]
                score = layer.bias[a]
                for i in range(width):
                    score += row[i] * towards[i]
                scores[a] = score
        policy_gradient(
            scores,
            legal[:num_legal],
            action[b],
            old_log_prob[b],
            advantage[b],
            clip,
            entropy_weight,
            share,
            ups,
            out_terms,
        )
        out_row[:] = 0.0
        for j in range(num_legal):
            a = legal[j]
            up = ups[a]
            out_layer.bias[a] += up
            towards, out_towards = layer.weight[a], out_layer.weight[a]
            for i in range(width):
                out_row[i] += up * towards[i]
                out_towards[i] += up * row[i]
        for i in range(width):
            out_row[i] = out_row[i] if row[i] > 0.0 else np.float32(0.0)


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def critic_gradients(
    old_value: Array,
    target: Array,
    chosen: NDArray[np.int64],
    hidden: Array,
    layer: LastLayer,
    value_clip: float,
    value_weight: float,
    share: float,
    out_hidden: Array,
    out_layer: LastLayer,
    out_terms: NDArray[np.float64],
) -> None:
    """Write the gradient of the critic's last layer and of the rectifier before it, and the terms.

    Args:
        old_value: (B,), of which some rows are chosen, as of `target`.
        chosen: (M,) these.
        hidden: (M, W) what the rectifier gave.
        share: what a row counts: one over the number of rows in the minibatch.
        out_hidden: (M, W) overwritten, and so are all that follow.
    """
    width = layer.weight.shape[1]
    towards, out_towards = layer.weight[0], out_layer.weight[0]
    out_layer.weight[:] = 0.0
    out_layer.bias[:] = 0.0
    out_terms[:] = 0.0
    for m in range(chosen.shape[0]):
        b = chosen[m]
        row, out_row = hidden[m], out_hidden[m]
        value = layer.bias[0]
        for i in range(width):
            value += row[i] * towards[i]
        up = np.float32(
            value_gradient(
                value, old_value[b], target[b], value_clip, value_weight, share, out_terms
            )
        )
        out_layer.bias[0] += up
        for i in range(width):
            out_row[i] = up * towards[i] if row[i] > 0.0 else np.float32(0.0)
            out_towards[i] += up * row[i]


@njit(cache=True, nogil=True, error_model="numpy")
def combine(
    parts: Array,
    changing: NDArray[np.int64],
    fixed_at: NDArray[np.int64],
    fixed: Array,
    num_outputs: int,
    out_whole: Array,
) -> None:
    """Add up the gradients of shares, and put those of fixed features between the others.

    Args:
        parts: (P, S) weights of O outputs by C changing features, their O biases, and the rest.
        changing: (C,) places of the features.
        fixed_at: (X,) places of those that are the same in all rows.
        fixed: (X,) these.
        out_whole: overwritten; as a part, with weights by all features.
    """
    num_changing = changing.shape[0]
    num_features = num_changing + fixed_at.shape[0]
    num_first, num_full = num_outputs * num_changing, num_outputs * num_features
    out_rest = out_whole[num_full:]
    out_rest[:] = parts[0, num_first:]
    for p in range(1, parts.shape[0]):
        rest = parts[p, num_first:]
        for i in range(rest.shape[0]):
            out_rest[i] += rest[i]
    for o in range(num_outputs):
        out_row = out_whole[o * num_features : (o + 1) * num_features]
        for c in range(num_changing):
            total = np.float32(0.0)
            for p in range(parts.shape[0]):
                total += parts[p, o * num_changing + c]
            out_row[changing[c]] = total
        for x in range(fixed_at.shape[0]):
            out_row[fixed_at[x]] = out_rest[o] * fixed[x]
