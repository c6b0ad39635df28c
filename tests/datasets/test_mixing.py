"""The logged probability of a decision is the share with which it is taken."""

import numpy as np

from cloudsched.datasets.mixing import mix_decisions


def draw(mask, greedy, epsilon, count):
    """Return the share of each action over many draws, and the probability logged for it."""
    generator = np.random.default_rng(0)
    actions, chance = np.zeros(count, np.int64), np.zeros(count, np.float32)
    mix_decisions(
        np.tile(np.array(mask, np.int8), (count, 1)),
        np.full(count, greedy),
        np.full(count, epsilon),
        generator.random((count, 3)),
        4,
        actions,
        chance,
    )
    shares = np.bincount(actions, minlength=len(mask)) / count
    logged = {int(a): float(chance[actions == a][0]) for a in np.unique(actions)}
    assert all(np.ptp(chance[actions == a]) == 0 for a in logged)
    return shares, logged


def test_logged_probabilities_are_the_shares_of_decisions():
    # four placements of which two are legal, three toggles of which one is, and waiting
    mask = [1, 0, 1, 0, 0, 1, 0, 1]
    shares, logged = draw(mask, greedy=2, epsilon=0.6, count=200_000)
    assert logged.keys() == {0, 2, 5, 7}
    assert sum(logged.values()) == np.float32(1.0)
    np.testing.assert_allclose([shares[a] for a in logged], list(logged.values()), atol=0.004)
    assert logged[0] == np.float32(0.1)  # 0.6 / 3 kinds / 2 placements
    assert logged[2] == np.float32(0.5)


def test_without_chance_the_policy_decides():
    shares, logged = draw([1, 1, 1, 1, 1, 1, 1, 1], greedy=6, epsilon=0.0, count=1000)
    assert logged == {6: 1.0}
    assert shares[6] == 1.0


def test_kinds_without_a_legal_action_get_nothing():
    _, logged = draw([0, 0, 0, 0, 0, 0, 0, 1], greedy=7, epsilon=0.9, count=1000)
    assert logged == {7: 1.0}
