"""What one synthetic job asks for and how long it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cloudsched.config import Settings
from cloudsched.errors import ConfigError
from cloudsched.sim.jobs import MAX_TICK
from cloudsched.workload.base import FloatArray, TickArray, normal_table


@dataclass(frozen=True, kw_only=True)
class JobOptions(Settings):
    """What a synthetic job looks like; 1.0 is the capacity of a standard server."""

    cpu_min: float = 0.1
    """Smallest CPU demand; demands are uniform between their bounds."""
    cpu_max: float = 0.5
    """Largest CPU demand."""
    memory_min: float = 0.1
    """Smallest demand of memory, and of every resource after it."""
    memory_max: float = 0.5
    """Largest demand of memory, and of every resource after it."""
    rank_correlation: float = 0.5
    """Spearman correlation of each other resource with the CPU."""
    mean_duration_ticks: float = 30.0
    """Mean duration; durations are lognormal, rounded, at least one tick."""
    duration_cv: float = 0.8
    """Standard deviation of the duration over its mean."""

    def __post_init__(self) -> None:
        for resource in ("cpu", "memory"):
            low, high = f"{resource}_min", f"{resource}_max"
            self._number(low, low=0.0, high=1e6)
            self._number(high, low=0.0, high=1e6, exclusive=True)
            smallest, largest = getattr(self, low), getattr(self, high)
            if smallest > largest:
                raise ConfigError(f"{low}={smallest!r}: expected at most {high}={largest!r}.")
        self._number("rank_correlation", low=-1.0, high=1.0)
        self._number("mean_duration_ticks", low=1.0, high=1e6)
        self._number("duration_cv", low=0.0, high=10.0)


def draw_jobs(
    options: JobOptions, num_jobs: int, num_resources: int, rng: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """Return (J, R) demands and (J,) durations in ticks, not yet rounded."""
    from cloudsched.workload.kernels import correlated_demands  # numba: not for mere listings

    normal = rng.standard_normal((num_jobs, num_resources + 1))
    # A Gaussian copula: this correlation of the normals gives their ranks the one asked for.
    rho = 2.0 * math.sin(math.pi / 6.0 * options.rank_correlation)
    bounds = np.empty((2, num_resources))
    bounds[0], bounds[1] = options.memory_min, options.memory_max
    bounds[:, 0] = options.cpu_min, options.cpu_max
    own_weight = math.sqrt(max(0.0, 1.0 - rho * rho))
    demand = correlated_demands(normal, rho, own_weight, bounds, normal_table())
    duration = lognormal(normal[:, -1], options.mean_duration_ticks, options.duration_cv)
    return demand, duration


def rounded_ticks(duration: FloatArray) -> TickArray:
    """Round durations to ticks, at least one; rounding keeps their mean."""
    return np.minimum(np.maximum(np.rint(duration), 1), MAX_TICK).astype(np.int32)


def lognormal(normal: FloatArray, mean: float, cv: float) -> FloatArray:
    """Turn standard normal values into lognormal ones of this mean and relative spread."""
    variance = math.log1p(cv * cv)
    factor: FloatArray = np.exp(math.sqrt(variance) * normal)
    return factor * (mean * math.exp(-0.5 * variance))
