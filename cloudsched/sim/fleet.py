"""Servers: their capacities and their power curves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cloudsched.config import FleetConfig
from cloudsched.errors import ConfigError
from cloudsched.sim.jobs import MAX_DEMAND, on_grid
from cloudsched.sim.records import records

CURVE_POINTS = 11  # watts at 0, 10 ... 100 % load, as SPECpower reports them

# name, idle, max, exponent, capacity; the powers and the capacity are factors of the base
TIERS = (
    ("efficient", 0.7, 0.6, 1.2, 0.7),
    ("standard", 1.0, 1.0, 1.4, 1.0),
    ("power_hungry", 1.5, 1.6, 1.6, 1.4),
)

POWER_DTYPE = np.dtype(
    [
        ("idle_w", np.float64),
        ("max_w", np.float64),
        ("exponent", np.float64),  # 0 means: read the measured curve instead
    ],
    align=True,
)


class FleetArrays(NamedTuple):
    """What kernels read of a fleet."""

    capacity: NDArray[np.float64]  # (N, R)
    power: NDArray[np.void]  # (N,) of POWER_DTYPE
    curve_w: NDArray[np.float64]  # (N, 11) watts; all zero where the exponent is used


@dataclass(frozen=True, kw_only=True, eq=False)
class Fleet:
    """A checked fleet of N servers with R resources, the first of which is the CPU."""

    resources: tuple[str, ...]
    models: tuple[str, ...]  # (N,) tier or product name, for people
    capacity: NDArray[np.float64]  # (N, R)
    idle_w: NDArray[np.float64]  # (N,)
    max_w: NDArray[np.float64]  # (N,)
    exponent: NDArray[np.float64]  # (N,) 0 where `curve_w` is measured
    curve_w: NDArray[np.float64]  # (N, 11)

    def __post_init__(self) -> None:
        capacity = on_grid(self.capacity)
        num_servers = len(capacity)
        shapes = {
            "capacity": (num_servers, len(self.resources)),
            "idle_w": (num_servers,),
            "max_w": (num_servers,),
            "exponent": (num_servers,),
            "curve_w": (num_servers, CURVE_POINTS),
        }
        for name, shape in shapes.items():
            value = np.asarray(getattr(self, name), dtype=np.float64)
            if value.shape != shape:
                raise ConfigError(f"Fleet {name} has shape {value.shape}; expected {shape}.")
            if not np.isfinite(value).all() or (value < 0).any():
                raise ConfigError(f"Fleet {name} has negative or non-finite values.")
            object.__setattr__(self, name, value)
        if num_servers == 0 or len(self.models) != num_servers:
            raise ConfigError(
                f"Fleet has {num_servers} servers and {len(self.models)} models; "
                "expected the same number, at least 1."
            )
        if (capacity <= 0).any() or (capacity > MAX_DEMAND).any():
            raise ConfigError(
                f"Fleet capacity must be above 0 and at most {MAX_DEMAND:.0f}: {capacity.min()}."
            )
        worst = int(np.argmin(self.max_w - self.idle_w))
        if self.max_w[worst] <= self.idle_w[worst]:
            raise ConfigError(
                f"Server {worst}: max_w={self.max_w[worst]} is not above "
                f"idle_w={self.idle_w[worst]}; a server draws more at full load than idle."
            )
        object.__setattr__(self, "capacity", capacity)

    @property
    def num_servers(self) -> int:
        """N."""
        return len(self.models)

    @property
    def num_resources(self) -> int:
        """R."""
        return len(self.resources)

    @property
    def total_capacity(self) -> NDArray[np.float64]:
        """(R,) capacity of all servers together."""
        return np.asarray(self.capacity.sum(axis=0))

    @property
    def arrays(self) -> FleetArrays:
        """The records that kernels read."""
        power = records(self.num_servers, POWER_DTYPE)
        power["idle_w"] = self.idle_w
        power["max_w"] = self.max_w
        power["exponent"] = self.exponent
        return FleetArrays(capacity=self.capacity, power=power, curve_w=self.curve_w)


def build_fleet(config: FleetConfig) -> Fleet:
    """Build the fleet that a config describes; the same config gives the same fleet."""
    kinds = np.arange(config.num_servers)
    np.random.default_rng(config.fleet_seed).shuffle(kinds)
    return _tier_fleet(config, kinds) if config.kind == "tiers" else _measured_fleet(config, kinds)


def _tier_fleet(config: FleetConfig, kinds: NDArray[np.int64]) -> Fleet:
    tiers = [TIERS[kind % len(TIERS)] for kind in kinds]
    scale = np.array([tier[4] for tier in tiers])
    return Fleet(
        resources=config.resources,
        models=tuple(tier[0] for tier in tiers),
        capacity=config.base_capacity * np.repeat(scale[:, None], len(config.resources), axis=1),
        idle_w=config.base_idle_w * np.array([tier[1] for tier in tiers]),
        max_w=config.base_max_w * np.array([tier[2] for tier in tiers]),
        exponent=np.array([tier[3] for tier in tiers]),
        curve_w=np.zeros((len(tiers), CURVE_POINTS)),
    )


def _measured_fleet(config: FleetConfig, kinds: NDArray[np.int64]) -> Fleet:
    """Real servers; every resource follows the throughput of the machine.

    Memory too: SPECpower results are submitted with as little memory as the test allows, so the
    memory they report says nothing about how such machines are bought.
    """
    table = measured_servers()
    rows = [table[kind % len(table)] for kind in kinds]
    median_ops = float(np.median([row["ssj_ops"] for row in table]))
    scale = np.array([row["ssj_ops"] / median_ops for row in rows])
    curve_w = np.array([row["watts"] for row in rows], dtype=np.float64)
    return Fleet(
        resources=config.resources,
        models=tuple(row["name"] for row in rows),
        capacity=config.base_capacity * np.repeat(scale[:, None], len(config.resources), axis=1),
        idle_w=curve_w[:, 0],
        max_w=curve_w[:, -1],
        exponent=np.zeros(len(rows)),
        curve_w=curve_w,
    )


@cache
def measured_servers() -> tuple[dict[str, object], ...]:
    """Read the packaged SPECpower figures: name, ssj_ops, and 11 watts for each server."""
    text = files("cloudsched.sim").joinpath("data/specpower_servers.json").read_text("utf-8")
    return tuple(json.loads(text)["servers"])
