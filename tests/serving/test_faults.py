"""Killed replicas, a killed store, new versions and a redeploy under load: nothing is lost.

Half of the callers speak HTTP, half gRPC.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from servers import Client, Deployment, processes

from cloudsched.serving.proto import cloudsched_pb2, cloudsched_pb2_grpc

pytestmark = [pytest.mark.ray, pytest.mark.slow]

messages: Any = cloudsched_pb2

NUM_CALLERS = 2  # of each kind
MAX_TRIES = 40  # a quarter of a second apart: as long as a replica may take to come back
QUEUE = [{"id": f"j{i}", "demand": [0.2, 0.2], "duration": 5} for i in range(3)]


class Caller(threading.Thread):
    """Sends events and asks for decisions, and repeats what failed, as any client should."""

    def __init__(self, client: Any, name: str, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._client = client
        self.cluster = name
        self._ended = stop
        self.num_calls = self.num_repeats = self.num_sent = 0
        self.lost: list[Any] = []
        self.illegal: list[Any] = []

    def run(self) -> None:
        self._reliably("POST", "/v1/clusters", {"id": self.cluster})
        running: list[str] = []
        tick = 0
        while not self._ended.is_set():
            job = f"{self.cluster}-{tick}"
            events = [{"kind": "tick", "id": f"t{tick}"}]
            if len(running) > 8:
                events.append({"kind": "completion", "id": f"c{tick}", "job": running.pop(0)})
            events.append(
                {
                    "kind": "arrival",
                    "id": f"a{tick}",
                    "job": job,
                    "demand": [0.2, 0.2],
                    "duration": 9,
                }
            )
            path = f"/v1/clusters/{self.cluster}/events"
            reply = self._reliably("POST", path, {"events": events})
            self.num_sent += 1
            if reply is not None:
                placed = [d["job"] for d in reply["decisions"] if d["kind"] == "place"]
                running += placed
                if job not in placed:
                    self.illegal.append(reply)  # there is always room, and rr never waits
            answer = self._reliably("POST", "/v1/decisions", {"queue": QUEUE})
            if answer is not None and {d["job"] for d in answer["decisions"]} < {"j0", "j1", "j2"}:
                self.illegal.append(answer)
            tick += 1
        self.view = self._reliably("GET", f"/v1/clusters/{self.cluster}", None)
        self._client.close()

    def _reliably(self, method: str, path: str, document: Any) -> Any:
        self.num_calls += 1
        failure: Any = None
        for _ in range(MAX_TRIES):
            try:
                status, reply = self._client(method, path, document)
                if status < 300:
                    return reply
                failure = (status, reply)
                if status < 500:
                    break
            except (OSError, http.client.HTTPException) as error:
                failure = repr(error)
            self.num_repeats += 1
            time.sleep(0.25)
        self.lost.append((path, failure))
        return None


class GrpcClient:
    """Says over gRPC what a `Client` says over HTTP."""

    def __init__(self, address: str, token: str) -> None:
        options = [("grpc.max_reconnect_backoff_ms", 250), ("grpc.enable_retries", 0)]
        self._channel = grpc.insecure_channel(address, options)
        self._stub: Any = cloudsched_pb2_grpc.SchedulerStub(self._channel)
        self._token = [("authorization", f"Bearer {token}")]

    def __call__(self, method: str, path: str, document: Any) -> tuple[int, Any]:
        cluster = path.removeprefix("/v1/clusters").strip("/").removesuffix("/events")
        if path == "/v1/decisions":
            queue = document["queue"]
            columns = messages.QueuedJobs(
                id=[job["id"] for job in queue],
                demand=[amount for job in queue for amount in job["demand"]],
                duration=[job["duration"] for job in queue],
            )
            call, request = self._stub.Decide, messages.DecisionRequest(queue=columns)
        elif path.endswith("/events"):
            events = [{"id": e.pop("id"), e.pop("kind"): e} for e in map(dict, document["events"])]
            fields = {"cluster": cluster, "events": events}
            call = self._stub.PostEvents
            request = json_format.ParseDict(fields, messages.EventsRequest())
        elif method == "POST":
            call, request = self._stub.CreateCluster, messages.ClusterRequest(id=document["id"])
        else:
            call, request = self._stub.GetCluster, messages.ClusterName(id=cluster)
        try:
            reply = call(request, metadata=self._token, timeout=30)
        except grpc.RpcError as error:
            is_final = error.code() in (
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.FAILED_PRECONDITION,
                grpc.StatusCode.NOT_FOUND,
            )
            return 400 if is_final else 503, str(error)
        return 200, json_format.MessageToDict(
            reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )

    def close(self) -> None:
        self._channel.close()


def _wait_for_replicas(service: dict[str, Any], callers: list[Caller], killed: set[int]) -> None:
    """Wait until two replicas answer again, or long enough for the test to go on."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        alive = {p.pid for p in processes(service, "ServeReplica")} - killed
        if len(alive) >= 2:
            return
        time.sleep(0.2)
    pytest.fail(f"a killed replica did not come back; lost so far: {[c.lost for c in callers]}")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """`serve deploy serve/cluster.yaml` on a Ray cluster that runs already."""
    arguments = {"policy": "rr", "min_replicas": 2, "max_replicas": 2, "shield": {"sla_cap": 1.0}}
    with Deployment(tmp_path_factory.mktemp("faults"), **arguments) as deployment:
        yield deployment


def test_nothing_is_lost_when_processes_die_and_versions_change(deployment: Deployment) -> None:
    service = deployment.service
    stop = threading.Event()
    clients = [Client(service["port"], service["token"]) for _ in range(NUM_CALLERS)]
    clients += [GrpcClient(service["grpc"], service["token"]) for _ in range(NUM_CALLERS)]
    callers = [Caller(client, f"c{i}", stop) for i, client in enumerate(clients)]
    for caller in callers:
        caller.start()
    admin = Client(service["port"], service["token"])
    killed: set[int] = set()
    for round_number in range(3):
        time.sleep(1.0)
        _wait_for_replicas(service, callers, killed)
        victim = processes(service, "ServeReplica")[0]
        killed.add(victim.pid)
        victim.kill()
        time.sleep(1.0)
        (store,) = processes(service, "StoreProcess")
        store.kill()
        time.sleep(1.0)
        version = {"source": "rr", "name": f"rr-{round_number}"}
        for _ in range(MAX_TRIES):
            try:
                if admin("POST", "/v1/policies", version)[0] == 200:
                    break
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.25)
        else:
            pytest.fail("a new version could not be loaded")
        # A new version of the application: all replicas are replaced while they are called.
        _wait_for_replicas(service, callers, killed)
        before = {process.pid for process in processes(service, "ServeReplica")}
        deployment.application["args"]["limits"] = {"burst": 200 + round_number}
        deployment.deploy()
        assert not before & {process.pid for process in processes(service, "ServeReplica")}
    time.sleep(1.0)
    stop.set()
    for caller in callers:
        caller.join(30)
    admin.close()
    total = sum(caller.num_calls for caller in callers)
    repeats = sum(caller.num_repeats for caller in callers)
    print(f"{total} calls, {repeats} repeated by their client")
    for caller in callers:
        assert caller.lost == []
        assert caller.illegal == []
        counters = caller.view["counters"]
        # JSON has the large numbers of gRPC as text.
        assert int(caller.view["tick"]) == caller.num_sent - 1  # no tick lost, none twice
        assert int(counters["arrived"]) == caller.num_sent
        assert int(counters["started"]) == caller.num_sent
    assert repeats < 0.2 * total


def test_replicas_come_with_load_and_go_without(deployment: Deployment) -> None:
    deployment.application["args"] |= {"min_replicas": 1, "max_replicas": 2}
    scale = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 0.5,
        "upscale_delay_s": 1.0,
        "downscale_delay_s": 2.0,
        "look_back_period_s": 2.0,
        "metrics_interval_s": 0.5,
    }
    deployment.application["deployments"] = [{"name": "Scheduler", "autoscaling_config": scale}]
    deployment.deploy()
    service = deployment.service
    _wait_for_number(deployment, 1)
    with _load(service):
        _wait_for_number(deployment, 2)
    _wait_for_number(deployment, 1)
    client = Client(service["port"], service["token"])
    assert client("POST", "/v1/decisions", {"queue": QUEUE})[0] == 200
    client.close()


@contextmanager
def _load(service: dict[str, Any]) -> Iterator[None]:
    """Ask for decisions over eight connections while the block lasts; none may fail."""
    stop, failures = threading.Event(), []

    def send() -> None:
        client = Client(service["port"], service["token"])
        while not stop.is_set():
            try:
                status, reply = client("POST", "/v1/decisions", {"queue": QUEUE})
            except (OSError, http.client.HTTPException):
                continue  # HAProxy closes connections when it takes up another replica
            if status != 200:
                failures.append((status, reply))
        client.close()

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert failures == []


def _wait_for_number(deployment: Deployment, number: int) -> None:
    deadline = time.monotonic() + 60.0
    while deployment.num_replicas() != number:
        assert time.monotonic() < deadline, f"{deployment.num_replicas()} replicas, not {number}"
        time.sleep(0.2)
