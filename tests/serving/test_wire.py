"""The fast parser and the pydantic models take and refuse the same documents."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cloudsched.serving import schemas
from cloudsched.serving.documentation import OPERATIONS
from cloudsched.serving.errors import MalformedError, UnprocessableError
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
