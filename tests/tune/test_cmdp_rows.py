"""The table of offline trainings: who is compared with whom, seed by seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cloudsched.sweeps.cmdp import SHOWN, Metrics, plan, table_rows

SEEDS = np.arange(8.0)


def metrics(power_w: float, rate: float) -> Metrics:
    """Return what a policy measures whose episodes differ as everybody's do."""
    found = {name: np.ones(len(SEEDS)) for name in SHOWN}
    return found | {"mean_power_w": power_w + SEEDS, "sla_violation_rate": rate + SEEDS / 1e3}


def test_learned_policies_face_the_best_behaviour_within_the_limit_and_the_mean_of_all():
    trials = plan(
        Path("data"),
        Path("out"),
        limits=[0.02],
        pessimisms=[0.1],
        num_train_seeds=2,
        num_steps=1,
        num_test_seeds=None,
    )
    found = {
        trial.name: {"policy": metrics(power_w, 0.005), "clone": metrics(2600.0, 0.03)}
        for trial, power_w in zip(trials, (2400.0, 2420.0), strict=True)
    }
    behaviours = {
        "thrifty, but late": metrics(2300.0, 0.05),
        "in time": metrics(2500.0, 0.01),
        "in time, and thirsty": metrics(2900.0, 0.0),
    }
    learned, clone, best, mean = table_rows(trials, found, behaviours)

    assert best.name == "best behaviour that meets it: in time"
    assert (learned.meets_limit, clone.meets_limit) == (True, False)
    assert learned.difference_w is not None
    assert learned.difference_w.mean == pytest.approx(-90.0)
    # Seeds are paired, so all that is left to doubt is which training it was.
    assert (learned.difference_w.ci_low, learned.difference_w.ci_high) == (-100.0, -80.0)
    assert learned.difference_rate is not None
    assert learned.difference_rate.mean == pytest.approx(0.005 - 0.02)
    assert learned.difference_rate.ci_high == pytest.approx(0.005 - 0.02)
    assert mean.difference_rate is None
    assert mean.summary["sla_violation_rate"].mean == pytest.approx(0.02 + SEEDS.mean() / 1e3)
