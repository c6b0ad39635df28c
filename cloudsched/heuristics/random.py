"""The policy that knows nothing: uniformly random legal actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

BLOCK = 256  # draws of a cluster that are made at once
STRIDE = 16  # actions that are skipped at once; sums of so many int8 are one instruction


class RandomPolicy:
    """Draws each action uniformly from the legal ones.

    The draws of cluster e depend on the seed and on e alone, not on how many clusters there are.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self.reset(1)

    def reset(self, num_clusters: int) -> None:
        """Start the streams of draws again."""
        self._generators = [np.random.default_rng((self._seed, e)) for e in range(num_clusters)]
        self._uniforms = np.empty((num_clusters, BLOCK))
        self._next = BLOCK
        self._actions = np.zeros(num_clusters, np.int64)

    def act(self, observation: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
        """Return (E,) legal actions; the array is overwritten by the next call."""
        mask = observation["action_mask"]
        if len(mask) != len(self._actions):
            self.reset(len(mask))
        if self._next == BLOCK:
            for generator, row in zip(self._generators, self._uniforms, strict=True):
                generator.random(out=row)
            self._next = 0
        sample_legal(mask, self._uniforms, self._next, self._actions)
        self._next += 1
        return self._actions


@njit(cache=True, nogil=True, error_model="numpy")
def sample_legal(
    mask: NDArray[np.int8],
    uniforms: NDArray[np.float64],
    column: int,
    out_actions: NDArray[np.int64],
) -> None:
    """Write one legal action for each cluster, all of them equally likely.

    Args:
        mask: (E, A) with at least one legal action in each row.
        uniforms: (E, BLOCK) numbers in [0, 1), of which `column` is used.
        out_actions: (E,) overwritten.
    """
    num_envs, num_actions = mask.shape
    for e in range(num_envs):
        num_legal = 0
        for a in range(num_actions):
            num_legal += mask[e, a]
        left = int(uniforms[e, column] * num_legal)  # legal actions before the chosen one
        start = 0
        while start + STRIDE <= num_actions:
            skipped = 0
            for a in range(start, start + STRIDE):
                skipped += mask[e, a]
            if skipped > left:
                break
            left -= skipped
            start += STRIDE
        for a in range(start, num_actions):
            left -= mask[e, a]
            if left < 0:
                out_actions[e] = a
                break
