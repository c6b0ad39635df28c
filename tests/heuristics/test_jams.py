"""The order in which a rule places jobs in a jam, and the search for it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.observation import columns
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.evaluation import evaluate
from cloudsched.heuristics.adapting import SearchConfig
from cloudsched.heuristics.adaptive import RuleNumbers
from cloudsched.heuristics.catalog import HEURISTICS
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.heuristics.jams import NAMES, learn_jam
from cloudsched.heuristics.parameters import HeuristicConfig
from cloudsched.heuristics.tuning import Scorer, plain_policy

WORST_FIT = HEURISTICS["worst_fit"].config
RULE = HEURISTICS["power_aware+headroom"].config
JAM = {"order_size": -40.0, "scan_depth": 5.0}
OVERLOAD = Scenario(workload="poisson", load=1.15, settings={"episode_ticks": 200})
AWAKE = columns(2).awake
SEARCH = SearchConfig(evaluations=24, population=6, num_seeds=8, step=0.06, seed=0)


def seen_with_queues() -> tuple[dict[str, Any], np.ndarray]:
    """Return observations of busy clusters with queues of different length, and the lengths."""
    env = ClusterVectorEnv(8, copy=False, **OVERLOAD.to_dict())
    seen, _ = env.reset(seed=1)
    policy = HeuristicPolicy(env.config, RULE)
    for _ in range(700):
        seen, *_ = env.step(policy.act(seen))
    seen["context"][:, AWAKE] = 1.0
    return seen, env.engine.state.clusters["queue_length"].copy()


@pytest.mark.parametrize("is_moving", [False, True])
def test_the_numbers_of_a_jam_hold_from_its_queue_on_if_no_server_sleeps(is_moving: bool) -> None:
    seen, queue = seen_with_queues()
    assert len(set(queue)) > 2
    limit = int(np.sort(queue)[4])
    rests = int(np.argmax(queue))
    seen["context"][rests, AWAKE] = 14 / 15
    answers = {"hysteresis": (0.1,) * 10} if is_moving else {}
    rule = RULE.replace(answers=answers)
    plain = np.broadcast_to(RuleNumbers([rule], columns(2))(seen), 8)
    numbers = RuleNumbers([rule.replace(jam_queue=limit / 15, jam=JAM)], columns(2))(seen)
    for e in range(8):
        want = JAM if queue[e] >= limit and e != rests else {}
        for name in numbers.dtype.names:
            if name != "jam_queue":
                assert numbers[e][name] == want.get(name, plain[e][name]), (e, name)


def test_each_candidate_of_a_batch_has_a_jam_of_its_own() -> None:
    seen, queue = seen_with_queues()
    rules = [RULE.replace(jam_queue=0.1 * e, jam={"scan_depth": 1.0 + e}) for e in range(8)]
    together = RuleNumbers(rules, columns(2))(seen).copy()
    for e, rule in enumerate(rules):
        one = {name: array[e : e + 1] for name, array in seen.items()}
        assert RuleNumbers([rule], columns(2))(one)[0] == together[e]
        assert (together[e]["scan_depth"] == 1.0 + e) == (queue[e] >= 1.5 * e)


def test_a_jam_survives_a_round_trip_and_moves_with_a_shift() -> None:
    rule = RULE.replace(jam_queue=0.5, jam=JAM | {"headroom_constant": 2.0})
    assert HeuristicConfig.from_dict(rule.to_dict()) == rule
    assert rule.shifted("headroom_constant", 0.5).jam["headroom_constant"] == 2.5


@pytest.mark.parametrize("jam", [{"jam_queue": 1.0}, {"scan_dept": 1.0}, {"scan_depth": math.nan}])
def test_jams_that_make_no_sense_are_refused(jam: Any) -> None:
    with pytest.raises(ConfigError, match="finite numbers for some of"):
        RULE.replace(jam=jam)


def test_what_is_learned_for_a_jam_returns_more_on_other_arrivals() -> None:
    found = learn_jam(RULE, OVERLOAD, SEARCH, lambda _: None)
    assert set(found.jam) == set(NAMES) - {"jam_queue"}
    assert found.replace(jam={}, jam_queue=RULE.jam_queue) == RULE  # nothing else has changed
    before, after = (
        evaluate(HeuristicPolicy(OVERLOAD.config, rule), OVERLOAD, range(900_000, 900_032))
        for rule in (RULE, found)
    )
    gain = after.metrics["episode_return"] - before.metrics["episode_return"]
    assert gain.mean() > 3.0 * gain.std() / np.sqrt(len(gain))


def test_a_price_of_the_rate_is_charged_by_share_of_jobs_and_tick() -> None:
    free, charged = (
        Scorer([OVERLOAD], [3, 4], plain_policy, price)([RULE, WORST_FIT])[0]
        for price in (0.0, 5.0)
    )
    for row, rule in enumerate((RULE, WORST_FIT)):
        metrics = evaluate(HeuristicPolicy(OVERLOAD.config, rule), OVERLOAD, [3, 4]).metrics
        assert (metrics["sla_violation_rate"] > 0.0).all()
        assert free[row] == pytest.approx(metrics["episode_return"])
        assert free[row] - charged[row] == pytest.approx(5.0 * 200 * metrics["sla_violation_rate"])


def test_where_nothing_is_late_the_rule_stays_as_it_is() -> None:
    calm = Scenario(workload="poisson", load=0.2, settings={"episode_ticks": 60})
    rule = HEURISTICS["power_aware"].config
    assert learn_jam(rule, calm, SEARCH, lambda _: None) is rule
