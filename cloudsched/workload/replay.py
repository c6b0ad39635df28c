"""Replay of a recorded trace, at the speed that offers the load asked for.

Demands and durations stay as recorded. The recording is divided: test seeds (1,000,000 and above)
replay the last third of its jobs, all other seeds what comes before, so that nothing is tested on
what was trained on. In each part the time between submissions is stretched or squeezed by one
factor, such that the part meets the load rule of `load.py`; the time of day passes at the same
factor, as it did for the jobs recorded. An episode is a window of its part: the seed draws where
the window starts, uniformly, and a window that runs past the end goes on at the beginning of the
part. Episodes longer than the part repeat it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloudsched.config import Settings
from cloudsched.errors import ConfigError, TraceFileError
from cloudsched.sim.fleet import Fleet
from cloudsched.sim.jobs import JobTable
from cloudsched.workload.base import (
    DAY_S,
    FIRST_TEST_SEED,
    FloatArray,
    check_length,
    random_streams,
    whole_ticks,
)
from cloudsched.workload.load import arrivals_per_tick


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(Settings):
    """Which part of which recording is replayed."""

    path: str = ""
    """File or folder; a relative path is looked up here, then in `CLOUDSCHED_DATA`. Needed."""
    from_s: float = 0.0
    """Jobs submitted before this time of the recording are left out."""
    until_s: float | None = None
    """Jobs submitted at or after this time of the recording are left out; None for no limit."""

    def __post_init__(self) -> None:
        if isinstance(self.path, os.PathLike):
            object.__setattr__(self, "path", os.fspath(self.path))
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError(
                f"path={self.path!r}: this workload replays a file; give its path or folder."
            )
        self._number("from_s", low=0.0)
        if self.until_s is not None:
            self._number("until_s", low=self.from_s, exclusive=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Jobs as recorded, in the order of their submission."""

    source: str
    """Name of the file, for messages."""
    submit_s: FloatArray  # (J,) not decreasing
    duration_s: FloatArray  # (J,)
    demand: Mapping[str, FloatArray]  # resource name to (J,); `cpu` and `memory` at least
    time_of_day_s: float
    """Time of day at which `submit_s` is 0."""

    def part(self, from_s: float, until_s: float | None) -> Trace:
        """Return the jobs submitted in this part of the recording."""
        begin = int(np.searchsorted(self.submit_s, from_s))
        end = len(self.submit_s)
        if until_s is not None:
            end = int(np.searchsorted(self.submit_s, until_s))
        if begin >= end:
            span = ""
            if len(self.submit_s):
                span = f", which has jobs from {self.submit_s[0]:g} to {self.submit_s[-1]:g} s"
            raise TraceFileError(
                f"{self.source}: no job to replay from {from_s:g} s"
                f"{'' if until_s is None else f' until {until_s:g} s'}{span}."
            )
        return self._rows(begin, end)

    def divided(self) -> tuple[Trace, Trace]:
        """Return the part for training and, from the last third of the jobs on, that for testing.

        Jobs submitted at the same moment stay together.
        """
        num_jobs = len(self.submit_s)
        begin = int(np.searchsorted(self.submit_s, self.submit_s[2 * num_jobs // 3]))
        if begin == 0:
            begin = int(np.searchsorted(self.submit_s, self.submit_s[0], side="right"))
        if begin == num_jobs:
            raise TraceFileError(
                f"{self.source}: all jobs to replay ({num_jobs}) are submitted at "
                f"{self.submit_s[0]:g} s, so train and test seeds cannot have different ones; "
                "expected at least two times of submission."
            )
        return self._rows(0, begin), self._rows(begin, num_jobs)

    def _rows(self, begin: int, end: int) -> Trace:
        return Trace(
            source=self.source,
            submit_s=self.submit_s[begin:end],
            duration_s=self.duration_s[begin:end],
            demand={name: values[begin:end] for name, values in self.demand.items()},
            time_of_day_s=self.time_of_day_s,
        )


def sorted_trace(
    *,
    source: str,
    submit_s: FloatArray,
    duration_s: FloatArray,
    demand: Mapping[str, FloatArray],
    time_of_day_s: float,
) -> Trace:
    """Build a trace from jobs in any order; jobs of equal time keep theirs."""
    order = np.argsort(submit_s, kind="stable")
    return Trace(
        source=source,
        submit_s=submit_s[order],
        duration_s=duration_s[order],
        demand={name: values[order] for name, values in demand.items()},
        time_of_day_s=time_of_day_s,
    )


class ReplayWorkload:
    """Windows of a recording; its first resource is `cpu`, the others go by their names."""

    def __init__(
        self, trace: Trace, options: ReplayOptions, *, fleet: Fleet, tick_s: float, load: float
    ) -> None:
        self._train, self._test = (
            RecordedPart(part, fleet=fleet, tick_s=tick_s, load=load)
            for part in trace.part(options.from_s, options.until_s).divided()
        )

    @property
    def jobs_per_tick(self) -> float:
        """Mean number of arrivals a tick, of train seeds."""
        return self._train.jobs_per_tick

    def part_of(self, seed: int) -> RecordedPart:
        """Return the part of the recording in which this seed draws its window."""
        return self._test if seed >= FIRST_TEST_SEED else self._train

    def jobs(self, seed: int, num_ticks: int) -> JobTable:
        """Return the window that the seed draws; its time of day is the recording's."""
        (rng,) = random_streams(seed, 1)
        return self.part_of(seed).window(float(rng.random()), num_ticks)


class RecordedPart:
    """Jobs of a recording that repeat for ever, at the speed that offers the load asked for."""

    def __init__(self, trace: Trace, *, fleet: Fleet, tick_s: float, load: float) -> None:
        num_jobs = len(trace.submit_s)
        self._tick_s = tick_s
        self._demand = np.stack([trace.demand[n] for n in _names(trace, fleet)], axis=1)
        self._duration = whole_ticks(trace.duration_s, tick_s)
        self.jobs_per_tick = arrivals_per_tick(self._demand, self._duration, fleet=fleet, load=load)
        self._period_ticks = num_jobs / self.jobs_per_tick
        # The last job is followed by one mean gap before the part starts again.
        first_s, last_s = float(trace.submit_s[0]), float(trace.submit_s[-1])
        self._period_s = (last_s - first_s) * num_jobs / max(1, num_jobs - 1)
        self._first_s = trace.time_of_day_s + first_s
        share = (trace.submit_s - first_s) / self._period_s if self._period_s > 0.0 else 0.0
        self._submit_tick = np.full(num_jobs, self._period_ticks) * share

    @property
    def stretch(self) -> float:
        """Factor by which the time between submissions is longer than recorded."""
        if self._period_s == 0.0:
            return 1.0
        return self._period_ticks * self._tick_s / self._period_s

    def window(self, start_share: float, num_ticks: int) -> JobTable:
        """Return the jobs of a window that starts after this share of the part."""
        check_length(num_ticks, self.jobs_per_tick)
        start = start_share * self._period_ticks
        num_jobs = len(self._submit_tick)
        laps, rest = divmod(start + num_ticks, self._period_ticks)
        begin = int(np.searchsorted(self._submit_tick, start))
        end = int(laps) * num_jobs + int(np.searchsorted(self._submit_tick, rest))
        lap, row = np.divmod(np.arange(begin, end), num_jobs)
        tick = np.floor(self._submit_tick[row] + lap * self._period_ticks - start)
        return JobTable(
            arrival_tick=np.clip(tick, 0, num_ticks - 1).astype(np.int32),
            demand=self._demand[row],
            duration_ticks=self._duration[row],
            time_of_day_s=(self._first_s + start_share * self._period_s) % DAY_S,
            day_s_per_tick=self._tick_s / self.stretch,
        )


def _names(trace: Trace, fleet: Fleet) -> list[str]:
    """Return the recorded resource that each resource of the fleet stands for."""
    names = ["cpu"]
    for index, name in enumerate(fleet.resources[1:], start=1):
        if name in trace.demand:
            names.append(name)
        elif index == 1:
            names.append("memory")
        else:
            raise ConfigError(
                f"resources={fleet.resources!r}: {trace.source} has no {name!r}, only "
                f"{', '.join(trace.demand)}."
            )
    return names
