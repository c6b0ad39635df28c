"""Wiring: the deployment on Ray Serve, and the actor that keeps states.

`build` is what `serve deploy serve/cluster.yaml` calls; `cloudsched serve` calls `run`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray
from ray import serve

from cloudsched.config import Settings
from cloudsched.serving.backend import Backend, ServingSettings
from cloudsched.serving.grpc_server import use_own_server
from cloudsched.serving.ingress import Ingress
from cloudsched.serving.limits import Gate
from cloudsched.serving.rpc import Calls
from cloudsched.serving.store import ClusterBook

APP_NAME = "cloudsched"
STORE_FILE = "clusters.sqlite"


class StoreProcess:
    """The one process that writes the states of clusters; Ray restarts it, the file stays."""

    def __init__(self, folder: str) -> None:
        self._book = ClusterBook(Path(folder) / STORE_FILE)

    def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of the book."""
        return getattr(self._book, name)(*arguments)

    def process_id(self) -> int:
        """Return the process, for tests that end it."""
        return os.getpid()


StoreActor: Any = ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0)(StoreProcess)


class RemoteStore:
    """The book behind the actor, as a `Store`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        async def wrapped(*arguments: Any) -> Any:
            return await self._actor.call.remote(name, arguments)

        return wrapped


def store_actor(folder: str) -> Any:
    """Return the actor for a folder, started if need be; it outlives replicas and drivers."""
    name = "cloudsched-store-" + str(Path(folder).resolve()).strip("/").replace("/", "-")
    return StoreActor.options(
        name=name, namespace=APP_NAME, lifetime="detached", get_if_exists=True
    ).remote(folder)


@serve.ingress()
class Scheduler(Calls):
    """One replica: HTTP and gRPC in front of the service."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(1)  # replicas, not threads, use the cores
        self._settings = ServingSettings.from_dict(settings)
        self.gate = Gate(self._settings.token, self._settings.limits)
        use_own_server(self)

    async def __serve_build_asgi_app__(self) -> Any:
        """Build the application inside the replica."""
        store = RemoteStore(store_actor(self._settings.state_dir))
        replica = serve.get_replica_context().replica_id.unique_id
        self.backend = Backend(self._settings, store, replica)
        self.ingress = Ingress(self.backend, self.gate)
        await self.backend.start()
        self.ingress.is_ready = True
        return Lifespan(self.ingress)

    async def check_health(self) -> None:
        """Fail when the replica cannot decide any more."""
        self.backend.service.check(self.backend.service.fallback)


SchedulerDeployment: Any = serve.deployment(name="Scheduler")(Scheduler)


class Lifespan:
    """An ASGI application that does nothing at its start, and writes its log at its end."""

    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass requests on."""
        if scope["type"] != "lifespan":
            await self._ingress(scope, receive, send)
            return
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self._ingress.backend.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return
            await send({"type": "lifespan.startup.complete"})


def build(arguments: dict[str, Any]) -> Any:
    """Build the application from the `args` of a Serve config.

    Args:
        arguments: the fields of `ServingSettings`, and the number of replicas as `min_replicas`
            and `max_replicas`.
    """
    values = dict(arguments)
    fewest, most = values.pop("min_replicas", 1), values.pop("max_replicas", 4)
    if not values.get("token"):
        values["token"] = os.environ.get("CLOUDSCHED_TOKEN", "")
    settings = ServingSettings.from_dict(values)
    return deployment(settings, fewest, most).bind(settings.to_dict())


def deployment(settings: Settings, fewest: int, most: int) -> Any:
    """Return the deployment with its scale and its limits."""
    scale: dict[str, Any] = {"num_replicas": fewest}
    if most > fewest:
        scale = {
            "num_replicas": None,
            "autoscaling_config": {
                "min_replicas": fewest,
                "max_replicas": most,
                "target_ongoing_requests": 16,
                "upscale_delay_s": 5,
                "downscale_delay_s": 60,
            },
        }
    return SchedulerDeployment.options(
        max_ongoing_requests=1024,
        max_queued_requests=-1,
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=20,
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options={"num_cpus": 0.5},
        # Serve formats a line for every request before it drops it.
        logging_config={"log_level": "WARNING", "enable_access_log": False},
        **scale,
    )
