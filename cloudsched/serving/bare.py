"""The same service on plain uvicorn, without Ray: the yardstick of the bench, and for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cloudsched.serving.backend import Backend, ServingSettings
from cloudsched.serving.ingress import Ingress
from cloudsched.serving.limits import Gate
from cloudsched.serving.store import LocalStore

STORE_FILE = "clusters.sqlite"


class BareApplication:
    """An ASGI application that begins and ends with its server."""

    def __init__(self, settings: ServingSettings) -> None:
        self._settings = settings
        self.ingress: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or start and stop."""
        if scope["type"] != "lifespan":
            await self.ingress(scope, receive, send)
            return
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.ingress.backend.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def start(self) -> None:
        """Load the policy and open the store."""
        settings = self._settings
        store = LocalStore(Path(settings.state_dir) / STORE_FILE)
        backend = Backend(settings, store, "bare")
        self.ingress = Ingress(backend, Gate(settings.token, settings.limits))
        await backend.start()
        self.ingress.is_ready = True
