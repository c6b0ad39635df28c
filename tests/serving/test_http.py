"""The HTTP API on a real server: every call, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gymnasium.vector import AutoresetMode
from servers import TOKEN, Client, bare_server

from cloudsched.commands.policies import make_policy
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.scenario import Scenario
from cloudsched.evaluation import evaluate
from cloudsched.serving.documentation import OPERATIONS
from cloudsched.serving.simulated import drive

FLEET = {
    "resources": ["cpu", "memory"],
    "servers": [
        {"capacity": [1.0, 1.0], "idle_w": 100.0, "max_w": 300.0},
        {"capacity": [0.5, 0.5], "idle_w": 50.0, "max_w": 100.0},
    ],
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with bare_server(tmp_path_factory.mktemp("bare"), policy="best_fit+sleep") as client:
        yield client


def job(name: str, cpu: float = 0.25, memory: float = 0.25, duration: int = 10) -> dict[str, Any]:
    return {"id": name, "demand": [cpu, memory], "duration": duration}


def test_one_decision_after_another(client: Client) -> None:
    queue = [job("a", 0.5, 0.5), job("b", 0.75, 0.75)]
    status, reply = client("POST", "/v1/decisions", {"fleet": FLEET, "queue": queue})
    assert status == 200
    placed = {d["job"]: d["server"] for d in reply["decisions"] if d["kind"] == "place"}
    assert placed == {"a": 1, "b": 0}
    assert reply["policy"] == "best_fit+sleep"
    assert reply["ended_by"] == "wait"
    assert reply["interventions"] == []


def test_probabilities_and_alternatives_of_a_network(tmp_path: Path, bundle_folder: Path) -> None:
    with bare_server(tmp_path, policy=str(bundle_folder)) as client:
        request = {"queue": [job("a"), job("b")], "alternatives": 5}
        status, reply = client("POST", "/v1/decisions", request)
        assert status == 200
        decision = reply["decisions"][0]
        assert 0.0 < decision["probability"] < 1.0
        chances = [other["probability"] for other in decision["alternatives"]]
        assert len(chances) == 5
        assert chances == sorted(chances, reverse=True)
        assert decision["probability"] + sum(chances) <= 1.0 + 1e-5
        status, listed = client("GET", "/v1/policies")
        assert listed["policies"][0]["training"] == {"algorithm": "none"}
        assert len(listed["policies"][0]["weights_sha256"]) == 64


def test_an_episode_over_http_is_that_of_an_evaluation(client: Client) -> None:
    scenario = Scenario(workload="diurnal", settings={"episode_ticks": 40}, load=0.7)
    expected = evaluate(make_policy("best_fit+sleep", scenario.config), scenario, [11, 12])
    env = ClusterVectorEnv(
        2, **scenario.to_dict(), copy=False, autoreset_mode=AutoresetMode.DISABLED
    )
    env.reset(seed=[11, 12])
    taken = drive(env, client.ask)
    assert [len(actions) for actions in taken] == expected.metrics["decisions"].tolist()
    energy_kwh = env.engine.state.clusters["energy_j"] / 3.6e6
    assert energy_kwh.tolist() == expected.metrics["energy_kwh"].tolist()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"servers": [{"mode": "active"}]}, "1 servers for a fleet of 2"),
        ({"running": [{"server": 7, "demand": [0.1, 0.1], "ticks_left": 1}]}, "server 7"),
        ({"running": [{"server": 0, "demand": [2.0, 0.1], "ticks_left": 1}]}, "use 2"),
        ({"running": [{"server": 0, "demand": [0.1], "ticks_left": 1}]}, "expected 2 numbers"),
        ({"queue": [job("a"), job("a")]}, "same id"),
        ({"queue": [{**job("a"), "duration": 0}]}, "duration"),
        ({"queue": [{**job("a"), "priority": 1}]}, "unknown field"),
        ({"fleet": "nowhere"}, "No fleet named 'nowhere'"),
        ({"fleet": {"resources": ["cpu"], "servers": []}}, "length >= 1"),
    ],
)
def test_a_state_that_cannot_be_is_refused(
    client: Client, change: dict[str, Any], complaint: str
) -> None:
    status, reply = client("POST", "/v1/decisions", {"fleet": FLEET, **change})
    assert status == (404 if "fleet named" in complaint else 422)
    assert complaint in reply["error"]


def test_a_sleeping_server_with_a_job_is_refused(client: Client) -> None:
    request = {
        "fleet": FLEET,
        "servers": [{"mode": "asleep"}, {"mode": "active"}],
        "running": [{"server": 0, "demand": [0.1, 0.1], "ticks_left": 1}],
    }
    status, reply = client("POST", "/v1/decisions", request)
    assert (status, "not active" in reply["error"]) == (422, True)


def test_who_does_not_know_the_token_is_refused(client: Client) -> None:
    for token in ("", "wrong", TOKEN + "x"):
        stranger = Client(client._address[1], token)
        status, reply = stranger("POST", "/v1/decisions", {})
        assert status == 401
        assert "Bearer" in reply["error"]
        assert stranger.headers["www-authenticate"] == "Bearer"
        assert stranger("GET", "/healthz")[0] == 200
        assert stranger("GET", "/readyz")[0] == 200
        stranger.close()


def test_paths_and_methods_that_do_not_exist(client: Client) -> None:
    assert client("GET", "/v1/nothing")[0] == 404
    assert client("GET", "/v1/decisions")[0] == 405
    assert client("DELETE", "/v1/policies/active")[0] == 409
    assert client("DELETE", "/v1/policies/other")[0] == 404


def test_every_call_is_in_the_openapi_document_with_an_example(client: Client) -> None:
    status, document = client("GET", "/openapi.json")
    assert status == 200
    for operation in OPERATIONS:
        described = document["paths"][operation.path][operation.method.lower()]
        if operation.example is not None:
            content = described["requestBody"]["content"]["application/json"]
            assert operation.example in (
                content.get("example"),
                *(e["value"] for e in content.get("examples", {}).values()),
            )


def test_the_examples_of_the_document_work(client: Client) -> None:
    for operation in OPERATIONS:
        if operation.example is None:
            continue
        path = operation.path.replace("{id}", "edge-7")
        status, reply = client(operation.method, path, operation.example)
        assert status == operation.status, (path, reply)
    assert client("DELETE", "/v1/policies/canary")[0] == 200


def test_metrics_are_prometheus_text(client: Client) -> None:
    client("POST", "/v1/decisions", {"queue": [job("a")]})
    status, text = client("GET", "/metrics")
    assert status == 200
    for name in ("decisions_total", "decision_seconds_bucket", "policy_version_info"):
        assert f"cloudsched_{name}{{" in text
    samples = [line for line in text.splitlines() if line and line[0] != "#"]
    assert all(math.isfinite(float(line.rsplit(" ", 1)[1])) for line in samples)


def test_kubernetes_gets_fitting_nodes_and_scores(client: Client) -> None:
    def node(name: str, cpu: str, **notes: str) -> dict[str, Any]:
        annotations = {f"cloudsched.io/{k.replace('_', '-')}": v for k, v in notes.items()}
        return {
            "metadata": {"name": name, "annotations": annotations, "uid": "kept"},
            "status": {"allocatable": {"cpu": cpu, "memory": "8Gi"}},
        }

    nodes = [
        node("small", "1"),
        node("full", "4", used='{"cpu": "3900m", "memory": "1Gi"}'),
        node("asleep", "4", mode="asleep"),
        node("good", "4", used='{"cpu": "1", "memory": "1Gi"}'),
        node("empty", "4"),
    ]
    pod = {
        "metadata": {"name": "web"},
        "spec": {"containers": [{"resources": {"requests": {"cpu": "2", "memory": "1Gi"}}}]},
    }
    arguments = {"Pod": pod, "Nodes": {"items": nodes}, "NodeNames": None}
    status, result = client("POST", "/k8s/filter", arguments)
    assert status == 200
    assert result["NodeNames"] == ["good", "empty"]
    assert set(result["FailedNodes"]) == {"small", "full", "asleep"}
    assert [item["metadata"]["uid"] for item in result["Nodes"]["items"]] == ["kept", "kept"]
    # A kube-scheduler sends no headers: its token is in the path.
    scheduler = Client(client._address[1], "")
    assert scheduler("POST", "/k8s/prioritize", arguments)[0] == 401
    assert scheduler("POST", "/k8s/wrong/prioritize", arguments)[0] == 401
    status, scores = scheduler("POST", f"/k8s/{TOKEN}/prioritize", arguments)
    assert status == 200
    by_host = {entry["Host"]: entry["Score"] for entry in scores}
    assert by_host["good"] == 10  # best fit: the one that is left with less
    assert by_host["good"] > by_host["empty"] > by_host["full"] == 0
    scheduler.close()


def test_too_large_too_often_too_many(tmp_path: Path) -> None:
    limits = {"max_body_bytes": 2000, "rate_per_s": 1.0, "burst": 5}
    with bare_server(tmp_path, limits=limits) as client:
        status, reply = client("POST", "/v1/decisions", raw=b" " * 3000)
        assert (status, "2000" in reply["error"]) == (413, True)
        client.close()
        statuses = [client("POST", "/v1/decisions", {})[0] for _ in range(8)]
        assert statuses[:4] == [200] * 4
        assert statuses[-1] == 429
        assert client.headers["retry-after"] == "1"
