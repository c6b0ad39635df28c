"""A cluster as coloured text for terminals, and as an image for videos."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cloudsched.envs.rendering.picture import draw_picture
from cloudsched.envs.rendering.snapshot import take_snapshot
from cloudsched.envs.rendering.text import render_ansi
from cloudsched.sim.engine import ClusterEngine

__all__ = ["render_ansi", "render_rgb"]


def render_rgb(engine: ClusterEngine, e: int) -> NDArray[np.uint8]:
    """Draw cluster e as an image, (540, 960, 3) whatever the number of servers."""
    return np.array(draw_picture(take_snapshot(engine, e)), dtype=np.uint8)
