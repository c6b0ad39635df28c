"""Which job first: the classic orders as weights."""

from __future__ import annotations

from cloudsched.registry import Registry

ORDERS: Registry[dict[str, float]] = Registry(
    "order",
    {
        "fifo": {"order_wait": -1.0},
        "sjf": {"order_duration": 1.0},
        "edf": {"order_laxity": 1.0, "order_duration": 1.0},  # earliest end if started last minute
        "llf": {"order_laxity": 1.0},
    },
)
