"""What outlooks are worth is found where it is known."""

from __future__ import annotations

import numpy as np

from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.heuristics.catalog import make_heuristic
from cloudsched.lookahead.branches import Branches
from cloudsched.lookahead.outlook import NAMES
from cloudsched.lookahead.worth import (
    NUM_FEATURES,
    SITE_SIGNALS,
    OutlookWorth,
    outlook_features,
    site_terms,
)


def branches(rng, true, noise=0.3, num_states=40_000, load=None):
    """Branches whose outlook fades by chance, and is paid for as the true weights say."""
    signals = np.concatenate([np.ones((num_states, 1)), rng.uniform(-1, 1, (num_states, 4))], 1)
    if load is not None:
        signals[:, 1] = load
    near = rng.normal(size=(num_states, 2, len(NAMES))).astype(np.float32)
    far = near * rng.uniform(0.0, 0.8, near.shape).astype(np.float32)
    paid = (outlook_features(near, signals) - outlook_features(far, signals)) @ true
    paid += noise * rng.normal(size=paid.shape)
    first = rng.normal(size=paid.shape)
    return (
        Branches(
            observation={},
            decided=np.zeros(num_states, np.int64),
            others=np.zeros((num_states, 2), np.int64),
            gain=np.stack([first, first + paid], axis=2).astype(np.float32),
            outlook=np.stack([near, far], axis=2),
        ),
        signals,
        first,
        near,
    )


def test_weights_that_depend_on_the_site_are_found():
    rng = np.random.default_rng(0)
    true = rng.normal(size=NUM_FEATURES)
    batch, signals, first, near = branches(rng, true)
    worth = OutlookWorth(0.3)
    worth.learn([batch], [signals])
    assert np.abs(worth.weights - true).max() < 0.08
    expected = first + outlook_features(near, signals) @ true
    assert np.abs(worth(batch, signals) - expected).mean() < 0.1


def test_what_branches_say_nothing_about_keeps_the_price_of_work():
    rng = np.random.default_rng(1)
    batch, signals, *_ = branches(rng, np.zeros(NUM_FEATURES))
    outlook = batch.outlook.copy()
    outlook[:, :, :, NAMES.index("queued_work")] = 0.0
    worth = OutlookWorth(0.3)
    worth.learn([batch._replace(outlook=outlook)], [signals])
    weights = worth.weights.reshape(len(NAMES), 1 + SITE_SIGNALS)
    assert weights[NAMES.index("queued_work"), 0] == -0.3
    assert abs(weights[NAMES.index("running_work_0"), 0]) < 0.05  # told that it costs nothing


def test_sites_where_chance_is_great_do_not_decide_what_outlooks_are_worth_elsewhere():
    rng = np.random.default_rng(2)
    true = rng.normal(size=NUM_FEATURES)
    calm, calm_signals, first, near = branches(rng, true, load=-1.0)
    wild, wild_signals, *_ = branches(rng, true, noise=300.0, load=1.0)
    expected = first + outlook_features(near, calm_signals) @ true
    worth = OutlookWorth(0.3)
    worth.learn([calm, wild], [calm_signals, wild_signals])
    assert np.abs(worth(calm, calm_signals) - expected).mean() < 1.0


def test_signals_tell_one_site_from_another():
    rows = []
    for load in (0.3, 0.7):
        env = ClusterVectorEnv(4, workload="poisson", load=load)
        policy = make_heuristic("power_aware+headroom", env.config)
        observation, _ = env.reset(seed=0)
        for _ in range(2000):
            observation, *_ = env.step(policy.act(observation))
        rows.append(site_terms(observation["context"], 15, 2))
    assert (rows[0][:, 0] == 1.0).all()
    assert rows[0][:, 1].max() < rows[1][:, 1].min()  # load
    np.testing.assert_allclose(rows[0][:, 4], -1.0, atol=1e-6)  # a wake delay of one tick
