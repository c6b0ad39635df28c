"""`cloudsched improve` ends in a bundle that is better than what it began with."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cloudsched.bundle import load_bundle
from cloudsched.cli import main
from cloudsched.commands.policies import make_policy
from cloudsched.envs.scenario import Scenario
from cloudsched.evaluation import TEST_SEEDS, evaluate
from cloudsched.heuristics.catalog import load_heuristic
from cloudsched.heuristics.parameters import NUM_TERMS

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SETTINGS = ["--set", "episode_ticks=150", "fleet.num_servers=6"]
SCENARIO = Scenario(settings={"episode_ticks": 150, "fleet": {"num_servers": 6}})
SMALL = ["--rounds", "2", "--branches", "30000", "--trials", "24", "--workers", "2"]


@pytest.fixture(scope="module")
def improved(tmp_path_factory):
    """A rule that keeps far too many servers awake, improved."""
    folder = tmp_path_factory.mktemp("improve")
    wasteful = load_heuristic("headroom@poisson").replace(headroom_constant=4.0)
    start = folder / "wasteful.json"
    start.write_text(json.dumps({"parameters": wasteful.to_dict()}))
    out = folder / "improved"
    words = ["improve", "--start", str(start), *SETTINGS, *SMALL, "--out", str(out)]
    assert main(words) == 0
    return start, out


def returns(policy):
    cluster = SCENARIO.config
    return evaluate(make_policy(str(policy), cluster), SCENARIO, TEST_SEEDS).metrics[
        "episode_return"
    ]


def test_it_beats_what_it_began_with_on_arrivals_it_has_never_seen(improved):
    start, out = improved
    gain = returns(out) - returns(start)
    assert gain.mean() > 3.0 * gain.std() / np.sqrt(len(gain))
    assert gain.mean() > 0.02 * np.abs(returns(start)).mean()


def test_the_bundle_tells_where_it_comes_from(improved):
    _, out = improved
    training = load_bundle(out).training
    assert training["algorithm"] == "lookahead"
    assert [one["number"] for one in training["rounds"]] == [1, 2]
    assert all(one["num_branches"] >= 30_000 for one in training["rounds"])
    assert training["rounds"][0]["is_best"]


def test_it_goes_on_with_what_it_wrote(improved, tmp_path):
    _, out = improved
    again = tmp_path / "again"
    few = ["--rounds", "1", "--branches", "2000", "--trials", "8", "--workers", "3"]
    assert main(["improve", "--start", str(out), *SETTINGS, *few, "--out", str(again)]) == 0
    # So few branches teach nothing better, and the policy stays as it is.
    difference = returns(again).mean() - returns(out).mean()
    assert difference >= -1e-9 or load_bundle(again).training["rounds"][0]["is_best"]


def test_without_rounds_the_network_stays_and_trust_is_chosen_anew(improved, tmp_path):
    _, out = improved
    again = tmp_path / "again"
    none = ["--rounds", "0", "--trials", "8", "--workers", "2", "--rate-price", "1000"]
    assert main(["improve", "--start", str(out), *SETTINGS, *none, "--out", str(again)]) == 0
    before, after = load_bundle(out), load_bundle(again)
    assert all((after.weights[name] == part).all() for name, part in before.weights.items())
    lead = after.training["trial"]["leads"]["everywhere"]
    assert after.network.prior.caution == lead
    assert after.network.prior.jam["caution"] > lead  # in a jam the rule decides alone


def test_each_kind_of_site_has_a_lead_of_its_own(tmp_path):
    rule = load_heuristic("headroom@mixed_wake/mixture")
    recogniser = np.random.default_rng(0).normal(size=(60, NUM_TERMS)).round(3).tolist()
    sites = {"headroom_constant": [rule.headroom_constant] * 60}
    start = tmp_path / "sites.json"
    text = {"parameters": {**rule.to_dict(), "sites": sites, "recogniser": recogniser}}
    start.write_text(json.dumps(text))
    out = tmp_path / "out"
    where = ["--preset", "mixed_wake", "--workload", "mixture", "--set", "episode_ticks=60"]
    few = ["--rounds", "2", "--branches", "4000", "--trials", "120", "--workers", "2"]
    assert main(["improve", "--start", str(start), *where, *few, "--out", str(out)]) == 0
    bundle = load_bundle(out)
    leads = bundle.training["rounds"][1]["trial"]["leads"]
    assert len(leads) == 20  # workloads and loads
    if any(one["is_best"] for one in bundle.training["rounds"]):
        assert len(bundle.network.prior.sites["caution"]) == 60


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--rounds", "-1"], "--rounds -1"),
        (["--rounds", "0", "--start", "headroom@poisson"], "expected a bundle of"),
        (["--seed", "-1"], "--seed -1"),
        (["--rate-price", "-1"], "--rate-price -1"),
        (["--start", "headroom@poissn"], "headroom@poisson"),
        (["--start", "rr+headroom"], "place_cycle"),
    ],
)
def test_mistakes_cost_one_line(words, complaint, tmp_path, capsys):
    assert main(["improve", *words, "--out", str(tmp_path / "out")]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
