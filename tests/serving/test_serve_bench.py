"""The bench's own generator counts what was answered, and the bench its ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from servers import TOKEN, bare_server

from cloudsched.bench.load import generate, request_bytes
from cloudsched.bench.serve import BARE, OURS, PROXY, ServeBenchConfig, _bodies, _summary
from cloudsched.errors import CloudschedError


def test_the_generator_counts_answers_and_failures(tmp_path: Path) -> None:
    with bare_server(tmp_path) as client:
        port = client._address[1]
        body = json.dumps({"queue": []}).encode()
        load = generate(
            port, request_bytes("/v1/decisions", body, TOKEN), connections=3, seconds=0.5
        )
        assert load.num_requests > 10
        assert load.num_failed == 0
        assert load.percentile_ms(0.5) <= load.percentile_ms(0.99)
        wrong = generate(
            port, request_bytes("/v1/decisions", body, "wrong"), connections=1, seconds=0.2
        )
        assert wrong.num_failed == wrong.num_requests > 0


def test_the_bodies_of_the_bench_are_taken(tmp_path: Path) -> None:
    single, batch, message = _bodies(tmp_path, 8)
    with bare_server(tmp_path) as client:
        status, reply = client("POST", "/v1/decisions", raw=single.read_bytes())
        assert (status, len(reply["decisions"]) <= 1) == (200, True)
        status, reply = client("POST", "/v1/decisions/batch", raw=batch.read_bytes())
        assert (status, len(reply["replies"])) == (200, 8)
    assert len(message.read_bytes()) < len(single.read_bytes())


def test_ratios_are_of_ours_to_the_yardsticks() -> None:
    def entry(speed: float, p50: float) -> dict[str, float]:
        return {"requests_per_s": speed, "p50_ms": p50, "p90_ms": p50, "p99_ms": 2 * p50}

    cases = {
        # The machine is twice as fast in the second round; the third is a bad one for us.
        f"{OURS}/c16": [entry(900.0, 5.0), entry(1800.0, 2.5), entry(100.0, 20.0)],
        f"{BARE}/c16": [entry(1000.0, 4.0), entry(2000.0, 2.0), entry(1000.0, 4.0)],
        f"{PROXY}/c16": [entry(90.0, 40.0), entry(180.0, 20.0), entry(90.0, 40.0)],
        f"{OURS}/c1": [entry(500.0, 1.5)],
        f"{OURS}/batch": [entry(20.0, 50.0)],
        f"{BARE}/c1": [entry(600.0, 1.0)],
    }
    document = _summary(cases, 500, {"15": 0.1, "500": 0.2})
    ratios = document["ratios"]
    assert ratios[BARE] == pytest.approx(0.9)
    assert document["ratios_from_to"][BARE] == pytest.approx([0.1, 0.9])
    assert ratios[PROXY] == pytest.approx(10.0)
    assert ratios["p50_one_connection_over_bare"] == pytest.approx(1.5)
    assert ratios["p99_over_p50_at_16"] == pytest.approx(2.0)
    assert ratios["grpc_over_http_at_16"] is None
    assert document["batch_decisions_per_s"] == pytest.approx(10_000.0)
    with pytest.raises(CloudschedError, match="No contender 'nginx'"):
        ServeBenchConfig(contenders=("nginx",))
