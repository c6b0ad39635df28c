"""HTTP: from bytes to documents and back, with authentication and limits; no logic of its own.

A plain ASGI application. Requests are dispatched by a table and parsed by msgspec; FastAPI serves
the OpenAPI document, its pages, and everything that is not in the table.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple

from cloudsched.serving import schemas
from cloudsched.serving.backend import Backend
from cloudsched.serving.documentation import documentation_app
from cloudsched.serving.errors import MalformedError, RefusedError, UnknownError
from cloudsched.serving.limits import Gate
from cloudsched.serving.service import BatchReply
from cloudsched.serving.wire import decoder, encode

logger = logging.getLogger("ray.serve")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = b"application/json"
PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


class Call(NamedTuple):
    """A request that was let in."""

    body: bytes
    words: dict[str, str]  # what the path says


class Answer(NamedTuple):
    """What goes back."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON


Handler = Callable[[Call], Awaitable[Answer]]


class Ingress:
    """The ASGI application of one replica."""

    def __init__(self, backend: Backend, gate: Gate) -> None:
        self.backend = backend
        self._gate = gate
        self._documentation = documentation_app()
        self._parse_decision = decoder(schemas.DecisionRequest)
        self._parse_batch = decoder(schemas.BatchRequest)
        self._parse_cluster = decoder(schemas.ClusterRequest)
        self._parse_events = decoder(schemas.EventsRequest)
        self._parse_policy = decoder(schemas.PolicyRequest)
        self.is_ready = False
        # Paths without parameters; the others are found by `_route`.
        self._table: dict[tuple[str, str], Handler] = {
            ("POST", "/v1/decisions"): self._decisions,
            ("POST", "/v1/decisions/batch"): self._batch,
            ("POST", "/v1/clusters"): self._create_cluster,
            ("GET", "/v1/policies"): self._list_policies,
            ("POST", "/v1/policies"): self._load_policy,
            ("POST", "/k8s/filter"): self._filter,
            ("POST", "/k8s/prioritize"): self._prioritize,
            ("GET", "/metrics"): self._metrics,
        }
        self._open = {"/healthz": self._health, "/readyz": self._readiness}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._documentation(scope, receive, send)
            return
        path, method = scope["path"], scope["method"]
        if path in self._open and method == "GET":
            await _send(send, self._open[path]())
            return
        handler = self._table.get((method, path))
        words: dict[str, str] = {}
        name = path
        if handler is None:
            found = self._route(method, path)
            if found is None:
                await self._documentation(scope, receive, send)
                return
            handler, name, words = found
        measures = self.backend.measures
        measures.num_in_flight += 1
        try:
            answer = await self._answer(handler, words, scope, receive)
        finally:
            measures.num_in_flight -= 1
        measures.respond(name, answer.status)
        await _send(send, answer)

    async def _answer(
        self, handler: Handler, words: dict[str, str], scope: Scope, receive: Receive
    ) -> Answer:
        try:
            body = await self._admit(words, scope, receive)
            return await handler(Call(body, words))
        except RefusedError as error:
            return refusal(error)
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("A request failed.")
            return Answer(encode({"error": "The service failed; its log says why."}), 500)

    async def _admit(self, words: dict[str, str], scope: Scope, receive: Receive) -> bytes:
        """Let a request in and return its body, or refuse it."""
        authorization, length = b"", b""
        for key, value in scope["headers"]:
            if key == b"authorization":
                authorization = value
            elif key == b"content-length":
                length = value
        gate = self._gate
        caller = scope["client"][0] if scope.get("client") else "unknown"
        if "token" in words:
            gate.check_path_token(words["token"], caller)
        else:
            gate.check_token(authorization, caller)
        gate.check_rate(caller)
        if length.isdigit():
            gate.check_size(int(length))
        # A turn for everyone else: those who came at the same time count themselves, too.
        await asyncio.sleep(0)
        gate.check_load(self.backend.measures.num_in_flight)
        message = await receive()
        body: bytes = message.get("body", b"")
        if not message.get("more_body"):
            gate.check_size(len(body))
            return body
        parts, size = [body], len(body)
        while message.get("more_body"):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise MalformedError("The connection ended before the body did.")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            gate.check_size(size)
        return b"".join(parts)

    def _route(self, method: str, path: str) -> tuple[Handler, str, dict[str, str]] | None:
        """Find the handler of a path with parameters, and the name that the path counts under."""
        parts = path.split("/")
        match (method, parts):
            case ("GET", ["", "v1", "clusters", cluster]) if cluster:
                return self._view_cluster, "/v1/clusters/{id}", {"cluster": cluster}
            case ("POST", ["", "v1", "clusters", cluster, "events"]) if cluster:
                return self._events, "/v1/clusters/{id}/events", {"cluster": cluster}
            case ("DELETE", ["", "v1", "policies", role]) if role:
                return self._drop_policy, "/v1/policies/{role}", {"role": role}
            case ("POST", ["", "k8s", token, "filter"]):
                return self._filter, "/k8s/{token}/filter", {"token": token}
            case ("POST", ["", "k8s", token, "prioritize"]):
                return self._prioritize, "/k8s/{token}/prioritize", {"token": token}
        return None

    async def _decisions(self, call: Call) -> Answer:
        request = self._parse_decision(call.body)
        await self._know(request.fleet)
        return Answer(encode(self.backend.service.decide(request)))

    async def _batch(self, call: Call) -> Answer:
        batch = self._parse_batch(call.body)
        for fleet in {r.fleet for r in batch.requests if isinstance(r.fleet, str)}:
            await self._know(fleet)
        replies: list[Any] = [None] * len(batch.requests)
        for _ in self.backend.service.batch_steps(batch, replies):
            await asyncio.sleep(0)
        return Answer(encode(BatchReply(replies=replies)))

    async def _know(self, fleet: Any) -> None:
        """Fetch the fleet of a registered cluster that this replica has not met."""
        if isinstance(fleet, str) and fleet != "default":
            await self.backend.keeper.desk(fleet)

    async def _create_cluster(self, call: Call) -> Answer:
        request = self._parse_cluster(call.body)
        return Answer(encode(await self.backend.keeper.create(request)), 201)

    async def _view_cluster(self, call: Call) -> Answer:
        return Answer(encode(await self.backend.keeper.view(call.words["cluster"])))

    async def _events(self, call: Call) -> Answer:
        request = self._parse_events(call.body)
        return Answer(await self.backend.keeper.events(call.words["cluster"], request))

    async def _list_policies(self, call: Call) -> Answer:
        return Answer(encode(self.backend.policies()))

    async def _load_policy(self, call: Call) -> Answer:
        return Answer(encode(await self.backend.load_policy(self._parse_policy(call.body))))

    async def _drop_policy(self, call: Call) -> Answer:
        role = call.words["role"]
        if role not in ("active", "canary", "shadow"):
            raise UnknownError(f"No role {role!r}: it is canary or shadow.")
        return Answer(encode(await self.backend.drop_policy(role)))

    async def _filter(self, call: Call) -> Answer:
        return Answer(encode(self.backend.extender.filter(call.body)))

    async def _prioritize(self, call: Call) -> Answer:
        return Answer(encode(self.backend.extender.prioritize(call.body)))

    async def _metrics(self, call: Call) -> Answer:
        return Answer((await self.backend.metrics()).encode(), content_type=PROMETHEUS)

    def _health(self) -> Answer:
        return Answer(b'{"status":"ok"}')

    def _readiness(self) -> Answer:
        if self.is_ready:
            return Answer(b'{"status":"ready"}')
        return Answer(b'{"error":"The policy is being loaded."}', 503)


def refusal(error: RefusedError) -> Answer:
    """Return the answer that says why."""
    return Answer(encode({"error": str(error)}), error.status)


async def _send(send: Send, answer: Answer) -> None:
    fields = [
        (b"content-type", answer.content_type),
        (b"content-length", b"%d" % len(answer.body)),
    ]
    if answer.status in (429, 503):
        fields.append((b"retry-after", b"1"))
    elif answer.status == 401:
        fields.append((b"www-authenticate", b"Bearer"))
    elif answer.status == 413:
        fields.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": answer.status, "headers": fields})
    await send({"type": "http.response.body", "body": answer.body})
