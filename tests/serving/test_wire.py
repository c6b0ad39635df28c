"""The fast parser and the pydantic models take and refuse the same documents."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from conftest import document, make_service
from google.protobuf.json_format import ParseDict
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.heuristics.catalog import make_heuristic
from cloudsched.serving import schemas
from cloudsched.serving.documentation import OPERATIONS
from cloudsched.serving.errors import MalformedError, UnprocessableError
from cloudsched.serving.proto import cloudsched_pb2
from cloudsched.serving.rpc import decision_document
from cloudsched.serving.simulated import in_columns, request_of
from cloudsched.serving.wire import decoder

VALUES = st.one_of(
    st.integers(-3, 3),
    st.integers(min_value=2**20),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.sampled_from(["active", "asleep", "nonsense", "", None, [], [0.5, 0.5], {}, True]),
)


def mutated(document: Any, data: st.DataObject) -> Any:
    """Return a document with some of its parts changed, dropped or added."""
    if isinstance(document, dict):
        changed = {}
        for key, value in document.items():
            kind = data.draw(st.integers(0, 12))
            if kind == 0:
                continue
            changed[key] = data.draw(VALUES) if kind == 1 else mutated(value, data)
        if data.draw(st.integers(0, 12)) == 0:
            changed["surprise"] = 1
        return changed
    if isinstance(document, list):
        return [mutated(value, data) for value in document]
    return document


@settings(max_examples=400)
@given(data=st.data())
def test_both_parsers_agree(data: st.DataObject) -> None:
    operation = data.draw(st.sampled_from([o for o in OPERATIONS if o.request is not None]))
    assert operation.request is not None
    body = json.dumps(mutated(operation.example, data)).encode()
    try:
        expected = operation.request.model_validate_json(body, strict=True)
    except ValidationError:
        expected = None
    try:
        parsed = decoder(operation.request)(body)
    except UnprocessableError:
        parsed = None
    assert (parsed is None) == (expected is None), body
    if parsed is not None and expected is not None:
        assert msgspec.to_builtins(parsed) == expected.model_dump(mode="json")


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b'{"queue": NaN}', b"\xff\xfe"])
def test_what_is_no_json_is_malformed_or_refused(body: bytes) -> None:
    with pytest.raises((MalformedError, UnprocessableError)):
        decoder(schemas.DecisionRequest)(body)


def test_columns_are_the_same_request_as_rows() -> None:
    env = ClusterVectorEnv(3, workload="diurnal", load=0.9, copy=False)
    observation, _ = env.reset(seed=4)
    policy = make_heuristic("power_aware+headroom", env.config)
    for _ in range(300):
        observation, *_ = env.step(policy.act(observation))
    rows = [request_of(env.engine, e) for e in range(3)]
    parse = decoder(schemas.BatchRequest)
    service = make_service("best_fit+sleep")
    replies = [
        service.decide_batch(parse(json.dumps({"requests": some}).encode()))
        for some in (rows, list(map(in_columns, rows)))
    ]
    assert replies[0] == replies[1]
    assert any(reply.decisions for reply in replies[0].replies)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"servers": {"mode": ["active"] * 14}}, "14 servers for a fleet of 15"),
        ({"servers": {"mode": ["active"] * 15, "wake_left": [1]}}, "wake_left has 1 entries"),
        ({"running": {"server": [3], "demand": [0.1], "ticks_left": [2]}}, "has 1 numbers for 1"),
        ({"running": {"server": [3], "demand": [0.1, 0.1]}}, "ticks_left has 0 entries"),
        (
            {"running": {"server": [15], "demand": [0.1, 0.1], "ticks_left": [2]}},
            "the last one is 14",
        ),
        (
            {
                "servers": {"mode": ["asleep"] * 15},
                "running": {"server": [2], "demand": [0.1, 0.1], "ticks_left": [2]},
            },
            "server 2; it is not active",
        ),
        ({"queue": {"id": ["a", "a"], "demand": [0.1] * 4, "duration": [1, 1]}}, "same id"),
        ({"queue": {"id": ["a"], "demand": [0.1] * 2, "duration": []}}, "duration has 0 entries"),
        ({"queue": [{"id": "a", "demand": [0.1], "duration": 1}]}, "expected 2 numbers"),
    ],
)
def test_columns_that_do_not_fit_are_refused_with_their_place(
    fields: dict[str, Any], fault: str
) -> None:
    batch = document("BatchRequest", requests=[{}, fields])
    with pytest.raises(UnprocessableError, match=r"requests\[1\]: .*" + fault):
        make_service("best_fit+sleep").decide_batch(batch)


JOB = {"id": ["a"], "demand": [0.5, 0.5], "duration": [3]}


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"servers": {"mode": [0] * 15, "wake_left": [-1] * 15}}, "number of ticks"),
        ({"servers": {"mode": [0] * 15, "idle_ticks": [0] * 14 + [10**6 + 1]}}, "number of ticks"),
        ({"servers": {"mode": [4] * 15}}, "servers.mode"),
        ({"queue": {**JOB, "duration": [0]}}, "number of ticks"),
        ({"queue": {**JOB, "waited": [-1]}}, "number of ticks"),
        ({"queue": {**JOB, "laxity": [-(10**6) - 1]}}, "number of ticks"),
        ({"queue": {**JOB, "demand": [0.5, "NaN"]}}, "a demand"),
        ({"queue": {**JOB, "demand": ["Infinity", 0.5]}}, "a demand"),
        ({"queue": {**JOB, "demand": [-0.5, 0.5]}}, "a demand"),
        ({"running": {"server": [0], "demand": [0.5, 0.5], "ticks_left": [0]}}, "number of ticks"),
        ({"running": {"server": [-1], "demand": [0.5, 0.5], "ticks_left": [1]}}, "on server -1"),
    ],
)
def test_numbers_of_a_message_are_checked(fields: dict[str, Any], fault: str) -> None:
    service = make_service("best_fit+sleep")
    service.decide(decision_document(ParseDict({"queue": JOB}, cloudsched_pb2.DecisionRequest())))
    message = ParseDict(fields, cloudsched_pb2.DecisionRequest())
    with pytest.raises(UnprocessableError, match=fault):
        service.decide(decision_document(message))
