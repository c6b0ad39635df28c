"""Which logged policy the learner improves on."""

from dataclasses import replace
from pathlib import Path

import pytest

from cloudsched.datasets.manifest import read_manifest
from cloudsched.models.constrained import ConstrainedConfig
from cloudsched.models.lagrange import LagrangeConfig
from cloudsched.rl import offline
from cloudsched.rl.offline import Outcome, best_author, logged_outcomes

LOGGED = {
    "frugal": Outcome(power=0.4, excess=0.01, violation_rate=0.08),
    "middling": Outcome(power=0.6, excess=0.02, violation_rate=0.01),
    "lavish": Outcome(power=0.5, excess=0.09, violation_rate=0.0),
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
    assert logged_outcomes(recorded, merged)[first.policy] == outcomes[first.policy]
