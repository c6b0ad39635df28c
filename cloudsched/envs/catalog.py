"""Presets of the cluster's rules, by name."""

from __future__ import annotations

from typing import NamedTuple

from cloudsched.config import ClusterConfig, FleetConfig
from cloudsched.registry import Registry


class Preset(NamedTuple):
    """A named set of rules."""

    config: ClusterConfig
    description: str


_COLUMBIA = ClusterConfig(
    max_decisions_per_tick=1,
    window_order="fifo",
    drop_expired=True,
    wait_only_when_stuck=True,
    sleep=False,
)

PRESETS: Registry[Preset] = Registry(
    "preset",
    {
        "default": Preset(
            ClusterConfig(),
            "15 servers in three tiers, 5 visible jobs, sleep with a wake delay of one tick",
        ),
        "columbia": Preset(
            _COLUMBIA,
            "one decision a tick, FIFO window, expired jobs dropped, no sleep: the classic clock",
        ),
        "columbia_sleep": Preset(_COLUMBIA.replace(sleep=True), "columbia, with sleep"),
        "slow_wake": Preset(
            ClusterConfig(wake_delay_ticks=5), "default, but a server takes 5 ticks to wake"
        ),
        "mixed_wake": Preset(
            ClusterConfig(wake_delay_ticks=1, wake_delay_max_ticks=5),
            "default, but each episode draws a wake delay of 1 to 5 ticks",
        ),
        "large": Preset(
            ClusterConfig(fleet=FleetConfig(num_servers=500), queue_capacity=20_000),
            "500 servers in three tiers",
        ),
        "measured": Preset(
            ClusterConfig(fleet=FleetConfig(kind="measured")),
            "15 real servers of the years 2011 to 2022 with their SPECpower curves",
        ),
    },
)
