"""Which server: the classic placements as weights."""

from __future__ import annotations

from cloudsched.registry import Registry

PLACEMENTS: Registry[dict[str, float]] = Registry(
    "placement",
    {
        "round_robin": {"place_cycle": 1.0},
        "first_fit": {"place_index": 1.0},
        # Sizes outweigh any order: a thousandth of a server counts more than a thousand ticks.
        "first_fit_decreasing": {"place_index": 1.0, "order_size": -1e6},
        "best_fit": {"place_leftover": 1.0},
        "worst_fit": {"place_leftover": -1.0},
        "tetris": {"place_alignment": -1.0},
        "least_power": {"place_power": 1.0},
    },
)
