"""Every workload by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cloudsched.config import Settings
from cloudsched.errors import ConfigError
from cloudsched.registry import Registry
from cloudsched.sim.fleet import Fleet
from cloudsched.workload.base import DAY_S, Workload
from cloudsched.workload.google_v2 import GoogleV2BurstyOptions, GoogleV2Options, GoogleV2Workload
from cloudsched.workload.load import MAX_LOAD
from cloudsched.workload.mixture import MixtureOptions, MixtureWorkload
from cloudsched.workload.synthetic import (
    BurstyOptions,
    BurstyWorkload,
    DiurnalOptions,
    DiurnalWorkload,
    PoissonWorkload,
)
from cloudsched.workload.synthetic_jobs import JobOptions
from cloudsched.workload.traces.alibaba import AlibabaOptions, alibaba_workload
from cloudsched.workload.traces.google import GoogleTraceOptions, google_workload
from cloudsched.workload.traces.swf import SwfOptions, swf_workload


@dataclass(frozen=True, kw_only=True)
class WorkloadEntry:
    """How to make one kind of workload."""

    options: type[Settings]
    """Its options, each with its default and its meaning."""
    factory: Callable[..., Workload]
    """Called as `factory(options, fleet=..., tick_s=..., load=...)`."""
    description: str
    """One line for people."""
    needs_file: bool = False
    """Whether the option `path` must name a file or folder."""


WORKLOADS: Registry[WorkloadEntry] = Registry(
    "workload",
    {
        "poisson": WorkloadEntry(
            options=JobOptions,
            factory=PoissonWorkload,
            description="Independent synthetic jobs at a constant rate.",
        ),
        "diurnal": WorkloadEntry(
            options=DiurnalOptions,
            factory=DiurnalWorkload,
            description="The same jobs along a day with its peak at 14:00, and in bursts.",
        ),
        "bursty": WorkloadEntry(
            options=BurstyOptions,
            factory=BurstyWorkload,
            description="Jobs of many like tasks that arrive together.",
        ),
        "google_v2_sampled": WorkloadEntry(
            options=GoogleV2Options,
            factory=GoogleV2Workload,
            description="Independent tasks with the requests and durations of Google's 2011 trace.",
        ),
        "google_v2_bursty": WorkloadEntry(
            options=GoogleV2BurstyOptions,
            factory=GoogleV2Workload,
            description="The same tasks, arriving as jobs of many like tasks, as in the trace.",
        ),
        "mixture": WorkloadEntry(
            options=MixtureOptions,
            factory=lambda options, **place: _mixture(options, **place),
            description="Each episode is one of several workloads at a load of 0.2 to 0.8.",
        ),
        "google_v2_trace": WorkloadEntry(
            options=GoogleTraceOptions,
            factory=google_workload,
            description="Replay of Google's 2011 trace, version 2 (task_events).",
            needs_file=True,
        ),
        "alibaba_gpu_2023": WorkloadEntry(
            options=AlibabaOptions,
            factory=alibaba_workload,
            description="Replay of Alibaba's GPU cluster trace of 2023 (pod list).",
            needs_file=True,
        ),
        "swf": WorkloadEntry(
            options=SwfOptions,
            factory=swf_workload,
            description="Replay of a log in the Standard Workload Format.",
            needs_file=True,
        ),
    },
)


def make_workload(
    name: str, *, fleet: Fleet, tick_s: float, load: float = 0.5, **options: Any
) -> Workload:
    """Make a workload by name.

    Args:
        fleet: the servers that jobs are for; they set the rate of arrivals (`load.py`).
        tick_s: length of a tick, in seconds.
        load: expected work offered in the busiest resource, as a share of the fleet's capacity.
        options: fields of the entry's options; all have defaults, except `path` of a replay.
    """
    entry = WORKLOADS[name]
    if not isinstance(fleet, Fleet):
        raise ConfigError(f"fleet={fleet!r}: expected a Fleet, as build_fleet makes it.")
    _check_above_zero("tick_s", tick_s, DAY_S)
    _check_above_zero("load", load, MAX_LOAD)
    return entry.factory(
        entry.options.from_dict(options), fleet=fleet, tick_s=float(tick_s), load=float(load)
    )


def _mixture(
    options: MixtureOptions, *, fleet: Fleet, tick_s: float, load: float
) -> MixtureWorkload:
    for name in options.workloads:
        if name == "mixture" or WORKLOADS[name].needs_file:
            raise ConfigError(f"workloads={name!r}: a mixture holds only workloads without files.")
    return MixtureWorkload(
        options,
        load=load,
        make=partial(_make_site, fleet, tick_s),
    )


def _make_site(fleet: Fleet, tick_s: float, name: str, load: float) -> Workload:
    return make_workload(name, fleet=fleet, tick_s=tick_s, load=load)


def _check_above_zero(name: str, value: Any, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0.0 < value <= high:
        raise ConfigError(f"{name}={value!r}: expected a number above 0 and at most {high:g}.")
