"""The search for numbers of each kind of site, and learning to recognise the kind."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import softmax

from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.observation import columns
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.evaluation import evaluate
from cloudsched.heuristics.adapting import SearchConfig
from cloudsched.heuristics.adaptive import terms_of
from cloudsched.heuristics.catalog import HEURISTICS
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.heuristics.sites import (
    Kind,
    _delay_weights,
    _from_the_middle,
    _neighbours,
    _regression,
    adapt_by_site,
    pools_by_kind,
)


def test_the_regression_finds_what_made_the_kinds() -> None:
    generator = np.random.default_rng(0)
    terms = np.concatenate([np.ones((4000, 1)), generator.normal(size=(4000, 3))], axis=1)
    true = np.array([[0.0, 0.0, 0.0, 0.0], [0.5, 1.5, 0.0, -1.0], [-0.5, 0.0, 2.0, 0.0]])
    scores = terms @ true.T + generator.gumbel(size=(4000, 3))
    found = _regression(terms, scores.argmax(axis=1), 3)
    np.testing.assert_allclose(found[1:] - found[0], true[1:], atol=0.2)


@pytest.mark.parametrize(
    ("delay", "shares"), [(1, (1, 0, 0)), (2, (0.5, 0.5, 0)), (3, (0, 1, 0)), (5, (0, 0, 1))]
)
def test_numbers_change_over_with_the_wake_delay(delay: int, shares: tuple[float, ...]) -> None:
    levels = [1.0, 3.0, 5.0]
    env = ClusterVectorEnv(1, settings={"wake_delay_ticks": delay})
    context = env.reset(seed=0)[0]["context"]
    terms = terms_of(context, columns(env.config.num_resources), env.config.num_servers)
    odds = softmax([terms[0] @ _delay_weights(level, levels) for level in levels])
    np.testing.assert_allclose(odds, shares, atol=0.04)


def test_each_kind_gets_its_own_numbers_and_they_do_better_together() -> None:
    # A start that keeps far too much awake, so that a few generations must help everywhere.
    start = HEURISTICS["power_aware+headroom"].config.replace(headroom_constant=4.0)
    scenario = Scenario(
        preset="mixed_wake",
        workload="mixture",
        settings={"episode_ticks": 60},
        workload_options={"workloads": ("poisson", "bursty"), "load_steps": 3},
    )
    kinds = list(pools_by_kind(scenario, 0))
    assert kinds == [
        (name, load, delay)
        for name in ("bursty", "poisson")
        for load in (0.2, 0.5, 0.8)
        for delay in (1, 3, 5)
    ]
    seen = []
    found = adapt_by_site(
        start,
        scenario,
        SearchConfig(evaluations=18 * 40, population=8, num_seeds=8, step=0.05, seed=0),
        seen.append,
    )
    assert [progress.number for progress in seen] == sorted(5 * [*range(1, 19)])
    assert [progress.search.evaluations for progress in seen] == [*range(8, 18 * 40 + 1, 8)]
    assert {progress.num_searches for progress in seen} == {18}
    assert len(found.recogniser) == 18
    assert all(len(set(values)) > 1 for values in found.sites.values())
    better, worse = (
        evaluate(HeuristicPolicy(scenario.config, one), scenario, range(900, 932))
        for one in (found, start)
    )
    gain = better.metrics["episode_return"] - worse.metrics["episode_return"]
    assert gain.mean() > 0
    assert (gain > 0).mean() > 0.7
    with pytest.raises(ConfigError, match="one kind of site"):
        pools_by_kind(Scenario(), 0)


def test_searches_begin_with_the_teacher_that_does_best() -> None:
    good = HEURISTICS["power_aware+headroom"].config
    poor = good.replace(headroom_constant=5.0)
    scenario = Scenario(
        preset="mixed_wake",
        workload="mixture",
        settings={"episode_ticks": 60},
        workload_options={"workloads": ("poisson", "bursty"), "load_steps": 2},
    )
    # So few candidates, so near, that what is found is where the search began.
    few = SearchConfig(evaluations=12, population=4, num_seeds=2, step=0.001, seed=0)
    alone = adapt_by_site(poor, scenario, few, lambda _: None)
    taught = adapt_by_site(poor, scenario, few, lambda _: None, [good])
    assert all(value > 4.5 for value in alone.sites["headroom_constant"])
    assert all(value < 1.5 for value in taught.sites["headroom_constant"])


def test_every_search_but_the_first_of_a_workload_has_a_neighbour_before_it() -> None:
    kinds = [
        Kind(name, load, delay)
        for name in ("bursty", "poisson")
        for load in (0.2, 0.35, 0.5, 0.65, 0.8)
        for delay in (1.0, 3.0, 5.0)
    ]
    order = _from_the_middle(kinds)
    assert sorted(order) == kinds
    alone = [k for i, k in enumerate(order) if not set(_neighbours(k, kinds)) & set(order[:i])]
    assert alone == [Kind("bursty", 0.5, 1.0), Kind("poisson", 0.5, 1.0)]
    assert _neighbours(Kind("poisson", 0.35, 5.0), kinds) == [
        Kind("poisson", 0.2, 5.0),
        Kind("poisson", 0.35, 3.0),
        Kind("poisson", 0.5, 5.0),
    ]
