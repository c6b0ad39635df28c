"""A service on this machine: a Ray of its own with the fast path, HTTP and gRPC."""

from __future__ import annotations

import os
import random
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cloudsched.config import Settings
from cloudsched.errors import ConfigError
from cloudsched.serving.backend import ServingSettings
from cloudsched.serving.fast_path import FAST_PATH
from cloudsched.serving.limits import check_host

SERVICER = "cloudsched.serving.proto.cloudsched_pb2_grpc.add_SchedulerServicer_to_server"
REPLICA_PORTS = 100  # ports that replicas of one service may take, for each protocol


@dataclass(frozen=True, kw_only=True)
class LocalSettings(Settings):
    """Where the service listens, and how much of the machine it takes."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    grpc_port: int = 9000
    """0 takes a free one."""
    min_replicas: int = 1
    max_replicas: int = 2
    address: str = ""
    """Of a running Ray; empty: start one. That Ray must have been started with the fast path."""
    has_fast_path: bool = True
    """False leaves Serve as it comes: its Python proxy, for comparison."""

    def __post_init__(self) -> None:
        self._integer("port", low=0, high=65_535)
        self._integer("grpc_port", low=0, high=65_535)
        self._integer("min_replicas", low=1, high=1000)
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"max_replicas={self.max_replicas!r}: expected at least min_replicas="
                f"{self.min_replicas!r}."
            )


class Endpoint(NamedTuple):
    """Where a running service is reached."""

    url: str
    grpc: str


@contextmanager
def local_service(settings: ServingSettings, local: LocalSettings) -> Iterator[Endpoint]:
    """Run the service until the block ends; what is in hand then is still answered."""
    check_host(local.host, settings.token)
    port, grpc_port = _free(local.host, local.port), _free(local.host, local.grpc_port)
    folder = Path(tempfile.mkdtemp(prefix="cloudsched-"))
    if local.has_fast_path and not local.address:
        os.environ.update({**FAST_PATH, **_private_ports(folder)})
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")  # a busy machine needs longer
    # Serve reads the variables when it is imported.
    import ray
    from ray import serve
    from ray.serve.config import gRPCOptions

    from cloudsched.serving.app import APP_NAME, build

    try:
        if local.address:
            ray.init(address=local.address, log_to_driver=False)
        else:
            # Replicas count half a CPU each, so they and Serve's own processes always fit.
            ray.init(
                address="local",  # also where another cluster runs on this machine
                num_cpus=max(4, local.max_replicas + 2),
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=100 * 2**20,
                configure_logging=False,
            )
        serve.start(
            http_options={"host": local.host, "port": port},
            grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=[SERVICER]),
            logging_config={"log_level": "WARNING"},
        )
        arguments: dict[str, Any] = {
            **settings.to_dict(),
            "min_replicas": local.min_replicas,
            "max_replicas": local.max_replicas,
        }
        serve.run(build(arguments), name=APP_NAME, route_prefix="/", blocking=False)
        yield Endpoint(f"http://{local.host}:{port}", f"{local.host}:{grpc_port}")
    finally:
        try:
            if ray.is_initialized():
                serve.shutdown()
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def _private_ports(folder: Path) -> dict[str, str]:
    """Return settings that keep this HAProxy out of the way of any other on the machine."""
    http, grpc = _free_range(30_000), _free_range(40_000)
    return {
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(_free("127.0.0.1", 0)),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(_free("127.0.0.1", 0)),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(http),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(http + REPLICA_PORTS - 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(grpc),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(grpc + REPLICA_PORTS - 1),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }


def _free(host: str, port: int) -> int:
    """Return the port if it is free, or any free one for 0."""
    try:
        with socket.create_server((host, port)) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error.strerror}. Choose another port; 0 takes a "
            "free one."
        ) from error


def _free_range(start: int) -> int:
    """Return the start of a range of ports whose first ones are free.

    In no fixed order: a service that starts at the same time, whose replicas do not listen yet,
    would find the same range free, and each HAProxy would call the other's replicas.
    """
    bases = range(start, start + 50 * REPLICA_PORTS, REPLICA_PORTS)
    for base in random.sample(bases, len(bases)):
        try:
            for port in range(base, base + 4):
                socket.create_server(("", port)).close()
        except OSError:
            continue
        return base
    raise ConfigError(f"No free range of ports from {start} on; end other services first.")
