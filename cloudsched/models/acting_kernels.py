"""Compiled passes of `flat_acting`: what comes before and after the products of one step."""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array = NDArray[np.float32]


# Loose arrays: numba takes them over from Python in a third of the time that tuples need.
@njit(cache=True, nogil=True, error_model="numpy")
def keep(
    t: int,
    servers: Array,
    jobs: Array,
    context: Array,
    mask: NDArray[np.int8],
    changing: NDArray[np.int64],
    out_servers: Array,
    out_jobs: Array,
    out_context: Array,
    out_mask: NDArray[np.int8],
    out_rows: Array,
) -> None:
    """Copy what E clusters look like into step t of a rollout, and into rows for the products.

    Args:
        servers: (E, N, ...), and so on.
        changing: (C,) places of the features that products read, in a row of all.
        out_servers: (T, E, N, ...) overwritten at t, and so are the next three.
        out_rows: (E, C) overwritten.
    """
    num_servers, num_jobs = servers[0].size, jobs[0].size
    for e in range(len(context)):
        out_servers[t, e] = servers[e]
        out_jobs[t, e] = jobs[e]
        out_context[t, e] = context[e]
        out_mask[t, e] = mask[e]
        of_servers, of_jobs = servers[e].ravel(), jobs[e].ravel()
        for c in range(len(changing)):
            place = changing[c]
            if place < num_servers:
                out_rows[e, c] = of_servers[place]
            elif place < num_servers + num_jobs:
                out_rows[e, c] = of_jobs[place - num_servers]
            else:
                out_rows[e, c] = context[e, place - num_servers - num_jobs]


# Sums may be taken in any order, always the same one: without it they are not vectorised.
@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def choose(
    t: int,
    hidden: Array,
    weight: Array,
    bias: Array,
    mask: NDArray[np.int8],
    uniform: NDArray[np.float64],
    scratch: NDArray[np.float64],
    out_action: NDArray[np.int64],
    out_log_prob: Array,
) -> None:
    """Score the legal actions of step t, and draw one in each cluster.

    Args:
        hidden: (E, W) what goes into the last layer.
        weight: (A, W).
        mask: (T, E, A).
        uniform: (T, E) in [0, 1): the action is the one at which cumulative chances pass it.
        scratch: (A,) overwritten.
        out_action: (T, E) overwritten at t, and so is the next.
    """
    num_actions = len(weight)
    for e in range(len(hidden)):
        row, legal = hidden[e], mask[t, e]
        highest = -np.inf
        for a in range(num_actions):
            if legal[a] != 0:
                towards = weight[a]
                score = bias[a]
                for i in range(len(row)):
                    score += row[i] * towards[i]
                scratch[a] = score
                highest = max(highest, scratch[a])
        total = 0.0
        for a in range(num_actions):
            if legal[a] != 0:
                total += math.exp(scratch[a] - highest)
        left = uniform[t, e] * total
        chosen = num_actions - 1
        for a in range(num_actions):
            if legal[a] != 0:
                chosen = a  # also where rounding leaves a rest at the end
                left -= math.exp(scratch[a] - highest)
                if left < 0.0:
                    break
        out_action[t, e] = chosen
        out_log_prob[t, e] = scratch[chosen] - highest - math.log(total)
