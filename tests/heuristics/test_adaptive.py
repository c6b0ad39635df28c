"""Numbers that follow the site, and the search that learns how."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.observation import columns
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.evaluation import evaluate
from cloudsched.heuristics.adapting import ANSWERING, SearchConfig, adapt_heuristic
from cloudsched.heuristics.adaptive import RuleNumbers, terms_of
from cloudsched.heuristics.catalog import HEURISTICS
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.heuristics.parameters import NUM_TERMS, RANGES, SIGNALS, HeuristicConfig

RULE = HEURISTICS["power_aware+headroom"].config
SHORT = Scenario(preset="mixed_wake", workload="mixture", settings={"episode_ticks": 60})


def observation(num_envs: int = 6, steps: int = 300) -> dict[str, Any]:
    env = ClusterVectorEnv(num_envs, copy=False, **SHORT.to_dict())
    seen, _ = env.reset(seed=3)
    policy = HeuristicPolicy(env.config, RULE)
    for _ in range(steps):
        seen, *_ = env.step(policy.act(seen))
    return seen


def signals_of(row: Any, num_servers: int) -> list[float]:
    """Return the signals of one cluster's context, as `SIGNALS` describes them."""
    at = columns(2)

    def raw(column: int) -> float:
        return float(row[column]) / (1.0 - float(row[column]))

    load = raw(at.work_rate + 2)
    jobs = num_servers * raw(at.work_rate - 1)
    signals = [
        (load - 0.5) / 0.3,
        math.log(max(raw(at.work_rms), 1e-3) / max(load, 1e-3)) - 1.0,
        math.log(num_servers * max(load, 1e-3) / max(jobs, 1e-3)) - 1.0,
        (5.0 * raw(at.wake_delay) - 3.0) / 2.0,
        (raw(at.work_rate) - load) / 0.3,
        float(row[at.late]),
        (raw(at.work_rate + 1) - load) / 0.3,
        math.log(max(num_servers * raw(at.work_rate - 2), 1e-3) / max(jobs, 1e-3)),
        float(row[at.work_rate + 3]),
        float(row[at.work_rate + 4]),
    ]
    return [min(max(signal, -2.0), 2.0) for signal in signals]


def test_numbers_move_with_the_signals_and_stay_in_their_range() -> None:
    seen = observation()
    weights = {"headroom_constant": (0.1, -0.2, 0.3, 0.05, 0.0, 0.1, 0.2, -0.3, 0.1, 0.1)}
    weights["hysteresis"] = (6.0,) * 10
    moved = RuleNumbers([RULE.replace(answers=weights)], columns(2))(seen)
    plain = RuleNumbers([RULE], columns(2))(seen)[0]
    values = {name: set() for name in weights}
    for e, record in enumerate(moved):
        signals = signals_of(seen["context"][e], seen["servers"].shape[1])
        for name, row in weights.items():
            low, high = RANGES[name]
            want = plain[name] + sum(w * s for w, s in zip(row, signals, strict=True))
            assert record[name] == pytest.approx(min(max(want, low), high), rel=1e-4)
            values[name].add(float(record[name]))
        assert all(record[n] == plain[n] for n in moved.dtype.names if n not in weights)
    assert len(values["headroom_constant"]) == 6  # sites differ


def test_each_candidate_of_a_batch_answers_for_itself() -> None:
    seen = observation()
    rules = [RULE.replace(answers={"hysteresis": (0.1 * e,) * 10}) for e in range(6)]
    together = RuleNumbers(rules, columns(2))(seen).copy()
    for e, rule in enumerate(rules):
        one = {name: array[e : e + 1] for name, array in seen.items()}
        assert RuleNumbers([rule], columns(2))(one)[0] == together[e]


def test_answers_survive_a_round_trip_and_zeros_change_nothing() -> None:
    rule = RULE.replace(answers={"hysteresis": (0.0,) * 10})
    again = HeuristicConfig.from_dict(rule.to_dict())
    assert again == rule
    first, second = (
        evaluate(HeuristicPolicy(SHORT.config, one), SHORT, range(4)).metrics["episode_return"]
        for one in (RULE, again)
    )
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    "answers",
    [{"hysteresis": (1.0,)}, {"hysterisis": (0.0,) * 10}, {"hysteresis": (math.nan,) * 10}, "none"],
)
def test_answers_that_make_no_sense_are_refused(answers: Any) -> None:
    with pytest.raises(ConfigError, match="finite weights"):
        RULE.replace(answers=answers)


RECOGNISER = tuple(
    tuple(np.random.default_rng(c).normal(size=NUM_TERMS).tolist()) for c in range(3)
)
SITES = {"headroom_constant": (-1.0, 0.5, 2.0), "hysteresis": (0.0, 1.0, 2.5)}
BY_SITE = RULE.replace(sites=SITES, recogniser=RECOGNISER)


def test_terms_are_one_the_signals_and_their_products() -> None:
    seen = observation()
    num_servers = seen["servers"].shape[1]
    for row, terms in zip(
        seen["context"], terms_of(seen["context"], columns(2), num_servers), strict=True
    ):
        signals = signals_of(row, num_servers)
        products = [a * b for i, a in enumerate(signals) for b in signals[: i + 1]]
        assert terms == pytest.approx([1.0, *signals, *products], rel=1e-4, abs=1e-6)
        assert len(terms) == NUM_TERMS == 1 + len(SIGNALS) + 55


def test_numbers_are_mixed_by_how_likely_each_kind_is() -> None:
    seen = observation()
    terms = terms_of(seen["context"], columns(2), seen["servers"].shape[1])
    scores = terms @ np.array(RECOGNISER).T
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    answers = {"hysteresis": (0.1,) * len(SIGNALS)}
    for rule, move in ((BY_SITE, 0.0), (BY_SITE.replace(answers=answers), 0.1)):
        records = RuleNumbers([rule], columns(2))(seen)
        assert records["headroom_constant"] == pytest.approx(odds @ SITES["headroom_constant"])
        wanted = odds @ SITES["hysteresis"] + move * terms[:, 1:11].sum(axis=1)
        assert records["hysteresis"] == pytest.approx(wanted.clip(0.0, 3.0))
        assert (records["headroom_root"] == RULE.headroom_root).all()
    assert len(set(RuleNumbers([BY_SITE], columns(2))(seen)["hysteresis"].tolist())) == 6


def test_equal_numbers_at_all_sites_change_nothing() -> None:
    same = RULE.replace(sites={"hysteresis": (RULE.hysteresis,) * 3}, recogniser=RECOGNISER)
    again = HeuristicConfig.from_dict(json.loads(json.dumps(same.to_dict())))
    plain, recognising = (
        evaluate(HeuristicPolicy(SHORT.config, one), SHORT, range(4)).metrics["episode_return"]
        for one in (RULE, again)
    )
    np.testing.assert_array_equal(plain, recognising)


def test_a_shift_holds_at_every_site() -> None:
    shifted = BY_SITE.shifted("headroom_constant", 0.25)
    assert shifted.headroom_constant == RULE.headroom_constant + 0.25
    assert shifted.sites["headroom_constant"] == (-0.75, 0.75, 2.25)
    assert shifted.sites["hysteresis"] == SITES["hysteresis"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"sites": {"hysteresis": (1.0, 2.0)}}, "for each of the 3 kinds"),
        ({"sites": {"hysterisis": (0.0,) * 3}}, "for each of the 3 kinds"),
        ({"sites": {"hysteresis": (math.nan,) * 3}}, "for each of the 3 kinds"),
        ({"sites": {}}, "expected some numbers"),
        ({"sites": "none"}, "for each of the 3 kinds"),
        ({"recogniser": ()}, "for each of the 0 kinds"),
        ({"recogniser": ((1.0,),) * 3}, "66 finite weights"),
        ({"recogniser": 7}, "66 finite weights"),
    ],
)
def test_tables_that_make_no_sense_are_refused(changes: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        BY_SITE.replace(**changes)


def test_rules_that_recognise_other_numbers_of_sites_do_not_run_together() -> None:
    with pytest.raises(ConfigError, match="equally many sites"):
        RuleNumbers([RULE, BY_SITE], columns(2))


def test_the_search_learns_to_do_better_at_sites_it_has_not_seen() -> None:
    # A start that keeps far too much awake, so that a few generations must help.
    start = RULE.replace(headroom_constant=4.0)
    medians = []
    found = adapt_heuristic(
        start,
        SHORT,
        SearchConfig(evaluations=120, population=12, num_seeds=8, step=0.05, seed=0),
        lambda progress: medians.append(progress.generation_gain),
    )
    assert len(medians) == 10
    assert set(found.answers) == set(ANSWERING)
    assert all(len(row) == len(SIGNALS) for row in found.answers.values())
    better, worse = (
        evaluate(HeuristicPolicy(SHORT.config, one), SHORT, range(900, 932))
        for one in (found, start)
    )
    assert better.summary["episode_return"].mean > worse.summary["episode_return"].mean
