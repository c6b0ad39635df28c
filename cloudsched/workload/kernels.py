"""The one loop over jobs that is worth compiling: an episode needs it whenever one ends."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cloudsched.workload.base import TABLE_END, TABLE_STEPS, FloatArray


@njit(cache=True, nogil=True, error_model="numpy")
def correlated_demands(
    normal: NDArray[np.float64],
    weight: float,
    own_weight: float,
    bounds: NDArray[np.float64],
    ranks: NDArray[np.float64],
) -> FloatArray:
    """Return (J, R): uniform demands whose normals share `weight` of the CPU's.

    Args:
        normal: (J, R + 1) standard normals; the last column is not used here.
        bounds: (2, R) smallest and largest demand.
        ranks: of the normal distribution, as `cloudsched.workload.base.normal_table` gives them;
            read as `normal_cdf` does.
    """
    num_jobs, num_resources = normal.shape[0], normal.shape[1] - 1
    demand = np.empty((num_jobs, num_resources))
    last = len(ranks) - 1.001
    for j in range(num_jobs):
        for r in range(num_resources):
            value = normal[j, r]
            if r > 0:
                value = value * own_weight + weight * normal[j, 0]
            position = min(max((value + TABLE_END) * TABLE_STEPS, 0.0), last)
            left = int(position)
            rank = ranks[left] + (ranks[left + 1] - ranks[left]) * (position - left)
            demand[j, r] = bounds[0, r] + (bounds[1, r] - bounds[0, r]) * rank
    return demand
