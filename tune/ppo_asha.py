"""PPO's hyper-parameters by ASHA: many trainings, of which the worse stop early.

Run: `python -m tune.ppo_asha --trials 12`
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler

from cloudsched.cli import run_script
from cloudsched.commands.search import Search
from cloudsched.sweeps.search import TIME

REDUCTION = 3  # of so many trials that get to a rung, one goes on


def search_space() -> dict[str, Any]:
    """Return what is searched."""
    return {
        "training": {
            "lr": tune.loguniform(1e-4, 3e-3),
            "entropy_coeff": tune.loguniform(1e-4, 1e-2),
            "lambda_": tune.uniform(0.9, 0.99),
            "num_epochs": tune.choice([2, 4, 8]),
            "clip_param": tune.uniform(0.1, 0.3),
        },
        "network": {"width": tune.choice([16, 32, 64])},
    }


@dataclass(frozen=True, kw_only=True)
class PpoAsha(Search):
    """Search PPO's learning rate, entropy, lambda, epochs, clip and width with ASHA.

    Trials are judged by the return of their policy on train seeds, without exploration; of three
    that get as far, one goes on. After a kill or Ctrl-C the same command goes on.

    Examples:
      python -m tune.ppo_asha --trials 12 --out runs/asha
      cloudsched train rllib_configs/ppo.py --hyperparameters runs/asha/best.json
    """

    out: Path = field(default_factory=lambda: Path("runs/ppo_asha"))
    """Folder for everything; on a cluster one that every node sees."""

    def tuner(self) -> Any:
        """Return what runs the search, without running it."""
        grace = max(1, self.steps // REDUCTION**2)
        scheduler = ASHAScheduler(
            time_attr=TIME, max_t=self.steps, grace_period=grace, reduction_factor=REDUCTION
        )
        return self.make_tuner(search_space(), scheduler)


if __name__ == "__main__":
    sys.exit(run_script(PpoAsha, "python -m tune.ppo_asha"))
