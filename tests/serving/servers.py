"""A bare server in a thread, and a client that knows its token."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from cloudsched.serving.backend import ServingSettings
from cloudsched.serving.bare import BareApplication

TOKEN = "a-token-of-tests"


class Client:
    """Sends JSON over one connection that is kept."""

    def __init__(self, port: int, token: str = TOKEN, host: str = "127.0.0.1") -> None:
        self._address = (host, port)
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._connection: http.client.HTTPConnection | None = None

    def __call__(
        self,
        method: str,
        path: str,
        document: Any = None,
        *,
        raw: bytes | None = None,
        **headers: str,
    ) -> tuple[int, Any]:
        body = raw if raw is not None else None if document is None else json.dumps(document)
        if self._connection is None:
            self._connection = http.client.HTTPConnection(*self._address, timeout=30)
        try:
            self._connection.request(method, path, body, {**self._headers, **headers})
            response = self._connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException):
            self.close()
            raise
        self.headers = dict(response.headers)
        is_json = "json" in response.headers.get("content-type", "")
        return response.status, json.loads(data) if is_json and data else data.decode()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(self, requests: list[dict[str, Any]]) -> Any:
        """Decide for some clusters; as `cloudsched.serving.simulated.drive` wants it."""
        status, reply = self("POST", "/v1/decisions/batch", {"requests": requests})
        assert status == 200, reply
        return reply["replies"]


@contextmanager
def bare_server(folder: Path, **settings: Any) -> Iterator[Any]:
    """Run the service on uvicorn; yields a client, with the application as `.application`."""
    values = {"token": TOKEN, "state_dir": str(folder / "state"), **settings}
    application = BareApplication(ServingSettings.from_dict(values))
    config = uvicorn.Config(application, port=0, log_level="error", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        thread.join(0.01)
    client: Any = Client(server.servers[0].sockets[0].getsockname()[1])
    client.application = application
    try:
        yield client
    finally:
        client.close()
        server.should_exit = True
        thread.join(20)


@contextmanager
def serve_process(folder: Path, *options: str) -> Iterator[dict[str, Any]]:
    """Run `cloudsched serve` as a user would; yields its URL, gRPC address, token and process."""
    command = [sys.executable, "-m", "cloudsched.cli", "serve", "--json", "--port", "0"]
    command += ["--grpc-port", "0", "--state-dir", str(folder / "state"), *options]
    with (folder / "serve.err").open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
    assert process.stdout is not None
    try:
        text = process.stdout.read1()  # the document comes in one piece
        assert text, (folder / "serve.err").read_text()[-3000:]
        document = json.loads(text)
        document["port"] = int(document["url"].rsplit(":", 1)[1])
        document["process"] = process
        yield document
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.stdout.close()
            process.wait()
