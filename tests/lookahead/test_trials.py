"""What a policy is worth in trial episodes."""

from __future__ import annotations

import numpy as np
import pytest

from cloudsched.lookahead.trials import gains_beyond

BEFORE = {
    "episode_return": np.array([-1000.0, -2000.0]),
    "sla_violation_rate": np.array([0.0, 0.01]),
}
AFTER = {
    "episode_return": np.array([-900.0, -1800.0]),
    "sla_violation_rate": np.array([0.02, 0.0]),
}


def test_gains_are_in_proportion_to_what_each_episode_cost() -> None:
    assert gains_beyond(BEFORE, AFTER, 0.0) == pytest.approx([0.1, 0.1])


def test_a_price_of_the_rate_makes_late_jobs_count_for_more() -> None:
    gains = gains_beyond(BEFORE, AFTER, 10_000.0)
    assert gains == pytest.approx([-100.0 / 1000.0, 300.0 / 2100.0])


def test_where_nothing_was_lost_gains_stay_finite() -> None:
    idle = {"episode_return": np.zeros(1), "sla_violation_rate": np.zeros(1)}
    assert gains_beyond(idle, idle, 5.0) == pytest.approx([0.0])
