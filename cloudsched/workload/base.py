"""What a workload is, and the few checks and draws that all of them share."""

from __future__ import annotations

from functools import cache
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cloudsched.errors import ConfigError
from cloudsched.sim.jobs import MAX_TICK, JobTable

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
TickArray = NDArray[np.int32]

DAY_S = 86_400.0
FIRST_TEST_SEED = 1_000_000  # it and those above are for reporting, those below for learning
MAX_TICKS = 10_000_000
MAX_JOBS = 50_000_000


class Workload(Protocol):
    """A source of episodes: the same seed and settings give the same bits."""

    @property
    def jobs_per_tick(self) -> float:
        """Mean number of arrivals a tick, over all seeds."""

    def jobs(self, seed: int, num_ticks: int) -> JobTable:
        """Return the arrivals of one episode; a longer episode starts with the same jobs.

        Args:
            seed: a whole number of at least 0.
            num_ticks: ticks of the episode, at least 1.
        """


def random_streams(seed: int, num_streams: int) -> list[np.random.Generator]:
    """Return independent generators for one episode.

    Arrivals and properties of jobs are drawn from different streams, so that the first jobs of an
    episode do not depend on how long it is.
    """
    check_seed(seed)
    # What `default_rng(seed).spawn(num_streams)` gives, without the parent that nobody draws from.
    children = (np.random.SeedSequence(int(seed), spawn_key=(i,)) for i in range(num_streams))
    return [np.random.Generator(np.random.PCG64(child)) for child in children]


def check_seed(seed: int) -> None:
    """Refuse what numpy would not take as a seed, or would take in two ways."""
    if not _is_whole(seed) or seed < 0:
        raise ConfigError(f"seed={seed!r}: expected a whole number of at least 0.")


def check_length(num_ticks: int, jobs_per_tick: float) -> None:
    """Refuse an episode without ticks, or with more jobs than memory holds."""
    if not _is_whole(num_ticks) or not 1 <= num_ticks <= MAX_TICKS:
        raise ConfigError(
            f"num_ticks={num_ticks!r}: expected a whole number from 1 to {MAX_TICKS}."
        )
    expected = num_ticks * jobs_per_tick
    if expected > MAX_JOBS:
        raise ConfigError(
            f"num_ticks={num_ticks!r}: about {expected:.3g} jobs would arrive, more than "
            f"{MAX_JOBS}; use fewer ticks, fewer servers, less load or longer jobs."
        )


def whole_ticks(seconds: FloatArray, tick_s: float) -> TickArray:
    """Turn durations into ticks: started ticks count, and every job takes at least one."""
    return np.clip(np.ceil(seconds / tick_s), 1, MAX_TICK).astype(np.int32)


TABLE_END, TABLE_STEPS = 6.0, 200  # how far the table of the normal reaches; entries a unit


def normal_cdf(values: FloatArray) -> FloatArray:
    """Map standard normal values to ranks from 0 to 1, within 1e-6."""
    ranks = normal_table()
    position = np.clip((values + TABLE_END) * TABLE_STEPS, 0.0, len(ranks) - 1.001)
    left = position.astype(np.int64)
    low = ranks[left]
    return low + (ranks[left + 1] - low) * (position - left)


@cache
def normal_table() -> FloatArray:
    """Return the ranks of values from -TABLE_END to TABLE_END, TABLE_STEPS a unit."""
    # numpy has no error function, and math.erf is far too slow for each job of an episode
    normal = NormalDist()
    steps = round(2 * TABLE_END * TABLE_STEPS)
    return np.array([normal.cdf(i / TABLE_STEPS - TABLE_END) for i in range(steps + 1)])


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
