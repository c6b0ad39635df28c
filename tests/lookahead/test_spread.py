"""The spread of gains is found where it is known."""

from __future__ import annotations

import numpy as np

from cloudsched.lookahead.spread import learn_spread, spread_of


def lessons(rng, num_states=20_000):
    """Gains that spread by 0.5 at one site and by 8 at another, in two batches."""
    batches = []
    for _ in range(2):
        signal = rng.choice([-1.0, 1.0], num_states)
        terms = np.stack([np.ones(num_states), signal], axis=1)
        spread = np.where(signal < 0, 0.5, 8.0)
        gains = (spread[:, None] * rng.standard_t(6, (num_states, 3))).astype(np.float32)
        batches.append((terms, gains))
    return [list(part) for part in zip(*batches, strict=True)]


def test_each_site_has_the_spread_of_its_gains():
    terms, gains = lessons(np.random.default_rng(0))
    weights = learn_spread(terms, gains)
    found = spread_of(np.array([[1.0, -1.0], [1.0, 1.0]]), weights)
    truth = np.sqrt(6 / 4) * np.array([0.5, 8.0])  # of Student's distribution
    np.testing.assert_allclose(found, truth, rtol=0.05)


def test_in_units_of_their_spread_gains_count_alike():
    terms, gains = lessons(np.random.default_rng(1))
    weights = learn_spread(terms, gains)
    scaled = gains[0] / spread_of(terms[0], weights)[:, None]
    is_calm = terms[0][:, 1] < 0
    np.testing.assert_allclose([scaled[is_calm].std(), scaled[~is_calm].std()], 1.0, rtol=0.06)


def test_a_spread_is_never_so_small_or_large_that_a_gain_would_mean_nothing():
    terms, gains = lessons(np.random.default_rng(2), num_states=100)
    for scale in (0.0, 1e6):
        weights = learn_spread(terms, [scale * batch for batch in gains])
        assert (spread_of(terms[0], weights) > 0.1).all()
        assert (spread_of(terms[0], weights) < 100.0).all()
