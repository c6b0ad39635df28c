"""Random decisions mixed into a policy's own, with the exact probability of what was done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cloudsched.policy import Policy


@njit(cache=True, nogil=True, error_model="numpy")
def mix_decisions(
    mask: NDArray[np.int8],
    greedy: NDArray[np.int64],
    epsilon: NDArray[np.float64],
    uniforms: NDArray[np.float64],
    num_pairs: int,
    out_actions: NDArray[np.int64],
    out_probability: NDArray[np.float32],
) -> None:
    """Write each cluster's decision: the policy's own, or with chance epsilon a random one.

    A random decision draws its kind first (placements, toggles, waiting; those with a legal action
    are equally likely), then one legal action of that kind.

    Args:
        mask: (E, A).
        greedy: (E,) the policy's own decisions, legal.
        epsilon: (E,).
        uniforms: (E, 3) numbers in [0, 1): whether, which kind, which action.
        num_pairs: K*N, the number of placements.
        out_actions: (E,) overwritten.
        out_probability: (E,) of the action, exploring or not; overwritten.
    """
    num_envs, num_actions = mask.shape
    start = np.array([0, num_pairs, num_actions - 1])
    end = np.array([num_pairs, num_actions - 1, num_actions])
    num_legal = np.zeros(3, np.int64)
    for e in range(num_envs):
        if epsilon[e] <= 0.0:
            out_actions[e] = greedy[e]
            out_probability[e] = 1.0
            continue
        num_kinds = 0
        for g in range(3):
            num_legal[g] = 0
            for a in range(start[g], end[g]):
                num_legal[g] += mask[e, a] != 0
            num_kinds += num_legal[g] > 0
        action = greedy[e]
        if uniforms[e, 0] < epsilon[e]:
            kind = int(uniforms[e, 1] * num_kinds)
            g = 0
            while num_legal[g] == 0 or kind > 0:
                kind -= num_legal[g] > 0
                g += 1
            left = int(uniforms[e, 2] * num_legal[g])
            for a in range(start[g], end[g]):
                left -= mask[e, a] != 0
                if left < 0:
                    action = a
                    break
        g = 0
        while action >= end[g]:
            g += 1
        probability = epsilon[e] / (num_kinds * num_legal[g])
        if action == greedy[e]:
            probability += 1.0 - epsilon[e]
        out_actions[e] = action
        out_probability[e] = probability


class MixedPolicy:
    """A policy that takes a share of its decisions at random, as it is recorded.

    Args:
        policy: takes the others.
        epsilon: the share.
        seed: of the draws.
    """

    def __init__(self, policy: Policy, epsilon: float, *, seed: int = 0) -> None:
        self._policy = policy
        self._epsilon = epsilon
        self._seed = seed
        self.reset(1)

    def reset(self, num_clusters: int) -> None:
        """Start the draws again."""
        self._policy.reset(num_clusters)
        self._generator = np.random.default_rng(self._seed)
        self._shares = np.full(num_clusters, self._epsilon)
        self._actions = np.zeros(num_clusters, np.int64)
        self._probability = np.zeros(num_clusters, np.float32)

    def act(self, observation: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
        """Return (E,) legal actions; the array is overwritten by the next call."""
        mask = observation["action_mask"]
        num_pairs = observation["jobs"].shape[1] * observation["servers"].shape[1]
        mix_decisions(
            mask,
            self._policy.act(observation),
            self._shares,
            self._generator.random((len(mask), 3)),
            num_pairs,
            self._actions,
            self._probability,
        )
        return self._actions
