"""`cloudsched serve`: the policy as a scheduling endpoint, on Ray Serve."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from cloudsched.commands.options import Pairs, nested, parse_pairs
from cloudsched.commands.output import print_json
from cloudsched.errors import ConfigError
from cloudsched.serving.backend import ServingSettings
from cloudsched.serving.limits import LimitSettings
from cloudsched.serving.local import LocalSettings, local_service
from cloudsched.serving.shield import ShieldSettings
from cloudsched.serving.versions import load_version

EXAMPLE = '{"queue": [{"id": "job-1", "demand": [0.25, 0.25], "duration": 10}]}'


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Answer placement decisions over HTTP and gRPC until Ctrl-C.

    Starts a Ray of its own with HAProxy in front, and prints the URL, the token and a ready curl.
    For a cluster: `serve deploy serve/cluster.yaml`.

    Examples:
      cloudsched serve --bundle runs/ppo/bundle
      cloudsched serve --policy best_fit+sleep --port 8080 --log-dir runs/decisions
    """

    bundle: Path | None = None
    """Folder of a trained policy."""
    policy: str = ServingSettings.policy
    """Name of a rule (`cloudsched policies` lists them), where there is no bundle."""
    preset: str = ""
    """Rules of the clusters (`cloudsched presets`); those of the bundle's training when empty."""
    changes: Annotated[Pairs, tyro.conf.arg(name="set", metavar="KEY=VALUE ...")] = ()
    """Changes to the rules, such as wake_delay_ticks=5 sla_stretch=2.0 fleet.num_servers=30."""
    host: str = LocalSettings.host
    """Address to listen on; 0.0.0.0 for all."""
    port: int = LocalSettings.port
    """HTTP; 0 takes a free one."""
    grpc_port: int = LocalSettings.grpc_port
    """gRPC; 0 takes a free one."""
    min_replicas: int = LocalSettings.min_replicas
    """Replicas at rest."""
    max_replicas: int = LocalSettings.max_replicas
    """Replicas under load."""
    address: str = ""
    """Use a running Ray instead, such as `auto`; start it with serve/fast_path.env."""
    token: str = ""
    """What callers must know; else CLOUDSCHED_TOKEN, else a new one, which is printed."""
    no_auth: bool = False
    """Ask for no token; only on loopback, for callers on this machine."""
    state_dir: Path = Path("runs/serve/state")
    """Folder in which the states of clusters are kept."""
    log_dir: Path | None = None
    """Folder for the log of every decision, as datasets for the offline learner."""
    epsilon: float = 0.0
    """Share of decisions drawn at random, so that one can learn from the log."""
    shield: ShieldSettings = field(default_factory=ShieldSettings)
    """When the safe rule takes over."""
    limits: LimitSettings = field(default_factory=LimitSettings)
    """Of each replica."""
    python_proxy: bool = False
    """Use Serve's own Python proxy instead of HAProxy: slow, for comparison."""
    json: bool = False
    """Print one JSON document on stdout once the service is ready."""

    def run(self) -> None:
        """Serve."""
        settings = self.settings
        _ = settings.config  # refuses unknown presets and settings before Ray starts
        load_version(settings.policy)
        local = LocalSettings(
            host=self.host,
            port=self.port,
            grpc_port=self.grpc_port,
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            address=self.address,
            has_fast_path=not self.python_proxy,
        )
        if self.epsilon and self.log_dir is None:
            raise ConfigError(
                "--epsilon without --log-dir: random decisions that nobody learns from."
            )
        print(f"policy: {settings.policy}", file=sys.stderr)
        print("starting Ray and Serve ...", file=sys.stderr, flush=True)
        ended = threading.Event()

        def listen() -> dict[Any, Any]:
            """Let Ctrl-C and a supervisor's TERM drain; return the handlers before."""
            numbers = (signal.SIGINT, signal.SIGTERM)
            return {number: signal.signal(number, lambda *_: ended.set()) for number in numbers}

        previous = listen()
        try:
            with local_service(settings, local) as endpoint:
                listen()  # again: Ray puts a handler of its own in its place, which aborts
                self._announce(endpoint, settings.token)
                ended.wait()
                # From here on a second Ctrl-C does not wait.
                for number, handler in previous.items():
                    signal.signal(number, handler)
                print("draining ...", file=sys.stderr, flush=True)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @property
    def settings(self) -> ServingSettings:
        """The settings that all replicas get."""
        if self.no_auth and self.token:
            raise ConfigError("--no-auth and --token exclude each other.")
        token = self.token or os.environ.get("CLOUDSCHED_TOKEN") or secrets.token_urlsafe(24)
        if self.bundle is not None and not (self.bundle / "bundle.json").exists():
            raise ConfigError(f"--bundle {str(self.bundle)!r}: no bundle.json there.")
        return ServingSettings(
            policy=self.policy if self.bundle is None else str(self.bundle.resolve()),
            preset=self.preset,
            rules=nested(parse_pairs("--set", self.changes)),
            token="" if self.no_auth else token,
            state_dir=str(self.state_dir.resolve()),
            log_dir="" if self.log_dir is None else str(self.log_dir.resolve()),
            epsilon=self.epsilon,
            shield=self.shield,
            limits=self.limits,
        )

    def _announce(self, endpoint: Any, token: str) -> None:
        if self.json:
            print_json({"url": endpoint.url, "grpc": endpoint.grpc, "token": token})
            sys.stdout.flush()
            return
        header = f" -H 'Authorization: Bearer {token}'" if token else ""
        print(f"HTTP:  {endpoint.url}  (documentation: {endpoint.url}/docs)")
        print(f"gRPC:  {endpoint.grpc}")
        print(f"token: {token or 'none; callers on this machine only'}")
        print(f"curl{header} {endpoint.url}/v1/decisions -d '{EXAMPLE}'", flush=True)
