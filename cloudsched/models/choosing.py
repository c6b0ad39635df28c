"""The choice among scored actions, compiled: the twin of `likeliest_kind` and `most_likely`."""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cloudsched.models.set_kernels import LOWEST, Array


@njit(cache=True, nogil=True, error_model="numpy")
def choose(
    logits: Array,
    num_pairs: int,
    by_kind: bool,
    legal: NDArray[np.int64],
    out_actions: NDArray[np.int64],
    out_chances: Array,
) -> None:
    """Choose as `likeliest_kind` and `most_likely` do, and write the probabilities.

    Args:
        num_pairs: K*N, the number of placements.
        by_kind: whether the kind of action is chosen first.
        legal: (A,) room for the legal actions, which are few.
        out_actions: (E,) overwritten.
        out_chances: (E, A) overwritten with the softmax of the logits.
    """
    num_actions = logits.shape[1]
    ends = (num_pairs, num_actions - 1, num_actions)
    for e in range(logits.shape[0]):
        num_legal = 0
        best = 0
        highest = np.float32(LOWEST)
        for a in range(num_actions):
            # The lowest float stands for an illegal action; its exponential is exactly zero.
            if logits[e, a] > LOWEST:
                legal[num_legal] = a
                num_legal += 1
                if logits[e, a] > highest:
                    highest = logits[e, a]
                    best = a
        total = 0.0
        likeliest = -1.0
        start = 0
        i = 0
        out_chances[e, :] = 0.0
        for kind in range(3):
            kind_total = 0.0
            kind_best = num_actions - 1
            while i < num_legal and legal[i] < ends[kind]:
                a = legal[i]
                chance = math.exp(logits[e, a] - highest)
                if kind_total == 0.0 or logits[e, a] > logits[e, kind_best]:
                    kind_best = a
                out_chances[e, a] = chance
                kind_total += chance
                i += 1
            total += kind_total
            if kind_total > likeliest:
                likeliest = kind_total
                start = kind_best
        for i in range(num_legal):
            out_chances[e, legal[i]] /= total
        if num_legal == 0:
            out_chances[e, :] = np.nan  # so scores that are no numbers do not pass for any
        out_actions[e] = start if by_kind else best
