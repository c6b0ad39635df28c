"""The heuristics by name.

`NAME` never sleeps; `NAME+sleep` adds an idle timeout with a spare server, `NAME+band` a
utilisation band, `NAME+headroom` the headroom controller. `NAME@WORKLOAD` has its numbers tuned on
the train seeds of that workload with the default preset, `NAME@PRESET/WORKLOAD` with another; they
ship in `data/tuned.json`. `random`, the floor of every comparison, has no numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from cloudsched.config import ClusterConfig
from cloudsched.errors import ConfigError
from cloudsched.heuristics.ordering import ORDERS
from cloudsched.heuristics.parameters import HeuristicConfig
from cloudsched.heuristics.placement import PLACEMENTS
from cloudsched.policy import Policy
from cloudsched.registry import Registry

RANDOM = "random"

SLEEP_SUFFIXES = {
    "": "never",
    "+sleep": "idle_timeout",
    "+band": "utilisation_band",
    "+headroom": "headroom",
}


class HeuristicEntry(NamedTuple):
    """A named heuristic."""

    config: HeuristicConfig
    description: str


class Base(NamedTuple):
    """Order and placement of a family of heuristics."""

    order: str
    placement: str
    description: str


BASES = {
    "rr": Base("fifo", "round_robin", "first come, first served; servers in turn"),
    "sjf": Base("sjf", "first_fit", "shortest job first on the first server that fits"),
    "ffd": Base("fifo", "first_fit_decreasing", "largest job first on the first server that fits"),
    "llf": Base("llf", "first_fit", "least laxity first on the first server that fits"),
    "edf": Base("edf", "first_fit", "earliest deadline first on the first server that fits"),
    "best_fit": Base("fifo", "best_fit", "first come, on the server left with the least free"),
    "worst_fit": Base("fifo", "worst_fit", "first come, on the server left with the most free"),
    "tetris": Base("fifo", "tetris", "first come, where demand and free capacity align best"),
    "power_aware": Base("llf", "least_power", "least laxity first where it adds the fewest watts"),
}

SLEEP_DESCRIPTIONS = {
    "": "",
    "+sleep": "; sleeps after an idle timeout",
    "+band": "; sleeps and wakes by utilisation",
    "+headroom": "; keeps headroom awake",
}


def compose(order: str, placement: str, sleep: str, **numbers: float) -> HeuristicConfig:
    """Combine an order, a placement and a sleep controller; `numbers` override their defaults."""
    # The placement comes second: first-fit decreasing orders by size before anything else.
    weights: dict[str, Any] = {**ORDERS[order], **PLACEMENTS[placement], **numbers}
    return HeuristicConfig(sleep=sleep, **weights)


def _entries() -> dict[str, HeuristicEntry]:
    entries = {}
    for name, base in BASES.items():
        for suffix, sleep in SLEEP_SUFFIXES.items():
            config = compose(base.order, base.placement, sleep)
            description = base.description + SLEEP_DESCRIPTIONS[suffix]
            entries[name + suffix] = HeuristicEntry(config, description)
    for name, values in tuned_parameters().items():
        family, site = name.split("@", 1)
        entries[name] = HeuristicEntry(
            HeuristicConfig.from_dict(values), f"{family}, tuned on the train seeds of {site}"
        )
    return entries


@cache
def tuned_parameters() -> Mapping[str, dict[str, Any]]:
    """Return the tuned numbers that ship with the package, by policy name."""
    path = files("cloudsched.heuristics").joinpath("data/tuned.json")
    return dict(json.loads(path.read_text("utf-8"))["policies"])


HEURISTICS: Registry[HeuristicEntry] = Registry("policy", _entries())


def load_heuristic(name_or_path: str) -> HeuristicConfig:
    """Return the numbers of a named heuristic, or of a file that `tune-heuristic` wrote."""
    if not str(name_or_path).endswith(".json"):
        return HEURISTICS[name_or_path].config
    path = Path(name_or_path)
    try:
        values = json.loads(path.read_text("utf-8"))["parameters"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"Cannot read the heuristic {str(path)!r}: {type(error).__name__}: {error}. "
            "Expected a file written by `cloudsched tune-heuristic`."
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{str(path)!r}: 'parameters' is not a table of numbers.")
    return HeuristicConfig.from_dict(values)


def make_heuristic(name_or_path: str, cluster: ClusterConfig) -> Policy:
    """Build a named heuristic, or one from a file, for clusters with these rules."""
    # Imported late: the names can be listed without loading numba.
    from cloudsched.heuristics.composed import HeuristicPolicy
    from cloudsched.heuristics.random import RandomPolicy

    if name_or_path == RANDOM:
        return RandomPolicy()
    return HeuristicPolicy(cluster, load_heuristic(name_or_path))


def policy_descriptions() -> dict[str, str]:
    """Return one line on each policy that `make_heuristic` knows by name."""
    described = {name: entry.description for name, entry in HEURISTICS.items()}
    return {RANDOM: "uniformly random legal actions", **described}


def tuned_names(preset: str, workload: str) -> list[str]:
    """Return the policies that were tuned for this preset and workload."""
    site = workload if preset == "default" else f"{preset}/{workload}"
    return [name for name in tuned_parameters() if name.split("@", 1)[1] == site]


def tuned_policy(preset: str, workload: str) -> str:
    """Return the name of the headroom controller that was tuned for this preset and workload."""
    for name in tuned_names(preset, workload):
        if name.startswith("headroom@"):
            return name
    raise ConfigError(
        f"No heuristic is tuned to preset {preset!r} and workload {workload!r}; `cloudsched "
        "policies` lists those that are, `cloudsched tune-heuristic` makes one."
    )
