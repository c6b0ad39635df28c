"""What Serve puts in front of a replica's HTTP server: a short way to our own calls.

Serve wraps every request in metadata, contexts and tasks of its own, a fifth of the time of a
decision. Our calls need none of it, so they go straight to the ingress and are counted in Serve's
books; everything else, such as Serve's health checks, goes the whole way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.middleware import Middleware

OURS = ("/v1/", "/k8s/", "/healthz", "/readyz", "/metrics")
NO_DISCONNECT = (b"x-request-disconnect-disabled", b"?1")


class ShortWay:
    """Where requests of this process go.

    Attributes:
        app: the ingress of the replica in this process; None before there is one.
        count: is told +1 and -1 for each request that begins and ends.
    """

    app: Any = None
    count: Callable[[int], None] | None = None


short_way = ShortWay()


class ShortCalls:
    """Takes the short way where there is one.

    On the whole way, Serve is told not to watch for clients that hang up: a call takes a
    millisecond, and watching costs three tasks of the event loop.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        count = short_way.count
        if count is None or not scope["path"].startswith(OURS):
            scope["headers"] = [*scope["headers"], NO_DISCONNECT]
            await self._app(scope, receive, send)
            return
        count(1)
        try:
            await short_way.app(scope, receive, send)
        finally:
            count(-1)


def middlewares() -> list[Middleware]:
    """Return what Serve asks for by `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`."""
    return [Middleware(ShortCalls)]
