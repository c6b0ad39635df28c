"""`cloudsched evolve` ends in a bundle that acts, trains on and explains itself."""

from __future__ import annotations

import pytest

from cloudsched.bundle import load_bundle
from cloudsched.cli import main
from cloudsched.envs.scenario import Scenario
from cloudsched.evaluation import evaluate
from cloudsched.heuristics.catalog import load_heuristic
from cloudsched.heuristics.composed import HeuristicPolicy

WORDS = ["evolve", "--preset", "mixed_wake", "--workload", "mixture", "--set", "episode_ticks=40"]


def test_evolve_writes_a_bundle_that_acts_as_the_rule_it_found(tmp_path, capsys):
    out = tmp_path / "evolved"
    words = ["--evaluations", "24", "--population", "8", "--episodes", "6", "--out", str(out)]
    assert main([*WORDS, *words]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    bundle = load_bundle(out)
    assert bundle.training["evaluations"] == 24
    assert bundle.network.prior is not None
    assert bundle.network.prior != load_heuristic("power_aware+headroom")
    scenario = Scenario.from_dict(bundle.training["scenario"])
    ours = evaluate(bundle.policy(scenario.config), scenario, range(4)).metrics["episode_return"]
    rule = HeuristicPolicy(scenario.config, bundle.network.prior)
    assert (ours == evaluate(rule, scenario, range(4)).metrics["episode_return"]).all()
    # Going on with tiny steps ends near where it began.
    again = tmp_path / "again"
    words = ["--evaluations", "8", "--population", "8", "--episodes", "2", "--step", "0.001"]
    assert main([*WORDS, *words, "--start", str(out), "--out", str(again)]) == 0
    before, after = bundle.network.prior, load_bundle(again).network.prior
    assert after is not None
    assert after.order_wait == pytest.approx(before.order_wait, abs=0.2)
    assert after.headroom_queued == pytest.approx(before.headroom_queued, abs=0.1)
    assert after != before


def test_evolve_by_site_writes_a_bundle_that_recognises_sites(tmp_path, capsys):
    out = tmp_path / "evolved"
    words = ["--by-site", "--evaluations", "240", "--population", "4", "--episodes", "2"]
    assert main([*WORDS, *words, "--out", str(out)]) == 0
    bundle = load_bundle(out)
    rule = bundle.network.prior
    assert bundle.training["evaluations"] == 60 * 4
    assert len(rule.recogniser) == 60
    scenario = Scenario.from_dict(bundle.training["scenario"])
    ours, plain = (
        evaluate(policy, scenario, range(4)).metrics["episode_return"]
        for policy in (bundle.policy(scenario.config), HeuristicPolicy(scenario.config, rule))
    )
    assert (ours == plain).all()
    assert main([*WORDS, "--by-site", "--start", str(out), "--out", str(tmp_path / "b")]) == 2
    assert "numbers by site already" in capsys.readouterr().err
    # As a teacher it is what the searches for single kinds begin with.
    few = ["--by-site", "--evaluations", "60", "--population", "4", "--episodes", "2"]
    again = tmp_path / "again"
    assert main([*WORDS, *few, "--step", "0.001", "--teachers", str(out), "--out", str(again)]) == 0
    assert load_bundle(again).training["evaluations"] == 60 * 4
    after = load_bundle(again).network.prior
    near = [
        abs(a - b) < 0.1
        for a, b in zip(after.sites["order_wait"], rule.sites["order_wait"], strict=True)
    ]
    assert sum(near) > len(near) / 2


def test_evolve_jam_changes_nothing_but_what_holds_in_a_jam(tmp_path):
    out = tmp_path / "jam"
    words = ["evolve", "--workload", "poisson", "--load", "1.15", "--set", "episode_ticks=200"]
    search = ["--evaluations", "12", "--population", "6", "--episodes", "6", "--out", str(out)]
    assert main([*words, "--start", "headroom@poisson", "--jam", *search]) == 0
    start, found = load_heuristic("headroom@poisson"), load_bundle(out).network.prior
    assert found.jam["order_size"] < 0.0  # large jobs first
    assert found.replace(jam={}, jam_queue=start.jam_queue) == start


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--start", "best_fit"], "keeps headroom awake"),
        (["--evaluations", "0"], "--evaluations 0"),
        (["--minutes", "0"], "--minutes 0"),
        (["--step", "2"], "--step 2"),
        (["--workload", "poisson", "--by-site"], "one kind of site"),
        (["--by-site", "--teachers", "best_fit"], "--teachers 'best_fit': expected a rule that"),
        (["--teachers", "headroom@mixture"], "add that option"),
        (["--rate-price", "-1"], "--rate-price -1"),
        (["--jam", "--by-site"], "--jam --by-site: expected one of them"),
    ],
)
def test_a_mistake_costs_one_line(words, complaint, capsys):
    assert main([*WORDS, *words]) == 2
    assert complaint in capsys.readouterr().err
