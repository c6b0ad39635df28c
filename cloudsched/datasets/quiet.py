"""Keeps Ray Data from telling users of blocks and tasks; our commands report progress."""

from __future__ import annotations

import logging


def quiet_ray_data() -> None:
    """Turn off Ray Data's progress and its notes, in this process."""
    from ray.data import DataContext

    DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
