"""Whatever is sent: no 5xx, no hang, no growth, and full speed again afterwards."""

from __future__ import annotations

import gc
import json
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from servers import TOKEN, Client, bare_server, flood, malformed, send_case

from cloudsched.bench.load import generate, request_bytes
from cloudsched.serving.documentation import DECISION, documentation_app

NUM_MALFORMED = 10_000

schema = schemathesis.openapi.from_dict(documentation_app().openapi())


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with bare_server(tmp_path_factory.mktemp("bad"), policy="best_fit+sleep") as client:
        yield client


@schema.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_documents_made_from_the_openapi_document(case: Any, client: Client) -> None:
    """Valid ones and broken ones, for every call."""
    send_case(case, client._address[1], TOKEN)


def test_ten_thousand_malformed_bodies(client: Client) -> None:
    generator = random.Random(0)
    whole = json.dumps(DECISION).encode()
    paths = ("/v1/decisions", "/v1/decisions/batch", "/v1/clusters", "/v1/clusters/x/events")
    paths += ("/k8s/filter", "/k8s/prioritize", "/v1/policies")
    process = psutil.Process(os.getpid())  # the server is a thread of this process
    statuses: Counter[int] = Counter()
    memory = 0
    for number in range(NUM_MALFORMED):
        body = malformed(generator, whole)
        status, _ = client("POST", generator.choice(paths), raw=body)
        statuses[status] += 1
        if number == NUM_MALFORMED // 4:
            gc.collect()
            memory = process.memory_info().rss
    gc.collect()
    assert set(statuses) <= {200, 201, 400, 404, 409, 422}, statuses
    assert statuses[400] + statuses[422] > 0.5 * NUM_MALFORMED
    assert process.memory_info().rss < memory + 64 * 2**20
    assert client("POST", "/v1/decisions", DECISION)[0] == 200


def test_a_client_that_sends_half_a_request_holds_up_nobody(client: Client) -> None:
    port = client._address[1]
    half = request_bytes("/v1/decisions", b"x" * 1000, TOKEN)[:-500]
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    for connection in idle:
        connection.sendall(half)
    started = time.monotonic()
    assert client("POST", "/v1/decisions", DECISION)[0] == 200
    assert time.monotonic() - started < 5.0
    for connection in idle:
        connection.close()
    # A head with nonsense in it.
    for head in (
        b"\x00\xff garbage\r\n\r\n",
        b"POST /v1/decisions HTTP/9.9\r\n\r\n",
        b"GET\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(head)
            assert b" 500 " not in connection.recv(4096)


def test_overload_is_refused_cleanly_and_leaves_no_trace(tmp_path: Path) -> None:
    with bare_server(tmp_path, limits={"max_in_flight": 8}) as client:
        port = client._address[1]
        request = request_bytes("/v1/decisions", json.dumps(DECISION).encode(), TOKEN)
        generate(port, request, connections=4, seconds=0.5)  # warm
        before = generate(port, request, connections=4, seconds=1.0)
        assert before.num_failed == 0
        statuses = flood(port, TOKEN, num_callers=40, seconds=2.0)
        assert set(statuses) <= {200, 503}
        assert statuses[200] > 0
        after = max(generate(port, request, connections=4, seconds=1.0).per_s for _ in range(3))
        assert after > 0.5 * before.per_s  # the machine may be busy with other things


def test_a_wrong_token_is_refused_before_the_body_is_read(client: Client) -> None:
    port = client._address[1]
    request = request_bytes("/v1/decisions", b"", "wrong").replace(
        b"Content-Length: 0", b"Content-Length: 1000000"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(request)
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")
