"""The Kubernetes scheduler extender: a pod and nodes in, fitting nodes and their scores out.

The documents are those of `k8s.io/kube-scheduler/extender/v1`. A node's capacity is what it offers
pods (`status.allocatable`); what Kubernetes does not say can be noted on the node:

| annotation               | value                                                      |
|--------------------------|------------------------------------------------------------|
| `cloudsched.io/used`     | what its pods request, such as `{"cpu": "3500m"}`; none    |
| `cloudsched.io/idle-w`   | watts when idle; 100 for the mean node of the call         |
| `cloudsched.io/max-w`    | watts at full load; 300 for the mean node of the call      |
| `cloudsched.io/mode`     | `active`, `waking` or `asleep`; active                     |

A pod's duration is its annotation `cloudsched.io/duration-s`, or `DEFAULT_DURATION_S`.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import msgspec

from cloudsched.errors import CloudschedError
from cloudsched.serving import schemas
from cloudsched.serving.errors import MalformedError, UnprocessableError
from cloudsched.serving.service import DecisionService
from cloudsched.serving.wire import struct_of

MAX_SCORE = 10  # extender/v1: MaxExtenderPriority
DEFAULT_DURATION_S = 3600.0
MEAN_IDLE_W, MEAN_MAX_W = 100.0, 300.0
RESOURCES = ("cpu", "memory")

SUFFIXES = {
    "": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "E": 1e18, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
    "Ei": 2.0**60,
}  # fmt: skip
QUANTITY = re.compile(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)")

DecisionRequest = struct_of(schemas.DecisionRequest)
FleetSpec = struct_of(schemas.FleetSpec)


class Metadata(msgspec.Struct):
    """What is read of an object's metadata."""

    name: str = ""
    annotations: dict[str, str] | None = None


class NodeStatus(msgspec.Struct):
    """What is read of a node's status."""

    allocatable: dict[str, str | int | float] | None = None


class Node(msgspec.Struct):
    """What is read of a node."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)
    status: NodeStatus = msgspec.field(default_factory=NodeStatus)


class NodeList(msgspec.Struct):
    """Nodes; the rest of each is kept as it came, to be sent back."""

    items: list[msgspec.Raw] | None = None


class Requirements(msgspec.Struct):
    """What a container asks for."""

    requests: dict[str, str | int | float] | None = None


class Container(msgspec.Struct):
    """What is read of a container."""

    resources: Requirements = msgspec.field(default_factory=Requirements)


class PodSpec(msgspec.Struct):
    """What is read of a pod's specification."""

    containers: list[Container] | None = None


class Pod(msgspec.Struct):
    """What is read of a pod."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: PodSpec = msgspec.field(default_factory=PodSpec)


class ExtenderArgs(msgspec.Struct, rename={"pod": "Pod", "nodes": "Nodes", "names": "NodeNames"}):
    """extender/v1 ExtenderArgs."""

    pod: Pod | None = None
    nodes: NodeList | None = None
    names: list[str] | None = None


class FilterResult(
    msgspec.Struct,
    rename={"nodes": "Nodes", "names": "NodeNames", "failed": "FailedNodes", "error": "Error"},
):
    """extender/v1 ExtenderFilterResult."""

    nodes: NodeList | None
    names: list[str] | None
    failed: dict[str, str]
    error: str


class HostPriority(msgspec.Struct, rename={"host": "Host", "score": "Score"}):
    """extender/v1 HostPriority."""

    host: str
    score: int


_decode = msgspec.json.Decoder(ExtenderArgs).decode
_decode_node = msgspec.json.Decoder(Node).decode


class Extender:
    """Answers a kube-scheduler."""

    def __init__(self, service: DecisionService) -> None:
        self._service = service

    def filter(self, body: bytes) -> FilterResult:
        """Return the nodes on which the simulator's mask lets the pod run now."""
        arguments, nodes = _parse(body)
        try:
            request = self._request(arguments.pod, nodes)
            legal = self._legal(request)
        except CloudschedError as error:
            return FilterResult(None, None, {}, str(error))
        raw = (arguments.nodes.items or []) if arguments.nodes else []
        kept = [item for item, is_legal in zip(raw, legal, strict=True) if is_legal]
        names = [node.metadata.name for node in nodes]
        failed = {
            name: "cloudsched: asleep, or too little free capacity"
            for name, is_legal in zip(names, legal, strict=True)
            if not is_legal
        }
        return FilterResult(NodeList(kept), [n for n in names if n not in failed], failed, "")

    def prioritize(self, body: bytes) -> list[HostPriority]:
        """Return how much the policy likes each node, from 0 to 10.

        A policy that weighs gives its probabilities. One that does not is asked again without its
        choice, and again, so that its first ten choices get 10, 9 ... 1.
        """
        arguments, nodes = _parse(body)
        names = [node.metadata.name for node in nodes]
        request = self._request(arguments.pod, nodes)
        scores = dict.fromkeys(range(len(nodes)), 0)
        for rank in range(min(MAX_SCORE, len(nodes))):
            reply = self._service.decide(request)
            places = [d for d in reply.decisions if d.kind == "place"]
            if not places:
                break
            weights = {places[0].server: places[0].probability}
            for other in places[0].alternatives:
                if other.kind == "place":
                    weights[other.server] = other.probability
            if len(weights) > 1:
                highest = max(weights.values())
                for server, weight in weights.items():
                    scores[server] = max(1, round(MAX_SCORE * weight / max(highest, 1e-12)))
                break
            scores[places[0].server] = MAX_SCORE - rank
            chosen = places[0].server  # out of the running from here on
            request.servers[chosen].mode = "failed"
            request.running = [job for job in request.running if job.server != chosen]
        return [HostPriority(name, scores[n]) for n, name in enumerate(names)]

    def _legal(self, request: Any) -> list[bool]:
        desk = self._service.desk(request.fleet)
        return self._service.legal_servers(desk, request)

    def _request(self, pod: Pod | None, nodes: list[Node]) -> Any:
        if not nodes:
            raise UnprocessableError("No nodes in the call.")
        if pod is None:
            raise UnprocessableError("No pod in the call.")
        capacity = [
            [_quantity((node.status.allocatable or {}).get(r, 0)) for r in RESOURCES]
            for node in nodes
        ]
        # In units of the mean node, as policies were trained: cores and bytes are far from one.
        unit = [max(sum(row[r] for row in capacity) / len(nodes), 1e-9) for r in (0, 1)]
        servers, running, states = [], [], []
        for n, node in enumerate(nodes):
            notes = node.metadata.annotations or {}
            size = [max(capacity[n][r] / unit[r], 2.0**-20) for r in (0, 1)]
            idle_w = _number(notes, "cloudsched.io/idle-w", MEAN_IDLE_W * size[0])
            max_w = _number(notes, "cloudsched.io/max-w", MEAN_MAX_W * size[0])
            servers.append({"capacity": size, "idle_w": idle_w, "max_w": max(max_w, idle_w + 1.0)})
            mode = notes.get("cloudsched.io/mode", "active")
            states.append({"mode": mode if mode in ("waking", "asleep") else "active"})
            used = _used(notes)
            demand = [min(used[r] / unit[r], size[r]) for r in (0, 1)]
            if any(demand) and states[-1]["mode"] == "active":
                # One stands for all pods of the node; when they end is not known.
                running.append({"server": n, "demand": demand, "ticks_left": 60})
        requests = [container.resources.requests or {} for container in (pod.spec.containers or [])]
        tick_s = self._service.rules.tick_s
        duration_s = _number(
            pod.metadata.annotations or {}, "cloudsched.io/duration-s", DEFAULT_DURATION_S
        )
        job = {
            "id": pod.metadata.name or "pod",
            "demand": [
                sum(_quantity(q.get(r, 0)) for q in requests) / unit[i]
                for i, r in enumerate(RESOURCES)
            ],
            "duration": min(max(1, math.ceil(duration_s / tick_s)), schemas.MAX_TICKS),
        }
        return msgspec.convert(
            {
                "cluster": "kubernetes",
                "fleet": {"resources": list(RESOURCES), "servers": servers},
                "servers": states,
                "running": running,
                "queue": [job],
                "max_decisions": 1,
                "alternatives": 16,
            },
            DecisionRequest,
        )


def _parse(body: bytes) -> tuple[ExtenderArgs, list[Node]]:
    try:
        arguments = _decode(body)
        raw = (arguments.nodes.items or []) if arguments.nodes else []
        nodes = [_decode_node(item) for item in raw]
    except msgspec.ValidationError as error:
        raise UnprocessableError(f"{error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(f"The body is not valid JSON: {error}.") from None
    if not nodes and arguments.names:
        raise UnprocessableError(
            "The call has only names of nodes; set `nodeCacheCapable: false` for this extender."
        )
    if len(nodes) > schemas.MAX_SERVERS:
        raise UnprocessableError(f"{len(nodes)} nodes; {schemas.MAX_SERVERS} at most.")
    return arguments, nodes


def _quantity(value: str | int | float) -> float:
    """Return a quantity of Kubernetes, such as 250m or 4Gi, as a number."""
    if not isinstance(value, str):
        number = float(value)
    else:
        found = QUANTITY.fullmatch(value)
        if found is None or found[2] not in SUFFIXES:
            raise UnprocessableError(f"{value!r} is not a quantity.")
        try:
            number = float(found[1]) * SUFFIXES[found[2]]
        except ValueError:
            raise UnprocessableError(f"{value!r} is not a quantity.") from None
    if not (math.isfinite(number) and 0.0 <= number <= 1e24):
        raise UnprocessableError(f"{value!r} is not a quantity that a node or pod can have.")
    return number


def _number(notes: dict[str, str], name: str, default: float) -> float:
    try:
        value = float(notes[name]) if name in notes else default
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and 0.0 <= value <= 1e9):
        raise UnprocessableError(f"{name}={notes.get(name)!r} is not a number from 0 to 1e9.")
    return value


def _used(notes: dict[str, str]) -> list[float]:
    text = notes.get("cloudsched.io/used")
    if text is None:
        return [0.0, 0.0]
    try:
        used = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        used = None
    if not isinstance(used, dict):
        raise UnprocessableError(f"cloudsched.io/used={text[:80]!r} is not a JSON object.")
    return [
        _quantity(used.get(r, 0) if isinstance(used.get(r, 0), str | int) else "?")
        for r in RESOURCES
    ]
