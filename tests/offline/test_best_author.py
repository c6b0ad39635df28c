"""Which logged policy the learner improves on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cloudsched.datasets.manifest import read_episodes, read_manifest
from cloudsched.models.constrained import ConstrainedConfig
from cloudsched.models.lagrange import LagrangeConfig
from cloudsched.rl import offline
from cloudsched.rl.offline import Outcome, best_author, logged_outcomes, within_slope

LOGGED = {
    "frugal": Outcome(power=0.4, excess=0.02, fair_power=0.41, violation_rate=0.08),
    "middling": Outcome(power=0.6, excess=0.01, fair_power=0.43, violation_rate=0.01),
    "lavish": Outcome(power=0.5, excess=0.09, fair_power=0.52, violation_rate=0.0),
}


@pytest.mark.parametrize(
    ("limit", "best"), [(0.1, "frugal"), (0.02, "middling"), (0.005, "lavish")]
)
def test_it_is_the_most_frugal_of_those_that_kept_the_limit(monkeypatch, limit, best):
    monkeypatch.setattr(offline, "logged_outcomes", lambda *_: LOGGED)
    config = ConstrainedConfig(constraint=LagrangeConfig(limit=limit))
    assert best_author(Path(), None, config) == best


def test_if_none_kept_the_limit_it_is_the_one_with_the_fewest_violations(monkeypatch):
    worse = {k: v._replace(violation_rate=v.violation_rate + 0.1) for k, v in LOGGED.items()}
    monkeypatch.setattr(offline, "logged_outcomes", lambda *_: worse)
    assert best_author(Path(), None, ConstrainedConfig()) == "lavish"


def test_each_author_is_judged_by_its_least_random_episodes(recorded):
    manifest = read_manifest(recorded)
    outcomes = logged_outcomes(recorded, manifest)
    assert set(outcomes) == set(manifest.authors)
    assert all(outcome.excess < outcome.power for outcome in outcomes.values())
    # With the names of two behaviours made one, the purer of them speaks for both.
    first, second = manifest.behaviours[0], manifest.behaviours[1]
    noisy = replace(second, policy=first.policy, epsilon=first.epsilon + 0.5)
    merged = replace(manifest, behaviours=(first, noisy, *manifest.behaviours[2:]))
    found, expected = logged_outcomes(recorded, merged)[first.policy], outcomes[first.policy]
    assert found._replace(fair_power=0.0) == expected._replace(fair_power=0.0)


def test_who_met_with_more_work_is_not_taken_for_a_waster():
    generator = np.random.default_rng(0)
    groups = []
    for level, use in ((100.0, generator.uniform(0.6, 0.9, 12)), (110.0, np.full(5, 0.3))):
        groups.append((use, level + 50.0 * use))
    assert within_slope(groups) == pytest.approx(50.0)
    assert within_slope([(np.array([0.5]), np.array([7.0]))]) == 0.0


def test_authors_are_compared_at_equal_use(recorded, monkeypatch):
    manifest = read_manifest(recorded)
    table = read_episodes(recorded).to_pandas()
    author = np.array([manifest.behaviours[b].policy for b in table.behaviour])
    thrifty = author == manifest.authors[0]
    # The thrifty one draws 100 W less at equal use, but met with so much work that it drew more.
    table["utilisation"] = np.where(thrifty, 0.8, 0.2) + np.linspace(-0.1, 0.1, len(table))
    table["mean_power_w"] = 500.0 + 2000.0 * table.utilisation - 100.0 * thrifty
    monkeypatch.setattr(offline, "read_episodes", lambda _: pa.Table.from_pandas(table))
    outcomes = logged_outcomes(recorded, manifest)
    first = outcomes.pop(manifest.authors[0])
    assert all(first.power > other.power for other in outcomes.values())
    assert all(first.fair_power < other.fair_power for other in outcomes.values())
