"""How much gains spread by chance, at each kind of site.

At a site with bursts chance moves gains ten times as far as at a calm one. A network that learned
gains as they are would hear little but those bursts, and a policy that asked for the same gain
everywhere would follow chance at one site and miss what is there at another. In units of their
spread gains count alike. The spread depends on what is seen before the decision alone, so dividing
by it favours no decision.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

FloatArray = NDArray[np.float64]

MOST_STATES = 100_000  # to learn from; the spread has far fewer numbers
DECAY = 1e-4  # of the weights
LEAST, MOST = np.log(0.02), np.log(1000.0)  # of the square, in logarithms
LARGEST_SQUARE = 3600.0  # of a gain; what is beyond is luck
ITERATIONS = 300


def learn_spread(terms: Sequence[FloatArray], gains: Sequence[NDArray[np.float32]]) -> FloatArray:
    """Return (terms,) weights so that `spread_of` tells the root of the mean square of gains.

    Args:
        terms: (S, terms) of each batch: what the site is recognised by.
        gains: (S, A) of each batch.
    """
    terms_SF = np.concatenate(terms)
    square_S = np.concatenate([np.square(batch).mean(axis=1) for batch in gains])
    square_S = np.minimum(square_S, LARGEST_SQUARE).astype(np.float64) + np.exp(LEAST)
    every = -(-len(square_S) // MOST_STATES)
    terms_SF, square_S = terms_SF[::every], square_S[::every]

    def loss(weights: FloatArray) -> tuple[float, FloatArray]:
        """Of a normal distribution whose variance is an exponential of the terms."""
        log_S = np.clip(terms_SF @ weights, LEAST, MOST)
        ratio_S = square_S * np.exp(-log_S)
        slope_F = ((1.0 - ratio_S)[:, None] * terms_SF).mean(axis=0)
        total = float((ratio_S + log_S).mean() + DECAY * np.square(weights).sum())
        return total, slope_F + 2.0 * DECAY * weights

    start = np.zeros(terms_SF.shape[1])
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": ITERATIONS})
    return np.asarray(found.x, np.float64)


def spread_of(terms_SF: FloatArray, weights_F: FloatArray) -> NDArray[np.float32]:
    """Return (S,) the spread of gains."""
    return np.exp(0.5 * np.clip(terms_SF @ weights_F, LEAST, MOST)).astype(np.float32)
