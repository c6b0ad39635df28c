"""A bare server in a thread, and a client that knows its token."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import uvicorn
import yaml

from cloudsched.serving.backend import ServingSettings
from cloudsched.serving.bare import BareApplication
from cloudsched.serving.documentation import DECISION
from cloudsched.serving.fast_path import FAST_PATH
from cloudsched.serving.local import _private_ports

TOKEN = "a-token-of-tests"
RAY_TOKEN = secrets.token_hex(16)  # of the clusters that tests start
FOLDER = Path(__file__).parents[2] / "serve"
BIN = Path(sys.executable).parent  # the tests may run in an environment that nobody activated


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
            process.wait(120)
        finally:
            process.kill()
            process.stdout.close()
            process.wait()
    log = (folder / "serve.err").read_text()
    assert (process.returncode, "draining" in log) == (0, True), log[-3000:]


def processes(service: dict[str, Any], name: str) -> list[psutil.Process]:
    """Return the processes of a kind that belong to a service."""
    found = []
    for process in psutil.Process(service["process"].pid).children(recursive=True):
        try:
            if process.cmdline()[0].startswith(f"ray::{name}"):
                found.append(process)
        except (psutil.NoSuchProcess, IndexError):
            continue
    return found


def flood(port: int, token: str, *, num_callers: int, seconds: float) -> Counter[int]:
    """Ask for decisions without pause, and return how often each status was the answer."""
    statuses: Counter[int] = Counter()
    without_advice: list[int] = []

    def call() -> None:
        caller = Client(port, token)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            status, _ = caller("POST", "/v1/decisions", DECISION)
            statuses[status] += 1
            if status == 503 and caller.headers.get("retry-after") != "1":
                without_advice.append(status)
        caller.close()

    threads = [threading.Thread(target=call) for _ in range(num_callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert without_advice == []
    return statuses


def malformed(generator: random.Random, whole: bytes) -> bytes:
    """Return a body that is broken in one of many ways."""
    kind = generator.randrange(8)
    if kind == 0:
        return whole[: generator.randrange(len(whole))]
    if kind == 1:
        body = bytearray(whole)
        for _ in range(generator.randrange(1, 6)):
            body[generator.randrange(len(body))] = generator.randrange(256)
        return bytes(body)
    if kind == 2:
        return generator.randbytes(generator.randrange(200))
    if kind == 3:
        depth = generator.randrange(1, 20_000)
        return generator.choice([b"[", b'{"fleet":', b'{"queue":['])[:1] * depth
    if kind == 4:
        word = generator.choice([b"NaN", b"Infinity", b"-1e999", b"1e400", b"null", b'"x"', b"{}"])
        return whole.replace(b"0.25", word)
    if kind == 5:
        return json.dumps(
            generator.choice([[], 3, "x", None, {"fleet": {}}, {"queue": [1]}])
        ).encode()
    if kind == 6:
        number = generator.choice([-1, 2**31, 2**63, 2**70, 1.5, -0.0])
        return whole.replace(b"12", json.dumps(number).encode())
    return whole.replace(b'"', generator.choice([b"'", b"", b'""']), generator.randrange(1, 9))


def send_case(case: Any, port: int, token: str) -> None:
    """Send a document that schemathesis made, and check the reply against the OpenAPI document."""
    from schemathesis.checks import CHECKS, load_all_checks

    load_all_checks()
    names = ("not_a_server_error", "status_code_conformance", "response_schema_conformance")
    response = case.call(
        base_url=f"http://127.0.0.1:{port}",
        headers={"Authorization": f"Bearer {token}"},
        timeout=10,
    )
    checks = [check for check in CHECKS.get_all() if check.__name__ in names]
    assert len(checks) == len(names)
    case.validate_response(response, checks=checks)


class Deployment:
    """A Ray cluster of its own with the service on it, as `serve deploy serve/cluster.yaml` does.

    Only what belongs to the machine is changed in that file: folders, ports and, where a test
    says so, the scale.
    """

    def __init__(self, folder: Path, **arguments: Any) -> None:
        self._folder = folder
        self._config = yaml.safe_load((FOLDER / "cluster.yaml").read_text())
        self._config["http_options"] = {"host": "127.0.0.1", "port": _free_port()}
        self._config["grpc_options"]["port"] = _free_port()
        self.application = self._config["applications"][0]
        self.application["args"] |= {
            "state_dir": str(folder / "state"),
            "log_dir": "",
            "limits": {},
            **arguments,
        }
        self._sockets = tempfile.TemporaryDirectory(
            ignore_cleanup_errors=True
        )  # a socket's path must be short
        self._dashboard = _free_port()
        self._environment = {
            **os.environ,
            **FAST_PATH,
            **_private_ports(Path(self._sockets.name)),
            "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]]),
            "CLOUDSCHED_TOKEN": TOKEN,
            "RAY_raylet_start_wait_time_s": "180",  # a busy machine needs longer
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": RAY_TOKEN,
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self._dashboard}",
        }
        self.service = {"port": self._config["http_options"]["port"], "token": TOKEN}
        self.service["grpc"] = f"127.0.0.1:{self._config['grpc_options']['port']}"

    def __enter__(self) -> Deployment:
        try:
            self._start()
            self._until(self._answers_dashboard, "Ray does not start")
            self.deploy()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        command = [str(BIN / "ray"), "start", "--head", "--block", "--port", str(_free_port())]
        command += ["--dashboard-port", str(self._dashboard), "--num-cpus", "4"]
        command += ["--ray-client-server-port", str(_free_port())]
        command += ["--object-store-memory", str(100 * 2**20)]
        # A folder of its own, or `ray.init` of others would take this cluster for theirs.
        command += ["--temp-dir", f"{self._sockets.name}/ray"]
        with (self._folder / "ray.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment)
        self.service["process"] = process

    def __exit__(self, *_: object) -> None:
        # At once: Ray's own way down takes half a minute, and nothing is kept.
        process: Any = self.service.get("process")
        if process is not None:
            family: list[psutil.Process] = []
            with contextlib.suppress(psutil.NoSuchProcess):
                family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.wait()
            psutil.wait_procs(family, timeout=10)
        self._sockets.cleanup()

    def deploy(self) -> None:
        """Deploy the application, as it is described now, and wait until it runs."""
        path = self._folder / "cluster.yaml"
        path.write_text(yaml.safe_dump(self._config))
        command = [str(BIN / "serve"), "deploy", str(path)]
        for _ in range(5):  # a dashboard that has just started may close a connection
            done = subprocess.run(
                command, env=self._environment, capture_output=True, text=True, check=False
            )
            if "ConnectionError" not in done.stderr:
                break
            time.sleep(1.0)
        assert done.returncode == 0, done.stdout + done.stderr
        self._until(lambda: self.status()["status"] == "RUNNING", "the application does not run")

    def status(self) -> Any:
        """Return what Serve says about the application."""
        url = f"http://127.0.0.1:{self._dashboard}/api/serve/applications/"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {RAY_TOKEN}"})
        with urllib.request.urlopen(request, timeout=10) as reply:
            return json.load(reply)["applications"].get("cloudsched", {"status": "NONE"})

    def num_replicas(self) -> int:
        """Return how many replicas take requests."""
        replicas = self.status()["deployments"]["Scheduler"]["replicas"]
        return sum(replica["state"] == "RUNNING" for replica in replicas)

    def _answers_dashboard(self) -> bool:
        try:
            self.status()
        except OSError:
            return False
        return True

    def _until(self, condition: Any, fault: str, seconds: float = 180.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            process: Any = self.service["process"]
            has_ended = process.poll() is not None
            if has_ended or time.monotonic() > deadline:
                log = (self._folder / "ray.log").read_text()[-2000:]
                raise AssertionError(f"{fault}: {log if has_ended else self.status()}")
            time.sleep(0.2)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
