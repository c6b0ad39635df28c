"""Why DQN collapses on this problem: the three parts that keep it from it, left out in turn.

Run: `python -m tune.dqn_ablation`
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import FIFOScheduler

from cloudsched.cli import run_script
from cloudsched.commands.search import Search

VARIANTS: tuple[dict[str, Any], ...] = (
    {"target_mask": True, "n_step": 10, "clock": "tick"},
    {"target_mask": False, "n_step": 10, "clock": "tick"},
    {"target_mask": True, "n_step": 1, "clock": "tick"},
    {"target_mask": True, "n_step": 10, "clock": "decision"},
    {"target_mask": False, "n_step": 1, "clock": "decision"},
)
"""All three in, one left out in turn, and all left out: the textbook's DQN."""


def search_space() -> dict[str, Any]:
    """Return what is searched."""
    return {"training": tune.grid_search([dict(variant) for variant in VARIANTS])}


@dataclass(frozen=True, kw_only=True)
class DqnAblation(Search):
    """Train DQN without the mask in the target, without n-step returns over ticks, without ticks.

    Every variant is trained for the same short time. The table shows the best and the last return
    on train seeds, without exploration: what matters is whether the last is near the best. After a
    kill or Ctrl-C the same command goes on.

    Examples:
      python -m tune.dqn_ablation
      python -m tune.dqn_ablation --steps 300000 --out runs/dqn_ablation_long
    """

    config: Path = field(default_factory=lambda: Path("rllib_configs/dqn.py"))
    """Python file with `build() -> AlgorithmConfig`, of which parts are left out."""
    trials: int = 1
    """Trainings of each of the five variants."""
    steps: int = 120_000
    """Decisions of each training."""
    reports: int = 3
    """Measurements on train seeds in each training."""
    num_seeds: int = 4
    """Train seeds of such a measurement."""
    out: Path = field(default_factory=lambda: Path("runs/dqn_ablation"))
    """Folder for everything; on a cluster one that every node sees."""

    def tuner(self) -> Any:
        """Return what runs the trainings, without running them."""
        return self.make_tuner(search_space(), FIFOScheduler())


if __name__ == "__main__":
    sys.exit(run_script(DqnAblation, "python -m tune.dqn_ablation"))
