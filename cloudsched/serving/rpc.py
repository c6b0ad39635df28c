"""gRPC: the same calls as HTTP, from messages to documents and back.

`Decide` and `DecideBatch` are converted by hand, for speed; everything else goes by the names of
the fields, which messages and documents share.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import grpc
import msgspec
from google.protobuf import json_format

from cloudsched.serving import schemas
from cloudsched.serving.backend import Backend
from cloudsched.serving.errors import RefusedError, UnprocessableError
from cloudsched.serving.limits import Gate
from cloudsched.serving.proto import cloudsched_pb2
from cloudsched.serving.wire import struct_of

messages: Any = cloudsched_pb2  # its classes are made when it is imported

NUM_MODES = 4

DecisionRequest = struct_of(schemas.DecisionRequest)
EventsRequest = struct_of(schemas.EventsRequest)
ClusterRequest = struct_of(schemas.ClusterRequest)
PolicyRequest = struct_of(schemas.PolicyRequest)
FleetSpec = struct_of(schemas.FleetSpec)
ServerColumns = struct_of(schemas.ServerColumns)
RunningColumns = struct_of(schemas.RunningColumns)
QueueColumns = struct_of(schemas.QueueColumns)
SlaWindow = struct_of(schemas.SlaWindow)


class Calls:
    """The methods of the gRPC service `Scheduler`; Serve finds them by name."""

    backend: Backend
    gate: Gate

    async def Decide(self, request: Any, grpc_context: Any) -> Any:
        """Answer a `DecisionRequest`."""
        return await self._answer(self._decide, request, grpc_context, messages.DecisionReply)

    async def DecideBatch(self, request: Any, grpc_context: Any) -> Any:
        """Answer a `BatchRequest`."""
        return await self._answer(self._decide_batch, request, grpc_context, messages.BatchReply)

    async def CreateCluster(self, request: Any, grpc_context: Any) -> Any:
        """Answer a `ClusterRequest`."""
        return await self._answer(self._create, request, grpc_context, messages.ClusterView)

    async def GetCluster(self, request: Any, grpc_context: Any) -> Any:
        """Answer a `ClusterName`."""
        return await self._answer(self._view, request, grpc_context, messages.ClusterView)

    async def PostEvents(self, request: Any, grpc_context: Any) -> Any:
        """Answer an `EventsRequest`."""
        return await self._answer(self._events, request, grpc_context, messages.EventsReply)

    async def ListPolicies(self, request: Any, grpc_context: Any) -> Any:
        """Answer `Nothing`."""
        return await self._answer(self._list, request, grpc_context, messages.PoliciesView)

    async def LoadPolicy(self, request: Any, grpc_context: Any) -> Any:
        """Answer a `PolicyRequest`."""
        return await self._answer(self._load, request, grpc_context, messages.PoliciesView)

    async def DropPolicy(self, request: Any, grpc_context: Any) -> Any:
        """Answer a `PolicyRole`."""
        return await self._answer(self._drop, request, grpc_context, messages.PoliciesView)

    async def _answer(
        self, call: Callable[[Any], Awaitable[Any]], request: Any, context: Any, empty: type[Any]
    ) -> Any:
        """Let a call in and answer it; a refusal becomes its status, with an empty reply."""
        measures, status = self.backend.measures, 500
        measures.num_in_flight += 1
        try:
            self._admit(context)
            reply = await call(request)
            status = 200
            return reply
        except RefusedError as error:
            status = error.status
            context.set_code(getattr(grpc.StatusCode, error.grpc_status))
            context.set_details(str(error))
            return empty()
        finally:
            measures.num_in_flight -= 1
            measures.respond("grpc", status)

    def _admit(self, context: Any) -> None:
        authorization = b""
        for key, value in context.invocation_metadata():
            if key == "authorization":
                authorization = value.encode() if isinstance(value, str) else value
        caller = _address(context.peer())
        self.gate.check_token(authorization, caller)
        self.gate.check_rate(caller)
        self.gate.check_load(self.backend.measures.num_in_flight)

    async def _decide(self, request: Any) -> Any:
        document = decision_document(request)
        await self._know(document.fleet)
        return decision_message(self.backend.service.decide(document))

    async def _decide_batch(self, request: Any) -> Any:
        if not 1 <= len(request.requests) <= schemas.MAX_BATCH:
            raise UnprocessableError(
                f"{len(request.requests)} requests; expected 1 to {schemas.MAX_BATCH}."
            )
        documents = [decision_document(r) for r in request.requests]
        for fleet in {d.fleet for d in documents if isinstance(d.fleet, str)}:
            await self._know(fleet)
        replies: list[Any] = [None] * len(documents)
        for _ in self.backend.service.batch_steps(_Batch(documents), replies):
            await asyncio.sleep(0)
        return messages.BatchReply(replies=map(decision_message, replies))

    async def _create(self, request: Any) -> Any:
        fields = {
            "id": request.id,
            "fleet": _fleet(request),
            "time_of_day_s": request.time_of_day_s,
        }
        view = await self.backend.keeper.create(_document(fields, ClusterRequest))
        return _message(view, messages.ClusterView)

    async def _view(self, request: Any) -> Any:
        return _message(await self.backend.keeper.view(request.id), messages.ClusterView)

    async def _events(self, request: Any) -> Any:
        document = _document(_events(request), EventsRequest)
        body = await self.backend.keeper.events(request.cluster, document)
        return json_format.Parse(body, messages.EventsReply())

    async def _list(self, _: Any) -> Any:
        return _policies(self.backend.policies())

    async def _load(self, request: Any) -> Any:
        fields = {
            "source": request.source,
            "role": request.role or "active",
            "share": request.share,
            "name": request.name,
        }
        return _policies(await self.backend.load_policy(_document(fields, PolicyRequest)))

    async def _drop(self, request: Any) -> Any:
        if request.role not in ("active", "canary", "shadow"):
            raise UnprocessableError(f"role={request.role!r}: expected canary or shadow.")
        return _policies(await self.backend.drop_policy(request.role))

    async def _know(self, fleet: Any) -> None:
        """Fetch the fleet of a registered cluster that this replica has not met."""
        if isinstance(fleet, str) and fleet != "default":
            await self.backend.keeper.desk(fleet)


class _Batch(msgspec.Struct):
    """A `BatchRequest` whose parts are checked already."""

    requests: list[Any]


def decision_document(message: Any) -> Any:
    """Return a `DecisionRequest` message as a document; `snapshots_of` checks its columns."""
    servers, running, queue = message.servers, message.running, message.queue
    modes = servers.mode[:]  # a slice is a list, in two thirds of the time of `list`
    wake_left, idle_ticks = servers.wake_left[:], servers.idle_ticks[:]
    on_server, ticks_left = running.server[:], running.ticks_left[:]
    duration, waited, laxity = queue.duration[:], queue.waited[:], queue.laxity[:]
    in_use, wanted = running.demand[:], queue.demand[:]
    if modes and not 0 <= min(modes) <= max(modes) < NUM_MODES:
        raise UnprocessableError(f"servers.mode: expected numbers from 0 to {NUM_MODES - 1}.")
    scalars = {
        "cluster": message.cluster,
        "fleet": _fleet(message),
        "time_of_day_s": message.time_of_day_s,
        "decisions_in_tick": message.decisions_in_tick,
        "arrival_rates": list(message.arrival_rates) or None,
        "work_rates": list(message.work_rates) or None,
        "work_square": message.work_square,
        "alternatives": message.alternatives,
    }
    if message.HasField("last_server"):
        scalars["last_server"] = message.last_server
    if message.HasField("max_decisions"):
        scalars["max_decisions"] = message.max_decisions
    document = _document(scalars, DecisionRequest)
    if message.HasField("sla_window"):
        window = message.sla_window
        document.sla_window = SlaWindow(
            arrived=max(0, window.arrived),
            violations=max(0, window.violations),
            is_tripped=window.is_tripped,
        )
    document.servers = ServerColumns(mode=modes, wake_left=wake_left, idle_ticks=idle_ticks)
    document.running = RunningColumns(server=on_server, demand=in_use, ticks_left=ticks_left)
    document.queue = QueueColumns(
        id=queue.id[:], demand=wanted, duration=duration, waited=waited, laxity=laxity
    )
    return document


def decision_message(reply: Any) -> Any:
    """Return a `DecisionReply` document as a message."""
    return messages.DecisionReply(
        cluster=reply.cluster,
        policy=reply.policy,
        decisions=[
            messages.Decision(
                kind=d.kind,
                job=d.job,
                server=d.server,
                probability=d.probability,
                alternatives=[
                    messages.Alternative(
                        kind=a.kind, job=a.job, server=a.server, probability=a.probability
                    )
                    for a in d.alternatives
                ],
            )
            for d in reply.decisions
        ],
        ended_by=reply.ended_by,
        wait_probability=reply.wait_probability,
        last_server=reply.last_server,
        interventions=[
            messages.Intervention(reason=note.reason, detail=note.detail)
            for note in reply.interventions
        ],
    )


def _document(fields: dict[str, Any], struct: type[Any]) -> Any:
    try:
        return msgspec.convert(fields, struct)
    except msgspec.ValidationError as error:
        raise UnprocessableError(f"{error}.") from None


def _message(document: Any, message: type[Any]) -> Any:
    return json_format.ParseDict(msgspec.to_builtins(document), message())


def _fleet(message: Any) -> Any:
    kind = message.WhichOneof("fleet")
    if kind == "fleet_name":
        return message.fleet_name or "default"
    if kind is None:
        return "default"
    spec = json_format.MessageToDict(message.fleet_spec, preserving_proto_field_name=True)
    return _document({"resources": [], "servers": [], **spec}, FleetSpec)


def _events(message: Any) -> dict[str, Any]:
    events = []
    for event in message.events:
        kind = event.WhichOneof("what")
        if kind is None:
            raise UnprocessableError(f"event {event.id!r} does not say what happened.")
        what = getattr(event, kind)
        fields: dict[str, Any] = {"kind": kind, "id": event.id}
        if kind == "arrival":
            fields |= {"job": what.job, "demand": list(what.demand), "duration": what.duration}
        elif kind == "completion":
            fields["job"] = what.job
        elif kind != "tick":
            fields["server"] = what.server
        events.append(fields)
    document: dict[str, Any] = {"events": events, "alternatives": message.alternatives}
    if message.HasField("expect_version"):
        document["expect_version"] = message.expect_version
    return document


def _policies(view: Any) -> Any:
    return messages.PoliciesView(
        policies=[
            messages.PolicyView(
                name=p.name,
                role=p.role,
                source=p.source,
                weights_sha256=p.weights_sha256,
                share=p.share,
                training_json=json.dumps(p.training),
                evaluation_json=json.dumps(p.evaluation),
            )
            for p in view.policies
        ],
        encoder_version=view.encoder_version,
        fallback=view.fallback,
    )


def _address(peer: str) -> str:
    """Return the address in a peer such as ipv4:127.0.0.1:5000."""
    kind, _, rest = peer.partition(":")
    if kind == "unix":
        return "localhost"
    return unquote(rest.rpartition(":")[0]).strip("[]") if rest else peer
