"""The jobs of one episode, in the form the simulator runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cloudsched.errors import InvalidJobsError

# Demands, capacities and watts are rounded to this grid. Sums and differences of such numbers are
# exact in float64 in any order, so free capacity never drifts and totals can be kept incrementally.
GRID = 2.0**-20
MAX_DEMAND = 2.0**28
MAX_TICK = 2**30


def on_grid(values: ArrayLike) -> NDArray[np.float64]:
    """Round down to the grid, so that jobs which together just fill a server still do."""
    return np.floor(np.asarray(values, dtype=np.float64) / GRID) * GRID


@dataclass(frozen=True, kw_only=True, eq=False)
class JobTable:
    """Arrivals of one episode, sorted by tick; checked and put on the grid at construction.

    An empty table is fine: a cluster to which nothing arrives.
    """

    arrival_tick: NDArray[np.int32]  # (J,) not decreasing
    demand: NDArray[np.float64]  # (J, R) in units of server capacity
    duration_ticks: NDArray[np.int32]  # (J,) at least 1
    time_of_day_s: float = 0.0
    """Time of day at tick 0."""
    day_s_per_tick: float | None = None
    """Seconds of the day that pass in a tick, where a recording is stretched; None for a tick's."""

    def __post_init__(self) -> None:
        arrival = np.asarray(self.arrival_tick)
        duration = np.asarray(self.duration_ticks)
        demand = np.asarray(self.demand, dtype=np.float64)
        if demand.ndim != 2 or arrival.shape != (len(demand),) or duration.shape != arrival.shape:
            raise InvalidJobsError(
                f"Job table shapes do not fit: arrival_tick {arrival.shape}, demand "
                f"{demand.shape}, duration_ticks {duration.shape}; expected (J,), (J, R) and (J,)."
            )
        if demand.shape[1] == 0:
            raise InvalidJobsError("demand has no resource column; expected (J, R) with R >= 1.")
        _require("demand", demand, 0.0, MAX_DEMAND)
        for name, ticks, low in (("arrival_tick", arrival, 0), ("duration_ticks", duration, 1)):
            if ticks.size and ticks.dtype.kind not in "iu":
                raise InvalidJobsError(f"{name} has type {ticks.dtype}; expected whole ticks.")
            _require(name, ticks, low, MAX_TICK)
        if (arrival[1:] < arrival[:-1]).any():
            row = int(np.argmax(np.diff(arrival) < 0)) + 1
            raise InvalidJobsError(
                f"Job {row}: arrival_tick={arrival[row]} is before the job above it "
                f"({arrival[row - 1]}); sort jobs by arrival_tick."
            )
        if not (np.isfinite(self.time_of_day_s) and self.time_of_day_s >= 0):
            raise InvalidJobsError(
                f"time_of_day_s={self.time_of_day_s!r}: expected a finite number of at least 0."
            )
        day_s = self.day_s_per_tick
        if day_s is not None and not (np.isfinite(day_s) and day_s >= 0):
            raise InvalidJobsError(
                f"day_s_per_tick={day_s!r}: expected None or a finite number of at least 0."
            )
        for name, value in (
            ("arrival_tick", arrival.astype(np.int32)),
            ("duration_ticks", duration.astype(np.int32)),
            ("demand", on_grid(demand)),
        ):
            value.setflags(write=False)
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.arrival_tick)

    @property
    def num_resources(self) -> int:
        """R."""
        return int(self.demand.shape[1])

    def before(self, num_ticks: int) -> JobTable:
        """Return the jobs that arrive in the first `num_ticks` ticks."""
        end = int(np.searchsorted(self.arrival_tick, num_ticks))
        return JobTable(
            arrival_tick=self.arrival_tick[:end],
            demand=self.demand[:end],
            duration_ticks=self.duration_ticks[:end],
            time_of_day_s=self.time_of_day_s,
            day_s_per_tick=self.day_s_per_tick,
        )

    def day_gain_s(self, tick_s: float) -> float:
        """Return by how many seconds the time of day runs ahead of ticks of this length, a tick."""
        return 0.0 if self.day_s_per_tick is None else self.day_s_per_tick - tick_s


def _require(name: str, values: NDArray[Any], low: float, high: float) -> None:
    """Refuse a table with a value that is not from `low` to `high`; NaN is not."""
    if values.size and not (values.min() >= low and values.max() <= high):
        is_good = (values >= low) & (values <= high)
        row = int(np.argwhere(~is_good)[0, 0])
        raise InvalidJobsError(
            f"Job {row}: {name}={values[row].tolist()!r}; expected a finite number from {low:.0f} "
            f"to {high:.0f}."
        )
