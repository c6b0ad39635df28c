"""Off-policy estimates against cases whose answer is known."""

from dataclasses import fields, replace

import numpy as np
import pytest

from cloudsched.commands.policies import make_policy
from cloudsched.datasets.manifest import read_episodes, read_manifest
from cloudsched.ope.estimators import (
    doubly_robust,
    effective_size,
    fitted_q,
    importance,
    off_policy_report,
)
from cloudsched.ope.trajectories import Ticks, read_ticks
from cloudsched.ope.truth import true_value

GAMMA = 0.9


class ZeroCritic:
    def values(self, observation, actions):
        return np.zeros((len(actions), 2))


def coin_ticks(num_episodes, critic_value, seed=0):
    """Episodes of ten ticks of a coin: the data throws heads (reward 1) half of the time.

    The policy under evaluation always throws heads, so it gets a reward of 1 in every tick; the
    cost is 1 for tails, of which it has none.
    """
    generator = np.random.default_rng(seed)
    is_heads = generator.random((num_episodes, 10)) < 0.5
    outcome = (1.0 - GAMMA) * np.stack([is_heads, ~is_heads], axis=2)
    ratio = is_heads / 0.5
    left = 1.0 - GAMMA ** np.arange(10, -1, -1)  # value of the ticks to come, of all heads
    value = np.stack([critic_value * left, np.zeros(11)], axis=1)
    residual = outcome + GAMMA * value[None, 1:] - value[None, :-1]
    # What the critic expected of tails: nothing for this tick.
    residual = np.where(is_heads[:, :, None], residual, 0.0)
    return Ticks(
        outcome,
        ratio,
        ratio[:, :, None] * residual,
        np.tile(value[:-1], (num_episodes, 1, 1)),
        np.ones((num_episodes, 10), np.bool_),
        np.arange(num_episodes),
    )


TRUTH = 1.0 - GAMMA**10


def weights(ticks):
    return np.cumprod(ticks.ratio_GT, axis=1)


def test_importance_sampling_recovers_what_the_policy_would_get():
    ticks = coin_ticks(2000, critic_value=0.0)
    found = importance(ticks, weights(ticks), GAMMA)
    # Only all-heads prefixes have weight, and each of their ticks pays 1.
    assert found["reward"].mean == pytest.approx(TRUTH, rel=1e-9)
    assert found["cost"].mean == 0.0


def test_a_perfect_critic_has_no_correction_and_a_narrow_interval():
    found = fitted_q(coin_ticks(300, critic_value=1.0), GAMMA)
    assert found["reward"].mean == pytest.approx(TRUTH)
    assert found["reward"].ci_high - found["reward"].ci_low < 1e-9


def test_the_interval_of_a_wrong_critic_still_covers_the_truth():
    found = fitted_q(coin_ticks(300, critic_value=0.6), GAMMA)["reward"]
    assert found.ci_low <= TRUTH <= found.ci_high
    assert found.ci_high - found.ci_low > 0.1


def test_doubly_robust_repairs_a_wrong_critic():
    ticks = coin_ticks(4000, critic_value=0.3)
    found = doubly_robust(ticks, weights(ticks), GAMMA)["reward"]
    wrong = 0.3 * TRUTH
    assert abs(found.mean - TRUTH) < 0.15 * abs(wrong - TRUTH)
    assert found.ci_low - 1e-9 <= TRUTH <= found.ci_high + 1e-9


def test_doubly_robust_is_not_misled_by_logs_that_never_do_what_the_policy_does():
    """Half of the episodes are those of one who always throws tails, with probability one."""
    ticks = coin_ticks(4000, critic_value=3.0)
    stubborn = np.arange(4000) % 2 == 0
    ratio = np.where(stubborn[:, None], 0.0, ticks.ratio_GT)
    mixed = replace(ticks, ratio_GT=ratio)
    found = doubly_robust(mixed, weights(mixed), GAMMA)["reward"]
    assert abs(found.mean - TRUTH) < 0.1 * abs(3.0 * TRUTH - TRUTH)
    assert found.ci_low - 1e-9 <= TRUTH <= found.ci_high + 1e-9


class ErraticCritic:
    """Expects something else in every observation."""

    def values(self, observation, actions):
        return np.sin(100.0 * observation["context"][:, :2].astype(np.float64)) + actions[:, None]


def test_whatever_the_critic_says_a_logged_policy_gets_what_was_logged(recorded):
    manifest = read_manifest(recorded)
    policy = make_policy("best_fit+sleep", manifest.scenario.config)
    own = read_episodes(recorded)["behaviour"].to_numpy() == 1
    ticks = read_ticks(recorded, manifest, policy, ErraticCritic(), gamma=0.9, max_ticks=40)
    # As if it had been logged without random decisions, and alone.
    alone = Ticks(*(getattr(ticks, f.name)[own] for f in fields(Ticks)))
    followed = np.ones_like(alone.ratio_GT)
    found = doubly_robust(alone, followed, 0.9)
    expected = importance(alone, followed, 0.9)
    for name in ("reward", "cost"):
        assert found[name].mean == pytest.approx(expected[name].mean, abs=1e-9)


def test_the_effective_size_counts_equal_weights():
    assert effective_size(np.ones(7)) == pytest.approx(7.0)
    assert effective_size(np.array([1.0, 0.0, 0.0])) == pytest.approx(1.0)
    assert effective_size(np.zeros(3)) == 0.0


def test_a_logged_policy_is_supported_by_its_own_episodes(recorded):
    manifest = read_manifest(recorded)
    policy = make_policy("best_fit+sleep", manifest.scenario.config)
    ticks = read_ticks(recorded, manifest, policy, ZeroCritic(), gamma=0.9, max_ticks=40)
    assert ticks.is_tick_GT.all()
    behaviours = read_episodes(recorded)["behaviour"].to_numpy()
    own = ticks.ratio_GT[behaviours == 1]
    others = ticks.ratio_GT[behaviours == 3]
    assert (own > 0.0).mean() > 0.4
    assert (others > 0.0).mean() < (own > 0.0).mean()
    # Without a critic the residual is the reweighted outcome, decision by decision.
    is_followed = ticks.ratio_GT > 0.0
    assert (ticks.residual_GT2[~is_followed][:, 0] <= 0.0).all()


def test_a_policy_far_from_the_data_raises_the_warning(recorded):
    manifest = read_manifest(recorded)
    policy = make_policy("worst_fit+headroom", manifest.scenario.config)
    ticks = read_ticks(recorded, manifest, policy, ZeroCritic(), gamma=0.9, max_ticks=40)
    report = off_policy_report(ticks, 0.9)
    assert not report.has_support
    assert 0.0 <= report.agreement < 0.9


def test_the_truth_of_a_policy_is_what_its_own_log_adds_up_to(recorded):
    """A policy that decides alone was logged; its outcome, discounted, is the truth of its seed."""
    manifest = read_manifest(recorded)
    policy = make_policy("rr", manifest.scenario.config)
    ticks = read_ticks(recorded, manifest, policy, ZeroCritic(), gamma=0.9, max_ticks=60)
    for episode in np.flatnonzero(read_episodes(recorded)["behaviour"].to_numpy() == 0):
        truth = true_value(
            manifest.scenario,
            make_policy("rr", manifest.scenario.config),
            [manifest.seeds[episode]],
            gamma=0.9,
            arrivals_per_tick=manifest.arrivals_per_tick,
            max_ticks=60,
        )
        sums = np.einsum("t,ti->i", 0.9 ** np.arange(60), ticks.outcome_GT2[episode])
        assert truth["reward"].mean == pytest.approx(sums[0], rel=1e-4)
        assert truth["cost"].mean == pytest.approx(sums[1], rel=1e-4, abs=1e-9)
