"""Passes over bfloat16 numbers as the bits that they are: numba does not know the type."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cloudsched.models.constrained_kernels import Array, Bits, pack, unpack
from cloudsched.models.heads import NUM_HEADS, REWARD


# Sums may be taken in any order, always the same one: without it they are not vectorised.
@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def dot(left: Array, right: Array) -> np.float32:
    """Return the product of two rows."""
    total = np.float32(0.0)
    for i in range(len(left)):
        total += left[i] * right[i]
    return total


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def score_values(body: Bits, weight: Array, bias: Array, out_values: Array) -> None:
    """Write the outputs of a last layer that is not rounded.

    Args:
        body: (B, W).
        weight: (V, W).
        out_values: (B, V) overwritten.
    """
    row = np.empty(body.shape[1], np.float32)
    for b in range(len(body)):
        unpack(body[b], row)
        for k in range(len(weight)):
            out_values[b, k] = dot(row, weight[k]) + bias[k]


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def score_taken(
    body: Bits,
    value_weight: Array,
    value_bias: Array,
    weight: Array,
    bias: Array,
    action: NDArray[np.int64],
    advantage: float,
    scale: Array,
    out_values: Array,
) -> None:
    """Write the values of one action of each row, in reward and cost.

    Args:
        body: (B, W).
        value_weight: (2, W).
        weight: (4 * A, W) of all heads.
        advantage: what one of an action's advantages stands for, in values of a row.
        scale: (2,) what one of these stands for.
        out_values: (B, 2) overwritten.
    """
    row = np.empty(body.shape[1], np.float32)
    num_actions = len(weight) // NUM_HEADS
    for b in range(len(body)):
        unpack(body[b], row)
        for k in range(2):
            place = (REWARD + k) * num_actions + action[b]
            gain = np.float32(advantage) * (dot(row, weight[place]) + bias[place])
            out_values[b, k] = scale[k] * (dot(row, value_weight[k]) + value_bias[k] + gain)


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def rectify_gradient(hidden: Bits, by_hidden: Bits, out_bias: Array) -> None:
    """Drop the gradient where a rectifier gave nothing, and sum the rest over the rows.

    Args:
        hidden: (R, W) what it gave.
        by_hidden: (R, W) changed.
        out_bias: (W,) overwritten.
    """
    row = np.empty(hidden.shape[1], np.float32)
    out_bias[:] = 0.0
    for b in range(len(hidden)):
        given, gradient = hidden[b], by_hidden[b]
        for i in range(len(given)):
            gradient[i] = gradient[i] if given[i] != 0 else np.uint16(0)
        unpack(gradient, row)
        for i in range(len(row)):
            out_bias[i] += row[i]


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def pass_back(
    by_reward: Array,
    action: NDArray[np.int64],
    weight: Array,
    body: Bits,
    by_body: Bits,
    out_weight: Array,
    out_bias: Array,
) -> None:
    """Add what rewards have to say of the actions taken, and do as `rectify_gradient`.

    Args:
        by_reward: (B,) the gradient by the reward of the action taken; B rows are the first.
        weight: (A, W).
        body: (R, W) what the rectifier gave.
        by_body: (R, W) changed.
        out_weight: (A, W) overwritten.
        out_bias: (W,) overwritten.
    """
    num_logged, width = len(action), body.shape[1]
    row, gradient = np.empty(width, np.float32), np.empty(width, np.float32)
    out_weight[:] = 0.0
    out_bias[:] = 0.0
    for b in range(len(body)):
        given = body[b]
        unpack(by_body[b], gradient)
        if b < num_logged:
            up = by_reward[b]
            towards, out_towards = weight[action[b]], out_weight[action[b]]
            unpack(given, row)
            for i in range(width):
                gradient[i] += up * towards[i]
            for i in range(width):
                out_towards[i] += up * row[i]
        for i in range(width):
            gradient[i] = gradient[i] if given[i] != 0 else np.float32(0.0)
        for i in range(width):
            out_bias[i] += gradient[i]
        pack(gradient, by_body[b])
