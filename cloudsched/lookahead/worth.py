"""What an outlook is worth: how much is paid later where a state differs from another.

Two branches differ by the outlook x at one time and by y some ticks later, and one was paid g more
in between. If an outlook is worth w, then w x = g + w y on average; the weights that make it so on
many branches are found by least squares with x as instruments (LSTD). They depend on the site:
each number counts once by itself and once with each signal of the site. Branches count the less the
more chance moves them, or those of a few sites with bursts would decide for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cloudsched.envs.observation import columns
from cloudsched.heuristics.adaptive import terms_of
from cloudsched.lookahead.branches import Branches
from cloudsched.lookahead.outlook import NAMES
from cloudsched.lookahead.spread import learn_spread, spread_of

FloatArray = NDArray[np.float64]

SITE_SIGNALS = 4  # load, unevenness, size of jobs, wake delay: what stays the same for a while
NUM_FEATURES = len(NAMES) * (1 + SITE_SIGNALS)
RIDGE = 300.0
"""So many branches' worth of belief in the price of work alone: where chance is great, fewer would
take chance for what an outlook is worth."""


def site_terms(context_SF: NDArray[np.float32], num_servers: int, num_resources: int) -> FloatArray:
    """Return (S, terms) what tells the site: one, the signals, and their products."""
    return terms_of(context_SF, columns(num_resources), num_servers)


def outlook_features(outlook: NDArray[np.float32], signals: FloatArray) -> FloatArray:
    """Return (S, A, NUM_FEATURES) the products of both.

    Args:
        outlook: (S, A, F).
        signals: (S, terms) of the site; the first 1 + SITE_SIGNALS count.
    """
    product = outlook[:, :, :, None] * signals[:, None, None, : 1 + SITE_SIGNALS]
    return np.asarray(product.reshape(*outlook.shape[:2], -1), np.float64)


class OutlookWorth:
    """The weights, improved by every round of branches.

    They begin with what is known: work that is left over takes power later. Weights that began at
    zero would be pulled there, and a policy that believes them leaves work undone.

    Args:
        work_price: what a CPU in use for a tick costs.
    """

    def __init__(self, work_price: float) -> None:
        begin = np.zeros((len(NAMES), 1 + SITE_SIGNALS))
        begin[[i for i, name in enumerate(NAMES) if "work" in name], 0] = -work_price
        self.weights = self._begin = begin.ravel()

    def learn(self, batches: Sequence[Branches], signals: Sequence[FloatArray]) -> None:
        """Fit the weights to batches that were read at two times."""
        if not batches:
            return
        far = [_estimate(*pair, 1, self._begin) for pair in zip(batches, signals, strict=True)]
        noise = learn_spread(signals, far)
        matrix, target = np.zeros((NUM_FEATURES, NUM_FEATURES)), np.zeros(NUM_FEATURES)
        square = np.zeros(NUM_FEATURES)
        for batch, signal in zip(batches, signals, strict=True):
            spread = spread_of(signal, noise)[:, None, None]
            near, far_off = (
                (outlook_features(batch.outlook[:, :, time], signal) / spread).reshape(
                    -1, NUM_FEATURES
                )
                for time in (0, 1)
            )
            paid = ((batch.gain[:, :, 1] - batch.gain[:, :, 0]) / spread[:, :, 0]).ravel()
            matrix += near.T @ (near - far_off)
            target += near.T @ paid
            square += np.square(near).sum(axis=0)
        count = sum(batch.others.size for batch in batches)
        # A unit of each feature is its spread, so that the ridge treats all alike.
        unit = np.sqrt(square / count) + 1e-6
        matrix = matrix / np.outer(unit, unit) + RIDGE * np.eye(NUM_FEATURES)
        pulled = target / unit + RIDGE * self._begin * unit
        self.weights = np.asarray(np.linalg.solve(matrix, pulled) / unit, np.float64)

    def __call__(self, batch: Branches, signals: FloatArray) -> NDArray[np.float32]:
        """Return (S, A) how much better each other decision is than the policy's own."""
        return _estimate(batch, signals, 0, self.weights)


def _estimate(
    batch: Branches, signals: FloatArray, time: int, weights: FloatArray
) -> NDArray[np.float32]:
    features = outlook_features(batch.outlook[:, :, time], signals)
    return (batch.gain[:, :, time] + features @ weights).astype(np.float32)
