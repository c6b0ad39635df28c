from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

LEARNER = """
from cloudsched.rl.algorithms.ppo import ClusterPPOConfig


def build():
    config = ClusterPPOConfig()
    config.env_runners(num_envs_per_env_runner=8)
    config.rl_module(model_config={"network": {"width": 8, "context_width": 8, "pair_width": 8}})
    config.training(train_batch_size_per_learner=512, minibatch_size=512, num_epochs=1)
    return config
"""


def wait_for(condition: Callable[[], object], process: subprocess.Popen, log: Path) -> None:
    """Wait until something holds while a process runs; fail with its log if it ends before."""
    deadline = time.monotonic() + 480  # on a machine with nothing to spare
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@pytest.fixture(name="wait_for", scope="session")
def _wait_for() -> Callable[..., None]:
    return wait_for


@pytest.fixture
def learner(tmp_path: Path) -> Path:
    """A file like those in rllib_configs/, with the smallest PPO that there can be."""
    path = tmp_path / "learner.py"
    path.write_text(LEARNER)
    return path


@dataclass(frozen=True)
class RayCluster:
    """A head and a second node on this machine, with token authentication."""

    dashboard: str
    environment: Mapping[str, str]
    raylets: list[psutil.Process]  # of the head, and of the second node

    def trials(self, node: int) -> list[psutil.Process]:
        """Return the processes of trials on a node."""
        workers = self.raylets[node].children(recursive=True)
        return [worker for worker in workers if "BenchmarkTrial" in _command(worker)]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: Ray's sockets are in it
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_worker_niceness": "0",  # or workers starve on a busy machine
        # A job's `python` is the first on the path of the node: the one that has the dependencies.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    environment.pop("PYTHONPATH", None)  # the code has to come with the job
    port, dashboard, client, *own = _free_ports(7)
    head = [f"--port={port}", f"--dashboard-port={dashboard}", f"--temp-dir={folder}"]
    try:
        _start(environment, own[:2], "--head", *head, f"--ray-client-server-port={client}")
        _start(environment, own[2:], f"--address=127.0.0.1:{port}")
        raylets = [
            next(p for p in _processes(folder) if f"--node_manager_port={node}" in _command(p))
            for node in (own[0], own[2])
        ]
        _wait_for_port(dashboard)
        yield RayCluster(f"http://127.0.0.1:{dashboard}", environment, raylets)
    finally:
        for process in _processes(folder):  # ours alone: all name the session's folder
            with suppress(psutil.Error):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _start(environment: Mapping[str, str], ports: list[int], *words: str) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words]
    options = ["--num-cpus=1", "--object-store-memory=100000000", "--node-ip-address=127.0.0.1"]
    options += [f"--node-manager-port={ports[0]}", f"--dashboard-agent-listen-port={ports[1]}"]
    done = subprocess.run(
        [*command, *options, "--disable-usage-stats"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _processes(folder: Path) -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if str(folder) in _command(p)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 300
    while True:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < deadline, f"nothing listens on port {port}"
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
