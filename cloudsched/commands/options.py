"""Options that several verbs share, and how `KEY=VALUE` becomes settings."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError

# Both `--set a=1 b=2` and `--set a=1 --set b=2` are taken.
Pairs = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction]


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Which cluster, and how much arrives there."""

    preset: str = Scenario.preset
    """Rules of the cluster (`cloudsched presets` lists them)."""
    load: float = Scenario.load
    """Work offered, as a share of the fleet's capacity in the busiest resource: 0.5 for half."""
    changes: Annotated[Pairs, tyro.conf.arg(name="set", metavar="KEY=VALUE ...")] = ()
    """Changes to the preset, such as fleet.num_servers=30 (`cloudsched presets` lists them)."""
    workload_options: Annotated[
        Pairs, tyro.conf.arg(name="workload-option", metavar="KEY=VALUE ...")
    ] = ()
    """Options of the workload, such as path=trace.csv (`cloudsched workloads` lists them)."""

    def scenario_with(self, workload: str) -> Scenario:
        """Return the scenario of a workload here; refuses unknown presets and settings."""
        scenario = Scenario(
            preset=self.preset,
            workload=workload,
            load=self.load,
            settings=nested(parse_pairs("--set", self.changes)),
            workload_options=parse_pairs("--workload-option", self.workload_options),
        )
        _ = scenario.config  # checks the names and values
        return scenario


@dataclass(frozen=True, kw_only=True)
class ScenarioOptions(ClusterOptions):
    """Which cluster, and what arrives there."""

    workload: str = Scenario.workload
    """What arrives (`cloudsched workloads` lists them)."""

    @property
    def scenario(self) -> Scenario:
        """The scenario that these options describe."""
        return self.scenario_with(self.workload)


LISTS = ("fleet.resources", "workloads")


def parse_pairs(option: str, groups: Iterable[Iterable[str]]) -> dict[str, Any]:
    """Turn `KEY=VALUE` words into a dictionary.

    A value is JSON where it can be (5, 0.3, true, null, ["cpu", "gpu"]), True, False or None as in
    Python, and text otherwise.
    """
    values: dict[str, Any] = {}
    for word in (word for group in groups for word in group):
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{option} {word!r}: expected KEY=VALUE.")
        if key in values:
            raise ConfigError(f"{option} {word!r}: {key!r} is given twice.")
        # The settings that are lists may be written as people would: cpu,memory,gpu
        value = _value(text)
        is_list = key in LISTS and isinstance(value, str)
        values[key] = tuple(value.split(",")) if is_list else value
    return values


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Turn `{"fleet.num_servers": 30}` into `{"fleet": {"num_servers": 30}}`."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, name = key.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
            if not isinstance(branch, dict):
                raise ConfigError(f"--set {key}: {parent!r} is also given a value of its own.")
        if name in branch:
            raise ConfigError(f"--set {key}: {name!r} is given as a whole and in parts.")
        branch[name] = value
    return tree


def _value(text: str) -> Any:
    python_words = {"True": True, "False": False, "None": None, "none": None}
    if text in python_words:
        return python_words[text]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
