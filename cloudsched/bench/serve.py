"""How fast the service answers: on Serve behind HAProxy, bare on uvicorn, and behind Serve's proxy.

All contenders run the same application with the same policy, in as many processes as `REPLICAS`
says, and are measured in turns on loopback. `wrk` and `h2load` make the load where they are
installed, else our own generators.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cloudsched.config import ClusterConfig, Settings
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.errors import CloudschedError
from cloudsched.serving.planner import Planner
from cloudsched.serving.simulated import in_columns, request_of
from cloudsched.serving.snapshots import snapshots_of
from cloudsched.serving.versions import PolicyDecider, load_version

TOKEN = "bench"
MIDDAY = 300  # the tick at which states are taken
OURS, OURS_SCALED, BARE, PROXY = "haproxy", "haproxy_two_replicas", "bare_uvicorn", "default_proxy"
REPLICAS = {OURS: 1, OURS_SCALED: 2, BARE: 1, PROXY: 2}

Report = Callable[[str], None]
Figure = tuple[str, str, str]
"""Contender, case and key."""


@dataclass(frozen=True, kw_only=True)
class ServeBenchConfig(Settings):
    """What is measured."""

    policy: str = ""
    """Name of a rule or folder of a bundle; a network with fresh weights when empty, which decides
    badly but as fast as a trained one."""
    seconds: float = 4.0
    """Length of one measurement."""
    rounds: int = 3
    """Rounds over all contenders; the median counts."""
    batch: int = 256
    """Clusters in one call of the batch form."""
    contenders: tuple[str, ...] = (OURS, OURS_SCALED, BARE, PROXY)
    """Who is measured."""

    def __post_init__(self) -> None:
        self._number("seconds", low=0.0, exclusive=True)
        self._integer("rounds", low=1)
        self._integer("batch", low=1, high=4096)
        for name in self.contenders:
            self._choice_of(name)

    def _choice_of(self, name: str) -> None:
        known = (OURS, OURS_SCALED, BARE, PROXY)
        if name not in known:
            raise CloudschedError(f"No contender {name!r}: expected some of {', '.join(known)}.")


def run(config: ServeBenchConfig, report: Report) -> dict[str, Any]:
    """Measure all contenders, in turns.

    Returns:
        `requests_per_s`, `latency_ms` (percentiles by contender and case), `ratios` with their
        spread in `ratios_from_to`, `batch_decisions_per_s`, `model_ms` by number of servers, and
        the settings.
    """
    with tempfile.TemporaryDirectory(prefix="cloudsched-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        policy = config.policy or str(_fresh_bundle(folder / "network"))
        single, batch, grpc_file = _bodies(folder, config.batch)
        report("timing the policy itself at 15 and 500 servers")
        model = {str(n): _model_ms(policy, n) for n in (15, 500)}
        decisions = _decisions_in(batch, policy)
        ports: dict[str, tuple[int, str]] = {}
        for contender in config.contenders:
            report(f"starting {contender}")
            ports[contender] = stack.enter_context(_running(contender, policy, folder))
        # What is compared is measured one after the other: the machine's speed drifts.
        turns = (
            ("c1", "/v1/decisions", single, 1),
            ("grpc_c1", "", grpc_file, 1),
            ("c16", "/v1/decisions", single, 16),
            ("grpc_c16", "", grpc_file, 16),
            ("batch", "/v1/decisions/batch", batch, 4),
        )
        cases: dict[str, list[dict[str, float]]] = {}
        for number in range(config.rounds):
            for contender, (port, grpc) in ports.items():
                for case, path, body, connections in turns:
                    if (contender, case) == (PROXY, "batch") or not (path or grpc):
                        continue
                    if path:
                        seen = _measure(port, path, body, connections, config.seconds)
                    else:
                        seen = _measure_grpc(grpc, body, connections, config.seconds)
                    cases.setdefault(f"{contender}/{case}", []).append(seen)
                    report(
                        f"{number + 1}/{config.rounds} {contender} {case}: "
                        f"{seen['requests_per_s']:,.0f} requests/s, p50 {seen['p50_ms']:.2f} ms"
                    )
    return {**_summary(cases, decisions, model), "config": asdict(config)}


def _summary(
    cases: dict[str, list[dict[str, float]]], decisions: int, model: dict[str, float]
) -> dict[str, Any]:
    """Return medians over the rounds; a ratio is the median of the rounds' ratios."""

    def figure(contender: str, case: str, key: str) -> float | None:
        rounds = cases.get(f"{contender}/{case}")
        return None if rounds is None else float(np.median([seen[key] for seen in rounds]))

    def ratios(above: Figure, below: Figure) -> list[float]:
        """Return the ratio of each round; none where one of the two was not measured."""
        ours, theirs = (cases.get("/".join(figure[:2]), []) for figure in (above, below))
        if not ours or not theirs:
            return []
        return [a[above[2]] / b[below[2]] for a, b in zip(ours, theirs, strict=True)]

    ours = OURS if f"{OURS}/c16" in cases else OURS_SCALED
    scaled = OURS_SCALED if f"{OURS_SCALED}/c16" in cases else OURS
    speed = "requests_per_s"
    # Name of the ratio: what is above, what is below.
    pairs: dict[str, tuple[Figure, Figure]] = {
        BARE: ((scaled, "c16", speed), (BARE, "c16", speed)),
        f"{BARE}_one_replica": ((ours, "c16", speed), (BARE, "c16", speed)),
        PROXY: ((scaled, "c16", speed), (PROXY, "c16", speed)),
        f"{PROXY}_one_replica": ((ours, "c16", speed), (PROXY, "c16", speed)),
        "p50_one_connection_over_bare": ((ours, "c1", "p50_ms"), (BARE, "c1", "p50_ms")),
        "p99_over_p50_at_16": ((ours, "c16", "p99_ms"), (ours, "c16", "p50_ms")),
        "p99_over_p50_at_16_two_replicas": ((scaled, "c16", "p99_ms"), (scaled, "c16", "p50_ms")),
        "grpc_over_http_at_16": ((ours, "grpc_c16", speed), (ours, "c16", speed)),
        "grpc_over_http_at_1": ((ours, "grpc_c1", speed), (ours, "c1", speed)),
    }
    batches = figure(scaled, "batch", speed)
    by_round = {name: ratios(above, below) for name, (above, below) in pairs.items()}
    return {
        "requests_per_s": {c: figure(c, "c16", speed) for c in REPLICAS},
        "replicas": REPLICAS,
        "ratios": {
            **{
                name: float(np.median(values)) if values else None
                for name, values in by_round.items()
            },
            "model_500_over_15": model["500"] / model["15"],
        },
        "ratios_from_to": {name: [min(v), max(v)] for name, v in by_round.items() if v},
        "ratios_are_of": {
            name: f"{'/'.join(above)} over {'/'.join(below)}"
            for name, (above, below) in pairs.items()
        },
        "batch_is_of": scaled,
        "batch_decisions_per_s": None if batches is None else decisions * batches,
        "decisions_in_a_batch": decisions,
        "latency_ms": {
            name: {
                key.removesuffix("_ms"): float(np.median([seen[key] for seen in rounds]))
                for key in rounds[0]
                if key.endswith("_ms")
            }
            for name, rounds in cases.items()
        },
        "model_ms": model,
        "load_generators": {
            "http": "wrk" if shutil.which("wrk") else "cloudsched.bench.load",
            "grpc": "h2load" if shutil.which("h2load") else "cloudsched.bench.load_grpc",
        },
    }


@contextmanager
def _running(contender: str, policy: str, folder: Path) -> Iterator[tuple[int, str]]:
    """Start a contender; yield its HTTP port and its gRPC address, if it has one."""
    state = folder / f"state-{contender}"
    if contender == BARE:
        command = [sys.executable, "-m", "cloudsched.bench.serve_bare", policy, TOKEN, str(state)]
    else:
        replicas = str(REPLICAS[contender])
        is_bundle = (Path(policy) / "bundle.json").exists()
        command = [sys.executable, "-m", "cloudsched.cli", "serve", "--json", "--port", "0"]
        command += ["--grpc-port", "0", "--token", TOKEN, "--state-dir", str(state)]
        command += ["--bundle" if is_bundle else "--policy", policy]
        command += ["--min-replicas", replicas, "--max-replicas", replicas]
        command += ["--python-proxy"] if contender == PROXY else []
    log = folder / f"{contender}.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
    assert process.stdout is not None
    try:
        text = os.read(process.stdout.fileno(), 1 << 16)  # it comes in one piece
        if not text:
            raise CloudschedError(f"{contender} did not start: {log.read_text()[-2000:]}")
        document = json.loads(text)
        yield int(document["url"].rsplit(":", 1)[1]), document.get("grpc", "")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        process.stdout.close()
        process.wait()


def _measure(
    port: int, path: str, body: Path, connections: int, seconds: float
) -> dict[str, float]:
    """Load one endpoint and return what was seen; a failed request is an error."""
    if shutil.which("wrk"):
        return _wrk(port, path, body, connections, seconds)
    command = [sys.executable, "-m", "cloudsched.bench.load", str(port), path, TOKEN]
    command += [str(connections), str(seconds), str(body)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seen: dict[str, float] = json.loads(done.stdout)
    if seen.pop("failed"):
        raise CloudschedError(f"Some requests to port {port} failed.")
    return seen


def _wrk(port: int, path: str, body: Path, connections: int, seconds: float) -> dict[str, float]:
    script = body.with_suffix(".lua")
    script.write_text(
        f'wrk.method = "POST"\nlocal file = io.open("{body}", "rb")\n'
        'wrk.body = file:read("*a")\nfile:close()\n'
        f'wrk.headers["Authorization"] = "Bearer {TOKEN}"\n'
        'wrk.headers["Content-Type"] = "application/json"\n'
        "done = function(summary, latency, requests)\n"
        "  local bad = summary.errors.status + summary.errors.connect + summary.errors.read\n"
        "    + summary.errors.write + summary.errors.timeout\n"
        '  io.write(string.format("RESULT %f %f %f %f %d\\n",\n'
        "    1e6 * summary.requests / summary.duration, latency:percentile(50) / 1000,\n"
        "    latency:percentile(90) / 1000, latency:percentile(99) / 1000, bad))\n"
        "end\n"
    )
    url = f"http://127.0.0.1:{port}{path}"
    command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "-s", str(script)]
    done = subprocess.run([*command, url], capture_output=True, text=True, check=True)
    found = re.search(r"RESULT (\S+) (\S+) (\S+) (\S+) (\d+)", done.stdout)
    if found is None or int(found[5]):
        raise CloudschedError(f"Some requests to {url} failed: {done.stdout[-500:]}")
    names = ("requests_per_s", "p50_ms", "p90_ms", "p99_ms")
    return {name: float(found[i + 1]) for i, name in enumerate(names)}


def _measure_grpc(address: str, body: Path, connections: int, seconds: float) -> dict[str, float]:
    if shutil.which("h2load"):
        return _h2load(address, body, connections, seconds)
    command = [sys.executable, "-m", "cloudsched.bench.load_grpc", address, TOKEN]
    command += [str(connections), str(seconds), str(body)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CloudschedError(f"gRPC load failed: {done.stderr[-1000:]}")
    seen: dict[str, float] = json.loads(done.stdout)
    return seen


def _h2load(address: str, body: Path, connections: int, seconds: float) -> dict[str, float]:
    """Load gRPC as `wrk` loads HTTP: a message behind its five bytes of gRPC's framing."""
    frame, log = body.with_suffix(".frame"), body.with_suffix(".log")
    message = body.read_bytes()
    frame.write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)
    log.unlink(missing_ok=True)
    headers = ("content-type: application/grpc", "te: trailers", f"authorization: Bearer {TOKEN}")
    command = ["h2load", "-D", str(max(1, round(seconds))), "-c", str(connections), "-m", "1"]
    command += ["-d", str(frame), f"--log-file={log}"]
    command += [word for header in headers for word in ("-H", header)]
    url = f"http://{address}/cloudsched.v1.Scheduler/Decide"
    _check_grpc(address, message)
    subprocess.run([*command, url], capture_output=True, check=True)
    rows = [line.split("\t") for line in log.read_text().splitlines()]
    if not rows or any(row[1] != "200" for row in rows):
        raise CloudschedError(f"Some requests to {url} failed.")
    times_ms = np.sort([int(row[2]) / 1000.0 for row in rows])
    span_s = (max(int(row[0]) for row in rows) - min(int(row[0]) for row in rows)) / 1e6
    return {
        "requests_per_s": len(rows) / max(span_s, 1e-3),
        **{f"p{p}_ms": float(np.percentile(times_ms, p)) for p in (50, 90, 99)},
    }


def _check_grpc(address: str, message: bytes) -> None:
    """Refuse to measure calls that fail: `h2load` does not look at the status of gRPC."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        call: Any = channel.unary_unary("/cloudsched.v1.Scheduler/Decide")
        metadata = (("authorization", f"Bearer {TOKEN}"),)
        if not call(message, metadata=metadata, timeout=30, wait_for_ready=True):
            raise CloudschedError(f"gRPC at {address} answers nothing.")


def _fresh_bundle(folder: Path) -> Path:
    from cloudsched.bundle import Bundle, save_bundle
    from cloudsched.models.networks import NetworkConfig, ObservationSizes, build_network

    cluster, network = ClusterConfig(), NetworkConfig()
    weights = build_network(ObservationSizes.of(cluster), network).state_dict()
    return save_bundle(Bundle(network=network, cluster=cluster, weights=weights), folder)


def _bodies(folder: Path, batch: int) -> tuple[Path, Path, Path]:
    """Write requests from the middle of simulated days: one decision, and a batch of ticks."""
    from cloudsched.heuristics.catalog import make_heuristic
    from cloudsched.serving.rpc_client import decision_message_of

    env = ClusterVectorEnv(batch, workload="diurnal", load=0.8, copy=False)
    observation, _ = env.reset(seed=0)
    policy = make_heuristic("power_aware+headroom", env.config)
    clusters = env.engine.state.clusters
    for _ in range(400):
        observation, *_ = env.step(policy.act(observation))
    # Each cluster just after its tick began: its jobs have arrived and nothing is decided.
    requests: dict[int, dict[str, Any]] = {}
    while len(requests) < batch:
        for e in np.flatnonzero(clusters["decisions_in_tick"] == 0).tolist():
            if e not in requests:
                requests[e] = request_of(env.engine, e, alternatives=0)
        observation, *_ = env.step(policy.act(observation))
    busiest = max(requests.values(), key=lambda request: len(request["queue"]))
    single = {**busiest, "max_decisions": 1}
    paths = folder / "single.json", folder / "batch.json", folder / "single.pb"
    paths[0].write_text(json.dumps(single))
    paths[1].write_text(json.dumps({"requests": list(map(in_columns, requests.values()))}))
    paths[2].write_bytes(decision_message_of(single).SerializeToString())
    return paths


def _decisions_in(batch: Path, policy: str) -> int:
    """Return how many decisions the policy takes for the batch, waiting included."""
    from cloudsched.serving import schemas
    from cloudsched.serving.service import DecisionService
    from cloudsched.serving.shield import ShieldSettings
    from cloudsched.serving.versions import Versions
    from cloudsched.serving.wire import decoder

    shield = ShieldSettings()
    version = load_version(policy)
    service = DecisionService(
        ClusterConfig(), Versions(active=version), load_version(shield.fallback), shield
    )
    replies = service.decide_batch(decoder(schemas.BatchRequest)(batch.read_bytes())).replies
    return sum(len(reply.decisions) + (reply.ended_by == "wait") for reply in replies)


def _model_ms(policy: str, num_servers: int) -> float:
    """Return the milliseconds of the policy alone for one decision, the least of many.

    The cluster is in the middle of a loaded day: jobs run, and more wait than there is room for.
    """
    from cloudsched.heuristics.catalog import make_heuristic
    from cloudsched.serving import schemas
    from cloudsched.serving.wire import struct_of

    settings = {"fleet": {"num_servers": num_servers}}
    env = ClusterVectorEnv(1, workload="diurnal", load=0.8, settings=settings, copy=False)
    observation, _ = env.reset(seed=0)
    rule = make_heuristic("power_aware+headroom", env.config)
    cluster = env.engine.state.clusters[0]
    while cluster["tick"] < MIDDAY or cluster["decisions_in_tick"] > 0:
        observation, *_ = env.step(rule.act(observation))
    fleet = env.engine.fleet
    planner = Planner(env.config, fleet, 1)
    document = request_of(env.engine, 0, alternatives=0)
    request = msgspec.convert(document, struct_of(schemas.DecisionRequest))
    built = load_version(policy).policy(planner.config, fleet)
    best = float("inf")
    for _ in range(200):
        planner.load(snapshots_of([request], planner.config, fleet))
        planner.decide(PolicyDecider(built, np.full(1, -1)), limits=[1], num_others=[0])
        best = min(best, planner.decider_s)
    return 1000.0 * best
