"""A scenario: rules plus workload, as named settings that can be saved and read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudsched.config import ClusterConfig, Settings
from cloudsched.envs.catalog import PRESETS
from cloudsched.errors import ConfigError
from cloudsched.sim.fleet import Fleet
from cloudsched.workload.base import Workload
from cloudsched.workload.catalog import make_workload


@dataclass(frozen=True, kw_only=True)
class Scenario(Settings):
    """Everything that an environment is built from, except the seed."""

    preset: str = "default"
    """Name of the rules (`cloudsched.envs.catalog.PRESETS`)."""
    workload: str = "poisson"
    """Name of the workload (`cloudsched workloads` lists them)."""
    load: float = 0.5
    """Work offered, as a share of the fleet's capacity in the busiest resource."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the preset: fields of ClusterConfig, with `fleet` and `reward` as dictionaries."""
    workload_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the workload, such as the path of a trace."""

    def __post_init__(self) -> None:
        for name in ("settings", "workload_options"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name}={value!r}: expected a dictionary of settings.")

    @property
    def config(self) -> ClusterConfig:
        """The preset with the changes applied."""
        config = PRESETS[self.preset].config
        changes = dict(self.settings)
        for part in ("fleet", "reward"):
            if isinstance(changes.get(part), Mapping):
                changes[part] = type(getattr(config, part)).from_dict(
                    {**getattr(config, part).to_dict(), **changes[part]}
                )
        return config.replace(**changes)

    def build_workload(self, fleet: Fleet) -> Workload:
        """Build the workload for a fleet."""
        return make_workload(
            self.workload,
            fleet=fleet,
            tick_s=self.config.tick_s,
            load=self.load,
            **self.workload_options,
        )
