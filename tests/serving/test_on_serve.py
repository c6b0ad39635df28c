"""The whole service on Ray Serve behind HAProxy, as `cloudsched serve` starts it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import schemathesis
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from gymnasium.vector import AutoresetMode
from hypothesis import HealthCheck, Phase, settings
from servers import Client, flood, malformed, processes, send_case, serve_process

from cloudsched.bench.load import generate, request_bytes
from cloudsched.commands.policies import make_policy
from cloudsched.datasets.check import check_dataset
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.scenario import Scenario
from cloudsched.evaluation import evaluate
from cloudsched.serving.documentation import DECISION, documentation_app
from cloudsched.serving.proto import cloudsched_pb2, cloudsched_pb2_grpc
from cloudsched.serving.rpc_client import decision_message_of
from cloudsched.serving.simulated import drive

pytestmark = [pytest.mark.ray, pytest.mark.slow]

messages: Any = cloudsched_pb2

NUM_MALFORMED = 10_000
IN_FLIGHT = 16  # that one replica takes; few, so that a test can overload it
schema = schemathesis.openapi.from_dict(documentation_app().openapi())
EXAMPLES = Path(__file__).parents[2] / "serve"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def service(folder: Path, bundle_folder: Path) -> Iterator[dict[str, Any]]:
    options = ["--bundle", str(bundle_folder), "--log-dir", str(folder / "log")]
    options += ["--shield.sla-cap", "1.0", "--min-replicas", "2"]
    options += ["--limits.max-in-flight", str(IN_FLIGHT)]
    with serve_process(folder, *options) as running:
        yield running


@pytest.fixture
def client(service: dict[str, Any]) -> Iterator[Client]:
    client = Client(service["port"], service["token"])
    yield client
    client.close()


@pytest.fixture(scope="module")
def channel(service: dict[str, Any]) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(service["grpc"]) as channel:
        yield channel


def test_an_episode_through_haproxy_and_serve_is_that_of_an_evaluation(
    client: Client, bundle_folder: Path
) -> None:
    scenario = Scenario(workload="poisson", settings={"episode_ticks": 60}, load=0.7)
    policy = make_policy(str(bundle_folder), scenario.config)
    expected = evaluate(policy, scenario, [21, 22, 23])
    env = ClusterVectorEnv(
        3, **scenario.to_dict(), copy=False, autoreset_mode=AutoresetMode.DISABLED
    )
    env.reset(seed=[21, 22, 23])
    taken = drive(env, client.ask)
    assert [len(actions) for actions in taken] == expected.metrics["decisions"].tolist()
    energy_kwh = env.engine.state.clusters["energy_j"] / 3.6e6
    assert energy_kwh.tolist() == expected.metrics["energy_kwh"].tolist()


def test_grpc_decides_as_http_does(
    client: Client, channel: grpc.Channel, service: dict[str, Any]
) -> None:
    stub = cloudsched_pb2_grpc.SchedulerStub(channel)
    token = [("authorization", f"Bearer {service['token']}")]
    message = messages.DecisionRequest(
        servers=messages.Servers(mode=[0] * 14 + [2], idle_ticks=range(15)),
        running=messages.RunningJobs(
            server=[3, 4], demand=[0.5, 0.5, 0.25, 0.25], ticks_left=[3, 9]
        ),
        queue=messages.QueuedJobs(id=["a", "b"], demand=[0.5, 0.25, 0.125, 0.5], duration=[4, 30]),
        alternatives=3,
    )
    document = {
        "servers": [
            {"mode": "asleep" if n == 14 else "active", "idle_ticks": n} for n in range(15)
        ],
        "running": [
            {"server": 3, "demand": [0.5, 0.5], "ticks_left": 3},
            {"server": 4, "demand": [0.25, 0.25], "ticks_left": 9},
        ],
        "queue": [
            {"id": "a", "demand": [0.5, 0.25], "duration": 4},
            {"id": "b", "demand": [0.125, 0.5], "duration": 30},
        ],
    }
    status, expected = client("POST", "/v1/decisions", document)
    assert status == 200
    reply = stub.Decide(message, metadata=token)
    assert [(d.kind, d.job, d.server) for d in reply.decisions] == [
        (d["kind"], d["job"] or "", d["server"]) for d in expected["decisions"]
    ]
    assert reply.decisions[0].probability == pytest.approx(expected["decisions"][0]["probability"])
    assert len(reply.decisions[0].alternatives) == 3
    batch = stub.DecideBatch(messages.BatchRequest(requests=[message] * 3), metadata=token)
    assert [list(r.decisions) for r in batch.replies] == [list(reply.decisions)] * 3
    assert stub.ListPolicies(messages.Nothing(), metadata=token).policies[0].role == "active"


def test_grpc_keeps_clusters_and_refuses_with_a_status(
    channel: grpc.Channel, service: dict[str, Any]
) -> None:
    stub = cloudsched_pb2_grpc.SchedulerStub(channel)
    token = [("authorization", f"Bearer {service['token']}")]
    view = stub.CreateCluster(messages.ClusterRequest(id="over-grpc"), metadata=token)
    assert (view.tick, len(view.servers)) == (-1, 15)
    arrival = messages.Arrival(job="x", demand=[0.1, 0.1], duration=5)
    events = [
        messages.Event(id="1", tick=messages.Nothing()),
        messages.Event(id="2", arrival=arrival),
    ]
    reply = stub.PostEvents(
        messages.EventsRequest(cluster="over-grpc", events=events), metadata=token
    )
    assert list(reply.applied) == ["1", "2"]
    assert stub.GetCluster(messages.ClusterName(id="over-grpc"), metadata=token).tick == 0
    for call, request, metadata, expected in (
        (stub.Decide, messages.DecisionRequest(), [], "UNAUTHENTICATED"),
        (stub.GetCluster, messages.ClusterName(id="nobody"), token, "NOT_FOUND"),
        (
            stub.PostEvents,
            messages.EventsRequest(
                cluster="over-grpc",
                events=[messages.Event(id="9", completion=messages.Completion(job="no"))],
            ),
            token,
            "FAILED_PRECONDITION",
        ),
        (
            stub.Decide,
            messages.DecisionRequest(queue=messages.QueuedJobs(id=["a"], duration=[1])),
            token,
            "INVALID_ARGUMENT",
        ),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(request, metadata=metadata)
        assert caught.value.code().name == expected
        assert "Traceback" not in caught.value.details()


def test_grpc_reflection_lists_the_service(channel: grpc.Channel) -> None:
    assert "cloudsched.v1.Scheduler" in ProtoReflectionDescriptorDatabase(channel).get_services()


def test_a_new_version_is_loaded_without_a_lost_request(
    client: Client, service: dict[str, Any]
) -> None:
    stop, failures, policies = threading.Event(), [], set()

    def load() -> None:
        caller = Client(service["port"], service["token"])
        while not stop.is_set():
            status, reply = caller("POST", "/v1/decisions", {"cluster": "reload"})
            if status != 200:
                failures.append((status, reply))
            else:
                policies.add(reply["policy"])
        caller.close()

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    first = client("GET", "/v1/policies")[1]["policies"][0]["source"]
    for source in ("power_aware+headroom", "rr+sleep"):
        status, listed = client("POST", "/v1/policies", {"source": source})
        assert (status, listed["policies"][0]["name"]) == (200, source)
        _wait_for(lambda s=source: _everyone_uses(service, s))
    status, reply = client("POST", "/v1/policies", {"source": "no_such_rule"})
    assert (status, "no_such_rule" in reply["error"]) == (422, True)
    assert client("POST", "/v1/policies", {"source": first})[0] == 200
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert {"power_aware+headroom", "rr+sleep"} <= policies


def test_canary_and_shadow_are_measured_side_by_side(
    client: Client, service: dict[str, Any]
) -> None:
    canary = {"source": "rr", "role": "canary", "share": 0.5}
    assert client("POST", "/v1/policies", canary)[0] == 200
    assert client("POST", "/v1/policies", {"source": "worst_fit", "role": "shadow"})[0] == 200
    _wait_for(lambda: _roles(service) == {"active", "canary", "shadow"})
    time.sleep(0.7)  # the other replica looks at the board twice a second
    queue = [{"id": "a", "demand": [0.1, 0.1], "duration": 5}]
    answered: dict[str, set[str]] = {}
    for i in range(60):
        request = {"cluster": f"cluster-{i % 20}", "queue": queue}
        reply = client("POST", "/v1/decisions", request)[1]
        answered.setdefault(reply["cluster"], set()).add(reply["policy"])
    assert all(len(versions) == 1 for versions in answered.values())  # a cluster stays with its own
    chosen = [next(iter(versions)) for versions in answered.values()]
    assert 3 <= chosen.count("rr") <= 17
    assert "worst_fit" not in chosen
    time.sleep(0.7)
    text = client("GET", "/metrics")[1]
    for sample in (
        'cloudsched_decisions_total{replica="[^"]*",version="rr",kind="place"}',
        'cloudsched_shadow_compared_total{replica="[^"]*",version="worst_fit"}',
        'cloudsched_policy_version_info{version="rr",role="canary"}',
    ):
        assert _sample(text, sample) > 0
    for role in ("canary", "shadow"):
        assert client("DELETE", f"/v1/policies/{role}")[0] == 200


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("client_http.py", "web runs on server"),
        ("client_grpc.py", "decided by"),
        ("simulated_hour.py", "mean_power_w"),
    ],
)
def test_the_client_examples_run(
    service: dict[str, Any], bundle_folder: Path, script: str, expected: str
) -> None:
    where = ["--address", service["grpc"]] if "grpc" in script else ["--url", service["url"]]
    command = [sys.executable, str(EXAMPLES / script), *where, "--token", service["token"]]
    if script == "simulated_hour.py":
        command += ["--policy", str(bundle_folder), "--ticks", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_random_bytes_over_grpc_are_refused_with_a_status(
    channel: grpc.Channel, service: dict[str, Any], client: Client
) -> None:
    generator = random.Random(1)
    token = [("authorization", f"Bearer {service['token']}")]
    whole = decision_message_of({"queue": [{"id": "a", "demand": [0.1, 0.1], "duration": 3}]})
    codes: Counter[str] = Counter()
    faults: list[str] = []
    methods = ("Decide", "DecideBatch", "CreateCluster", "PostEvents", "LoadPolicy", "NoSuchCall")
    for _ in range(400):
        body = bytearray(whole.SerializeToString())
        for _ in range(generator.randrange(1, 8)):
            body[generator.randrange(len(body))] = generator.randrange(256)
        if generator.random() < 0.3:
            body = bytearray(generator.randbytes(generator.randrange(300)))
        call = channel.unary_unary(f"/cloudsched.v1.Scheduler/{generator.choice(methods)}")
        try:
            call(bytes(body), metadata=token, timeout=10)
            codes["OK"] += 1
        except grpc.RpcError as error:
            codes[error.code().name] += 1
            if error.code().name in ("UNKNOWN", "INTERNAL"):
                faults.append(error.details())
    # gRPC's own answer to bytes that are no message of the type.
    assert [fault for fault in faults if "DecodeError" not in fault] == []
    refusals = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "UNIMPLEMENTED"}
    assert set(codes) <= {"OK", "UNKNOWN", "INTERNAL", *refusals}
    assert codes["INVALID_ARGUMENT"] > 0
    numbers = messages.QueuedJobs(id=["a"], demand=[float("nan"), 1.0], duration=[1])
    stub = cloudsched_pb2_grpc.SchedulerStub(channel)
    for queue in (numbers, messages.QueuedJobs(id=["a"], demand=[-1.0, 1.0], duration=[1])):
        with pytest.raises(grpc.RpcError) as caught:
            stub.Decide(messages.DecisionRequest(queue=queue), metadata=token)
        assert caught.value.code().name == "INVALID_ARGUMENT"
    assert client("POST", "/v1/decisions", {})[0] == 200


@schema.parametrize()
@settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_documents_made_from_the_openapi_document_through_haproxy(
    case: Any, service: dict[str, Any]
) -> None:
    send_case(case, service["port"], service["token"])


def test_malformed_bodies_through_haproxy_are_refused_and_leave_no_trace(
    client: Client, service: dict[str, Any]
) -> None:
    generator = random.Random(2)
    whole = json.dumps(DECISION).encode()
    paths = ("/v1/decisions", "/v1/decisions/batch", "/v1/clusters", "/k8s/filter", "/v1/policies")
    statuses: Counter[int] = Counter()
    memory = 0
    for number in range(NUM_MALFORMED):
        body = malformed(generator, whole)
        status, _ = client("POST", generator.choice(paths), raw=body)
        statuses[status] += 1
        if number == NUM_MALFORMED // 4:
            memory = _memory_of_replicas(service)
    assert set(statuses) <= {200, 201, 400, 404, 409, 422}, statuses
    assert statuses[400] + statuses[422] > 0.5 * NUM_MALFORMED
    assert _memory_of_replicas(service) < memory + 64 * 2**20


def test_five_times_the_load_through_haproxy_is_refused_cleanly(
    client: Client, service: dict[str, Any]
) -> None:
    port = service["port"]
    request = request_bytes("/v1/decisions", json.dumps(DECISION).encode(), service["token"])
    before = generate(port, request, connections=8, seconds=1.0)
    assert before.num_failed == 0
    statuses = flood(port, service["token"], num_callers=5 * 2 * IN_FLIGHT, seconds=3.0)
    assert set(statuses) <= {200, 503}, statuses
    assert statuses[200] > 0
    after = [generate(port, request, connections=8, seconds=1.0) for _ in range(3)]
    assert after[-1].num_failed == 0
    assert max(load.per_s for load in after) > 0.5 * before.per_s  # the machine may be busy
    assert client("GET", "/readyz")[0] == 200


def test_the_log_is_a_sound_dataset(service: dict[str, Any], folder: Path) -> None:
    def datasets() -> list[Path]:
        return sorted(path.parent for path in (folder / "log").glob("*/manifest.json"))

    _wait_for(datasets, 30.0)
    for dataset in datasets():
        report = check_dataset(dataset, lambda name, rows: None)
        assert report.findings == ()
        assert report.num_checked > 0


def _memory_of_replicas(service: dict[str, Any]) -> int:
    return sum(process.memory_info().rss for process in processes(service, "ServeReplica"))


def _wait_for(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _everyone_uses(service: dict[str, Any], source: str) -> bool:
    """Ask over fresh connections, which HAProxy spreads over the replicas."""
    names = set()
    for _ in range(8):
        caller = Client(service["port"], service["token"])
        names.add(caller("POST", "/v1/decisions", {})[1]["policy"])
        caller.close()
    return names == {source}


def _roles(service: dict[str, Any]) -> set[str]:
    caller = Client(service["port"], service["token"])
    roles = {policy["role"] for policy in caller("GET", "/v1/policies")[1]["policies"]}
    caller.close()
    return roles


def _sample(text: str, pattern: str) -> float:
    import re

    found = re.findall(pattern.replace("{", r"\{").replace("}", r"\}") + r" ([0-9.e+-]+)", text)
    assert found, (pattern, json.dumps(text[:2000]))
    return sum(map(float, found))
