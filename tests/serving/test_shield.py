"""The shield: whatever a policy does, what leaves is legal, and it is said why."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import document, make_service
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudsched.errors import ConfigError
from cloudsched.heuristics.random import RandomPolicy
from cloudsched.serving.shield import Breaker, ShieldSettings
from cloudsched.serving.versions import Version

QUEUE = [{"id": f"j{i}", "demand": [0.3, 0.3], "duration": 5} for i in range(4)]


class Broken:
    """A policy that fails in a chosen way."""

    def __init__(self, fail: Callable[[Any], Any]) -> None:
        self._fail = fail

    def reset(self, num_clusters: int) -> None:
        pass

    def weigh(self, observation: Any) -> Any:
        return self._fail(observation)


def out_of_range(observation: Any) -> Any:
    mask = observation["action_mask"]
    return np.full(len(mask), mask.shape[1] + 5), np.full(mask.shape, 0.1, np.float32)


def illegal(observation: Any) -> Any:
    mask = observation["action_mask"]
    return mask.argmin(axis=1), np.full(mask.shape, 0.1, np.float32)


def not_a_number(observation: Any) -> Any:
    mask = observation["action_mask"]
    return mask.argmax(axis=1), np.full(mask.shape, np.nan, np.float32)


def raises(observation: Any) -> Any:
    raise RuntimeError("no idea")


def slow(observation: Any) -> Any:
    time.sleep(0.05)
    mask = observation["action_mask"]
    return mask.argmax(axis=1), np.full(mask.shape, 0.1, np.float32)


def service_with(policy: Any, monkeypatch: pytest.MonkeyPatch, **shield: Any) -> Any:
    options = {"sla_cap": 1.0, "deadline_s": 0.02, "cooldown_s": 60.0, **shield}
    service = make_service("rr", shield=ShieldSettings(**options))
    desk = service.desk("default")
    desk.policies[service.versions.active] = policy
    return service


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (out_of_range, "policy_nonsense"),
        (illegal, "policy_nonsense"),
        (not_a_number, "policy_nonsense"),
        (raises, "policy_error"),
        (slow, "policy_timeout"),
    ],
)
def test_a_policy_that_fails_is_replaced_by_the_safe_rule(
    fail: Callable[[Any], Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = service_with(Broken(fail), monkeypatch)
    reply = service.decide(document("DecisionRequest", queue=QUEUE))
    assert [note.reason for note in reply.interventions] == [reason]
    expected = make_service("best_fit+sleep").decide(document("DecisionRequest", queue=QUEUE))
    assert [(d.kind, d.job, d.server) for d in reply.decisions] == [
        (d.kind, d.job, d.server) for d in expected.decisions
    ]
    counted = service.measures.of("rr").interventions
    assert counted == {reason: 1}
    again = service.decide(document("DecisionRequest", queue=QUEUE))
    assert again.interventions[0].reason == ("suspended" if fail is slow else reason)


def test_in_a_batch_only_the_cluster_that_fails_is_overruled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def half_broken(observation: Any) -> Any:
        mask = observation["action_mask"]
        wait = mask.shape[1] - 1
        has_jobs = observation["jobs"][:, 0, -1] > 0
        actions = np.where(has_jobs, wait + 7, wait)
        return actions, np.full(mask.shape, 0.1, np.float32)

    service = service_with(Broken(half_broken), monkeypatch)
    requests = [{"queue": QUEUE}, {"queue": []}, {"queue": QUEUE}]
    replies = service.decide_batch(document("BatchRequest", requests=requests)).replies
    assert [len(reply.interventions) for reply in replies] == [1, 0, 1]
    assert [bool(reply.decisions) for reply in replies] == [True, False, True]


def test_too_many_violations_switch_a_cluster_to_the_safe_rule_until_it_recovers() -> None:
    shield = ShieldSettings(sla_cap=0.1, sla_recovery=0.05, window_jobs=10)
    service = make_service("rr", shield=shield)

    def reasons(arrived: int, violations: int, *, is_tripped: bool = False) -> list[str]:
        window = {"arrived": arrived, "violations": violations, "is_tripped": is_tripped}
        request = document("DecisionRequest", queue=QUEUE, sla_window=window)
        return [note.reason for note in service.decide(request).interventions]

    assert reasons(100, 10) == []
    assert reasons(100, 11) == ["sla_cap"]
    assert reasons(100, 7, is_tripped=True) == ["sla_cap"]
    assert reasons(100, 5, is_tripped=True) == []
    assert reasons(5, 5) == []  # too few jobs to judge by


def test_a_breaker_lets_go_after_its_time() -> None:
    breaker = Breaker(0.01)
    assert not breaker.is_suspended("v")
    breaker.trip("v")
    assert breaker.is_suspended("v")
    assert not breaker.is_suspended("w")
    time.sleep(0.02)
    assert not breaker.is_suspended("v")


def test_nonsense_settings_are_refused() -> None:
    for values in ({"sla_cap": 2.0}, {"window_ticks": 0}, {"deadline_s": 0.0}):
        with pytest.raises(ConfigError):
            ShieldSettings(**values)


@settings(max_examples=40)
@given(data=st.data())
def test_no_decision_sequence_breaks_capacity(data: st.DataObject) -> None:
    """Commands are carried out by plain arithmetic, apart from the simulator."""
    num_servers = data.draw(st.integers(1, 5))
    numbers = st.floats(0.0, 1.2)
    capacity = [[data.draw(st.floats(0.1, 1.0)) for _ in range(2)] for _ in range(num_servers)]
    modes = [data.draw(st.sampled_from(["active", "waking", "asleep", "failed"])) for _ in capacity]
    fleet = {
        "resources": ["cpu", "memory"],
        "servers": [{"capacity": c, "idle_w": 100.0, "max_w": 300.0} for c in capacity],
    }
    running = [
        {"server": n, "demand": [0.4 * c for c in capacity[n]], "ticks_left": 3}
        for n in range(num_servers)
        if modes[n] == "active" and data.draw(st.booleans())
    ]
    queue = [
        {"id": str(i), "demand": [data.draw(numbers), data.draw(numbers)], "duration": 4}
        for i in range(data.draw(st.integers(0, 8)))
    ]
    request = document(
        "DecisionRequest",
        fleet=fleet,
        servers=[{"mode": mode} for mode in modes],
        running=running,
        queue=queue,
    )
    service = make_service("random")
    reply = service.decide(request)
    free = np.array(capacity)
    for job in running:
        free[job["server"]] -= job["demand"]
    busy = {job["server"] for job in running}
    demand = {job["id"]: np.array(job["demand"]) for job in queue}
    for decision in reply.decisions:
        n = decision.server
        if decision.kind == "place":
            assert modes[n] == "active"
            free[n] -= demand.pop(decision.job)
            assert (free[n] >= -1e-5).all()
            busy.add(n)
        elif decision.kind == "sleep":
            assert modes[n] == "active"
            assert n not in busy
            modes[n] = "asleep"
        else:
            assert modes[n] == "asleep"
            modes[n] = "waking"


def test_a_version_that_cannot_serve_a_fleet_falls_back(bundle_folder: Path) -> None:
    service = make_service(str(bundle_folder))
    fleet = {
        "resources": ["cpu", "memory", "gpu"],
        "servers": [{"capacity": [1.0, 1.0, 1.0], "idle_w": 100.0, "max_w": 300.0}],
    }
    queue = [{"id": "a", "demand": [0.1, 0.1, 0.1], "duration": 3}]
    reply = service.decide(document("DecisionRequest", fleet=fleet, queue=queue))
    assert reply.interventions[0].reason == "policy_error"
    assert "resources" in reply.interventions[0].detail
    assert reply.decisions[0].job == "a"


def test_versions_are_compared_by_identity() -> None:
    assert Version(name="a", source="rr") != Version(name="a", source="rr")
    assert isinstance(Version(name="r", source="random").policy(None, None), RandomPolicy)  # type: ignore[arg-type]
