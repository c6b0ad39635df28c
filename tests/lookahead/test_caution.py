"""A network is trusted where it did better for certain, and nowhere else."""

from __future__ import annotations

import numpy as np

from cloudsched.lookahead.caution import ALONE, choose_cautions

KINDS = ["calm"] * 40 + ["wild"] * 40 + ["lost"] * 40


def gains(calm: float, wild: float, lost: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    noise = np.repeat([0.01, 1.0, 0.01], 40) * rng.normal(size=120)
    return np.repeat([calm, wild, lost], 40) + noise - noise.reshape(3, 40).mean(1).repeat(40)


def test_each_kind_has_the_lead_that_returned_most_there():
    found = choose_cautions({0.1: gains(0.02, 5.0, -1.0), 0.2: gains(0.01, 6.0, -0.5)}, KINDS)
    assert found == {"calm": 0.1, "wild": 0.2, "lost": ALONE}


def test_what_may_be_chance_is_left_to_the_rule():
    found = choose_cautions({0.1: gains(0.02, 0.1, 0.001)}, KINDS)  # standard error 0.16 at wild
    assert found == {"calm": 0.1, "wild": ALONE, "lost": ALONE}
