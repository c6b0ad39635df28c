"""Our gRPC server in the place of Serve's, in a replica behind HAProxy.

Serve has no setting for it: `use_own_server` replaces the function by which a replica starts its
server, and with it opens the short way for HTTP (`cloudsched.serving.middleware`). Where a later
Serve has no such function, or no HAProxy is in front, Serve's own servers call the same methods, a
little slower. Requests count as ongoing in Serve's books, so that draining and autoscaling see
them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection, reflection_pb2

from cloudsched.serving import middleware
from cloudsched.serving.errors import MalformedError
from cloudsched.serving.http2 import Http2Connection, Method, Status
from cloudsched.serving.proto import cloudsched_pb2
from cloudsched.serving.rpc import Calls

logger = logging.getLogger("ray.serve")

SERVICE: Any = cloudsched_pb2.DESCRIPTOR.services_by_name["Scheduler"]
HEALTH = "/ray.serve.RayServeAPIService/Healthz"
REFLECTION = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"
POLL_S = 0.05

Count = Callable[[int], None]


class CallContext:
    """What a method of the service asks about its call, as grpcio's context has it."""

    __slots__ = ("_code", "_details", "_headers", "_peer")

    def __init__(self, headers: Mapping[str, str], peer: str) -> None:
        self._headers, self._peer = headers, peer
        self._code: Any = None
        self._details = ""

    def invocation_metadata(self) -> Any:
        """Return the headers."""
        return self._headers.items()

    def peer(self) -> str:
        """Return the caller's address."""
        kind = "ipv6" if ":" in self._peer else "ipv4"
        return f"{kind}:{self._peer}:0"

    def set_code(self, code: Any) -> None:
        """Fail the call, or not."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Say why."""
        self._details = details

    def check(self) -> None:
        """Raise what the method has set."""
        if self._code not in (None, grpc.StatusCode.OK):
            raise Status(self._code.value[0], self._details)


class GrpcServer:
    """Answers the calls of `Calls` on a port of its own.

    Args:
        health: answers Serve's health check.
        count: is told +1 and -1 for each request that begins and ends.
    """

    def __init__(self, calls: Calls, health: Callable[..., Awaitable[bytes]], count: Count) -> None:
        self._calls = calls
        self._count = count
        self._connections: set[Http2Connection] = set()
        self._server: asyncio.Server | None = None
        self._methods = {HEALTH: Method(call=_health(health)), REFLECTION: Method(each=_reflect)}
        for method in SERVICE.methods:
            self._methods[f"/{SERVICE.full_name}/{method.name}"] = Method(call=self._method(method))

    async def start(self, host: str | None, port: int) -> int:
        """Listen; return the port."""
        most = self._calls.gate.max_body_bytes
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Http2Connection(self._methods, most, self._connections), host, port
        )
        number: int = self._server.sockets[0].getsockname()[1]
        return number

    async def wait_for_termination(self) -> None:
        """Wait until the server is stopped."""
        assert self._server is not None
        await self._server.wait_closed()

    async def stop(self, grace: float | None) -> None:
        """Take no new calls, answer those in hand, then close; at the latest after the grace."""
        assert self._server is not None
        self._server.close()
        for connection in list(self._connections):
            connection.finish()
        loop = asyncio.get_running_loop()
        end = loop.time() + (grace or 0.0)
        while self._connections and loop.time() < end:
            await asyncio.sleep(POLL_S)
        for connection in list(self._connections):
            connection.abort()

    def _method(self, method: Any) -> Callable[..., Awaitable[bytes]]:
        answer = getattr(self._calls, method.name)
        parse = message_factory.GetMessageClass(method.input_type).FromString

        async def call(message: bytes, headers: Mapping[str, str], peer: str) -> bytes:
            context = CallContext(headers, peer)
            try:
                request = parse(message)
            except DecodeError:
                error = MalformedError(f"The message is no {method.input_type.name}.")
                code = getattr(grpc.StatusCode, error.grpc_status).value[0]
                raise Status(code, str(error)) from None
            self._count(1)
            try:
                reply = await answer(request, context)
            finally:
                self._count(-1)
            context.check()
            data: bytes = reply.SerializeToString()
            return data

        return call


def use_own_server(calls: Any) -> None:
    """Make the replica of this process start our server, where Serve allows it.

    Args:
        calls: a `Calls` with its `ingress`, both ready when the server starts.
    """
    from ray.serve._private import constants, replica

    serves = getattr(replica, "start_grpc_server", None)
    if serves is None or not getattr(constants, "RAY_SERVE_ENABLE_HA_PROXY", False):
        return

    async def start_grpc_server(
        service_handler_factory: Any, grpc_options: Any, *, event_loop: Any, **options: Any
    ) -> tuple[asyncio.Task[None], Any]:
        try:
            health, count = _books(service_handler_factory)
        except (AttributeError, ImportError, TypeError):
            logger.exception("Serve is not as we know it; its own gRPC server answers.")
            task, server = await serves(
                service_handler_factory, grpc_options, event_loop=event_loop, **options
            )
            return task, server
        server = GrpcServer(calls, health, count)
        await server.start(None, grpc_options.port)
        middleware.short_way.app, middleware.short_way.count = calls.ingress, count
        return event_loop.create_task(server.wait_for_termination()), server

    replica.start_grpc_server = start_grpc_server


def _books(service_handler_factory: Any) -> tuple[Callable[..., Awaitable[bytes]], Count]:
    """Return Serve's health check of this replica, and its count of ongoing requests."""
    from ray.serve._private.common import RequestMetadata, RequestProtocol
    from ray.serve._private.proxy_request_response import gRPCStreamingType

    health = service_handler_factory(HEALTH, gRPCStreamingType.UNARY_UNARY)
    metrics = service_handler_factory.__self__._metrics_manager
    metadata = RequestMetadata(
        request_id="",
        internal_request_id="",
        _request_protocol=RequestProtocol.GRPC,
        is_direct_ingress=True,
    )
    begin, end = metrics.inc_num_ongoing_requests, metrics.dec_num_ongoing_requests

    def count(change: int) -> None:
        (begin if change > 0 else end)(metadata)

    return health, count


def _health(health: Callable[..., Awaitable[bytes]]) -> Callable[..., Awaitable[bytes]]:
    async def call(message: bytes, headers: Mapping[str, str], peer: str) -> bytes:
        context = CallContext(headers, peer)
        reply = await health(None, context)
        context.check()
        return reply

    return call


def _reflect(message: bytes) -> bytes:
    """Answer one question about our service."""
    request = reflection_pb2.ServerReflectionRequest.FromString(message)
    servicer = reflection.ReflectionServicer((SERVICE.full_name, reflection.SERVICE_NAME))
    reply: bytes = next(servicer.ServerReflectionInfo(iter([request]), None)).SerializeToString()
    return reply
