"""Means over seeds with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
NUM_RESAMPLES = 10_000
BOOTSTRAP_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds and its 95 % bootstrap interval (percentiles of resampled means).

    Of a single seed there is no interval: both ends are then the mean.
    """

    mean: float
    ci_low: float
    ci_high: float


def summarise(values: Mapping[str, NDArray[np.float64]]) -> dict[str, Estimate]:
    """Estimate the mean of each named array (S,), all with the same resamples of the S seeds."""
    if not values:
        return {}
    table_MS = np.stack(list(values.values()))
    mean_M = table_MS.mean(axis=1)
    # Not `@`: BLAS may sum in an order that depends on the machine's load, and so in other bits.
    num_seeds = table_MS.shape[1]
    resampled_MB = np.einsum("ms,bs->mb", table_MS, _resamples(num_seeds)) / num_seeds
    return _estimates(list(values), mean_M, resampled_MB)


def summarise_grid(values: Mapping[str, NDArray[np.float64]]) -> dict[str, Estimate]:
    """Estimate the mean of each named array (T, S) over T training seeds and S test seeds.

    Every training seed met the same test seeds, so both are drawn with replacement and
    independently of each other: a resample is a grid of the drawn rows and columns (a crossed
    bootstrap of two levels). With one training seed it is `summarise` of its row. With a handful,
    percentiles of so few rows are too narrow; read them as the spread that was seen.
    """
    if not values:
        return {}
    table_MTS = np.stack(list(values.values()))
    num_trained, num_seeds = table_MTS.shape[1:]
    mean_M = table_MTS.mean(axis=(1, 2))
    rows_BT = _resamples(num_trained, BOOTSTRAP_SEED + 1) / num_trained
    columns_BS = _resamples(num_seeds) / num_seeds
    resampled_MB = np.stack(
        [
            np.einsum("bs,bs->b", np.einsum("ts,bt->bs", table_TS, rows_BT), columns_BS)
            for table_TS in table_MTS
        ]
    )
    return _estimates(list(values), mean_M, resampled_MB)


def _estimates(
    names: list[str], mean_M: NDArray[np.float64], resampled_MB: NDArray[np.float64]
) -> dict[str, Estimate]:
    tail = 100.0 * (1.0 - CONFIDENCE) / 2.0
    low_M, high_M = np.percentile(resampled_MB, (tail, 100.0 - tail), axis=1)
    # Rounding may put the interval of a constant a hair beside its mean.
    low_M, high_M = np.minimum(low_M, mean_M), np.maximum(high_M, mean_M)
    return {
        name: Estimate(mean=mean, ci_low=low, ci_high=high)
        for name, mean, low, high in zip(
            names, mean_M.tolist(), low_M.tolist(), high_M.tolist(), strict=True
        )
    }


@cache
def _resamples(num_seeds: int, seed: int = BOOTSTRAP_SEED) -> NDArray[np.float64]:
    """(B, S) how often each seed is in each resample; every row sums to S."""
    generator = np.random.default_rng(seed)
    shares = np.full(num_seeds, 1.0 / num_seeds)
    return generator.multinomial(num_seeds, shares, size=NUM_RESAMPLES).astype(np.float64)
