"""PPO's hyper-parameters by population-based training: the worse copy the better, and vary.

Run: `python -m tune.ppo_pbt --trials 4`
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

from cloudsched.cli import run_script
from cloudsched.commands.search import Search
from cloudsched.sweeps.search import TIME


def search_space() -> dict[str, Any]:
    """Return what is searched; not the network, because weights are copied between trials."""
    return {
        "training": {
            "lr": tune.loguniform(1e-4, 3e-3),
            "entropy_coeff": tune.loguniform(1e-4, 1e-2),
            "lambda_": tune.uniform(0.9, 0.99),
            "num_epochs": tune.choice([2, 4, 8]),
            "clip_param": tune.uniform(0.1, 0.3),
        },
    }


@dataclass(frozen=True, kw_only=True)
class PpoPbt(Search):
    """Train a population of PPO policies; the worst quarter copies the best and varies it.

    Trials are judged by the return of their policy on train seeds, without exploration. What was
    best in the end is a schedule; best.json holds its last values, and bundle the policy. After a
    kill or Ctrl-C the same command goes on.

    Examples:
      python -m tune.ppo_pbt --trials 4 --out runs/pbt
      cloudsched evaluate --policy runs/pbt/bundle
    """

    trials: int = 4
    """Size of the population."""
    copies: int = 5
    """How often in the longest training a trial may copy another."""
    synchronous: bool = False
    """Let trials wait for each other before the worst copy the best: slower, but what comes out no
    longer depends on which of them happened to report first."""
    out: Path = field(default_factory=lambda: Path("runs/ppo_pbt"))
    """Folder for everything; on a cluster one that every node sees."""

    def tuner(self) -> Any:
        """Return what runs the search, without running it."""
        scheduler = PopulationBasedTraining(
            time_attr=TIME,
            perturbation_interval=max(1, self.steps // (self.copies + 1)),
            hyperparam_mutations={"hyperparameters": search_space()},
            synch=self.synchronous,
        )
        return self.make_tuner(search_space(), scheduler)


if __name__ == "__main__":
    sys.exit(run_script(PpoPbt, "python -m tune.ppo_pbt"))
