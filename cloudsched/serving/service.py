"""The service without transport and without Ray: requests in, replies out."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cloudsched.config import ClusterConfig
from cloudsched.errors import CloudschedError
from cloudsched.policy import Policy
from cloudsched.serving import schemas
from cloudsched.serving.errors import UnknownError, UnprocessableError
from cloudsched.serving.measures import Measures
from cloudsched.serving.planner import Planner, Trace, serving_rules
from cloudsched.serving.replies import commands_of, orders_of, reply_of
from cloudsched.serving.shield import Breaker, ShieldedDecider, ShieldSettings
from cloudsched.serving.snapshots import snapshots_of
from cloudsched.serving.versions import ExploringDecider, PolicyDecider, Version, Versions
from cloudsched.serving.wire import struct_of
from cloudsched.sim.fleet import CURVE_POINTS, Fleet, build_fleet
from cloudsched.sim.state import NONE

DEFAULT_FLEET = "default"
CHUNK_ACTIONS = 16384  # actions of all clusters decided together: 128 clusters of 15 servers
MAX_CHUNK = 128
MAX_FLEETS = 64  # fleets kept ready; each costs the arrays of its clusters

BatchReply = struct_of(schemas.BatchReply)

FleetLookup = Callable[[str], Any]
"""From a cluster's id to its `FleetSpec`, or None."""


class Logged(NamedTuple):
    """Decisions of some clusters of one fleet, for the log."""

    config: ClusterConfig
    clusters: list[str]
    is_paid: list[bool]  # whether the tick of a cluster was ended, and paid for, before
    version: Version
    epsilon: float
    traces: list[Trace]


@dataclass(eq=False)
class FleetDesk:
    """A fleet with everything that was built for it."""

    fleet: Fleet
    config: ClusterConfig
    chunk: int
    planners: dict[int, Planner] = field(default_factory=dict)
    policies: dict[Version, Policy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.config
        self.sizes = (
            config.num_servers,
            config.visible_jobs * config.num_servers,  # the first toggle
            config.num_actions - 1,  # wait
        )

    def planner(self, num_clusters: int) -> Planner:
        """Return a planner with room for so many clusters, and not much more."""
        size = 1 if num_clusters == 1 else min(self.chunk, 1 << (num_clusters - 1).bit_length())
        if size not in self.planners:
            self.planners[size] = Planner(self.config, self.fleet, size)
        return self.planners[size]

    def policy(self, version: Version) -> Policy:
        """Return a version's policy for this fleet."""
        if version not in self.policies:
            if len(self.policies) > 8:  # versions come and go
                self.policies.pop(next(iter(self.policies)))
            self.policies[version] = version.policy(self.config, self.fleet)
        return self.policies[version]


class DecisionService:
    """Decides for clusters that callers describe.

    Args:
        rules: of all clusters; a caller brings the fleet.
        fallback: the shield's safe rule, loaded.
        log: is shown every decision; None for no log.
        epsilon: share of decisions drawn at random, so that logs show what else would have
            happened; the log has the exact probabilities.
    """

    def __init__(
        self,
        rules: ClusterConfig,
        versions: Versions,
        fallback: Version,
        shield: ShieldSettings,
        *,
        measures: Measures | None = None,
        log: Callable[[Logged], None] | None = None,
        epsilon: float = 0.0,
    ) -> None:
        self.rules = rules
        self.versions = versions
        self.fallback = fallback
        self.shield = shield
        self.measures = Measures() if measures is None else measures
        self.breaker = Breaker(shield.cooldown_s)
        self._log = log
        self._epsilon = epsilon
        self._generator = np.random.default_rng()
        self._desks: OrderedDict[Any, FleetDesk] = OrderedDict()
        self.check(versions.active)
        self.check(fallback)

    def check(self, version: Version) -> None:
        """Refuse a version that cannot decide for the default fleet."""
        desk = self.desk(DEFAULT_FLEET)
        policy = version.policy(desk.config, desk.fleet)
        planner = desk.planner(1)
        empty = struct_of(schemas.DecisionRequest)()
        planner.load(snapshots_of([empty], desk.config, desk.fleet))
        decider = PolicyDecider(policy, np.full(1, NONE, np.int64))
        planner.decide(decider, limits=[1], num_others=[0])
        desk.policies[version] = policy

    def decide(self, request: Any) -> Any:
        """Answer one `DecisionRequest`."""
        return self.decide_at(self.desk(request.fleet), request)

    def decide_at(self, desk: FleetDesk, request: Any, *, is_paid: bool = False) -> Any:
        """Answer one `DecisionRequest`, whatever fleet it names.

        Args:
            is_paid: whether the policy has waited in this tick before, which counts once.
        """
        return self._decide_some(desk, [request], [is_paid])[0]

    def legal_servers(self, desk: FleetDesk, request: Any) -> list[bool]:
        """Return on which servers the first job of the queue may start now, by the one mask."""
        planner = desk.planner(1)
        planner.load(snapshots_of([request], desk.config, desk.fleet))
        is_legal: list[bool] = (planner.engine.mask[0, : desk.fleet.num_servers] != 0).tolist()
        return is_legal

    def decide_batch(self, batch: Any) -> Any:
        """Answer a `BatchRequest`."""
        for _ in self.batch_steps(batch, replies := [None] * len(batch.requests)):
            pass
        return BatchReply(replies=replies)

    def batch_steps(self, batch: Any, replies: list[Any]) -> Iterator[None]:
        """Fill in the replies to a batch, and give others a turn now and then."""
        requests = batch.requests
        groups: dict[int, tuple[FleetDesk, list[int]]] = {}
        for i, request in enumerate(requests):
            desk = self.desk(request.fleet)
            groups.setdefault(id(desk), (desk, []))[1].append(i)
        for desk, places in groups.values():
            for start in range(0, len(places), desk.chunk):
                some = places[start : start + desk.chunk]
                answers = self._decide_some(desk, [requests[i] for i in some])
                for i, answer in zip(some, answers, strict=True):
                    replies[i] = answer
                yield

    def desk(self, fleet: Any) -> FleetDesk:
        """Return what is kept ready for a fleet: the name of one, or a `FleetSpec`."""
        key = fleet if isinstance(fleet, str) else _key(fleet)
        desk = self._desks.get(key)
        if desk is not None:
            return desk
        if isinstance(fleet, str) and fleet != DEFAULT_FLEET:
            raise UnknownError(
                f"No fleet named {fleet!r}: it is {DEFAULT_FLEET!r}, a document that describes "
                "one, or the id of a cluster registered with POST /v1/clusters."
            )
        built = build_fleet(self.rules.fleet) if isinstance(fleet, str) else fleet_of(fleet)
        return self.keep(key, built)

    def keep(self, key: Any, fleet: Fleet) -> FleetDesk:
        """Keep a fleet ready under a key; the one used least recently makes room."""
        config = serving_rules(self.rules, fleet)
        chunk = max(1, min(MAX_CHUNK, CHUNK_ACTIONS // config.num_actions))
        desk = FleetDesk(fleet, config, 1 << (chunk.bit_length() - 1))
        self._desks[key] = desk
        if len(self._desks) > MAX_FLEETS:
            for old in self._desks:
                if old != DEFAULT_FLEET:
                    del self._desks[old]
                    break
        return desk

    def _decide_some(
        self, desk: FleetDesk, requests: Sequence[Any], is_paid: list[bool] | None = None
    ) -> list[Any]:
        """Answer requests for clusters of one fleet, each by its version."""
        if is_paid is None:
            is_paid = [False] * len(requests)
        if self.versions.canary is None:
            return self._decide_with(desk, self.versions.active, requests, is_paid)
        replies: list[Any] = [None] * len(requests)
        by_version: dict[Version, list[int]] = {}
        for i, request in enumerate(requests):
            by_version.setdefault(self.versions.of_cluster(request.cluster), []).append(i)
        for version, places in by_version.items():
            answers = self._decide_with(
                desk, version, [requests[i] for i in places], [is_paid[i] for i in places]
            )
            for i, answer in zip(places, answers, strict=True):
                replies[i] = answer
        return replies

    def _decide_with(
        self, desk: FleetDesk, version: Version, requests: Sequence[Any], is_paid: list[bool]
    ) -> list[Any]:
        started = time.perf_counter()
        planner = desk.planner(len(requests))
        planner.load(snapshots_of(requests, desk.config, desk.fleet))
        most = desk.config.decisions_per_tick
        limits = [request.max_decisions or most for request in requests]
        orders = orders_of(planner, len(requests), max(limits))
        memory = np.array([request.last_server for request in requests], np.int64)
        safe_memory = memory.copy()
        windows = [request.sla_window for request in requests]
        is_capped = np.array(
            [
                self.shield.is_exceeded(w.arrived, w.violations, is_tripped=w.is_tripped)
                for w in windows
            ]
        )
        decider = ShieldedDecider(
            version.name,
            self._decider(desk, version, memory),
            PolicyDecider(desk.policy(self.fallback), safe_memory),
            self.shield,
            self.breaker,
            is_capped,
        )
        traces: list[Trace] = []
        outcome = planner.decide(
            decider,
            limits=limits,
            num_others=[request.alternatives for request in requests],
            tracer=None if self._log is None else traces.append,
        )
        notes = decider.interventions
        replies = [
            reply_of(desk.sizes, request, version, outcome, e, order, last_server, notes.get(e, ()))
            for e, (request, order, last_server) in enumerate(
                zip(requests, orders, memory.tolist(), strict=True)
            )
        ]
        measures = self.measures.of(version.name)
        measures.observe(replies, time.perf_counter() - started, planner.decider_s)
        if self._log is not None:
            clusters = [request.cluster for request in requests]
            self._log(Logged(desk.config, clusters, is_paid, version, self._epsilon, traces))
        if self.versions.shadow is not None:
            self._shadow(desk, self.versions.shadow, requests, replies)
        return replies

    def _decider(
        self, desk: FleetDesk, version: Version, memory: NDArray[np.int64]
    ) -> Callable[..., Any]:
        """Return a version's decider; one that cannot be built errs when it is called."""
        try:
            decider = PolicyDecider(desk.policy(version), memory)
            if self._epsilon == 0.0:
                return decider
            num_pairs = desk.config.visible_jobs * desk.config.num_servers
            return ExploringDecider(decider, self._epsilon, num_pairs, self._generator)
        except CloudschedError as error:
            message = str(error)

            def fail(*_: Any) -> Any:
                raise UnprocessableError(message)

            return fail

    def _shadow(
        self, desk: FleetDesk, version: Version, requests: Sequence[Any], replies: Sequence[Any]
    ) -> None:
        """Let another version decide too, and count how often it agrees."""
        started = time.perf_counter()
        measures = self.measures.of(version.name)
        try:
            planner = desk.planner(len(requests))
            planner.load(snapshots_of(requests, desk.config, desk.fleet))
            most = desk.config.decisions_per_tick
            limits = [request.max_decisions or most for request in requests]
            orders = orders_of(planner, len(requests), max(limits))
            memory = np.array([request.last_server for request in requests], np.int64)
            outcome = planner.decide(
                PolicyDecider(desk.policy(version), memory),
                limits=limits,
                num_others=[0] * len(requests),
            )
            shadows = [
                reply_of(desk.sizes, request, version, outcome, e, orders[e], int(memory[e]), ())
                for e, request in enumerate(requests)
            ]
        except Exception:
            measures.num_errors += len(requests)
            return
        measures.observe(shadows, time.perf_counter() - started, planner.decider_s)
        for shadow, reply in zip(shadows, replies, strict=True):
            measures.num_compared += 1
            measures.num_agreed += commands_of(shadow) == commands_of(reply)


def fleet_of(spec: Any) -> Fleet:
    """Build the fleet that a `FleetSpec` describes."""
    num_resources = len(spec.resources)
    for n, server in enumerate(spec.servers):
        if len(server.capacity) != num_resources:
            raise UnprocessableError(
                f"fleet.servers[{n}].capacity has {len(server.capacity)} numbers for "
                f"{num_resources} resources."
            )
        if server.curve_w is None and server.exponent == 0.0:
            raise UnprocessableError(
                f"fleet.servers[{n}]: neither an exponent above 0 nor a curve_w."
            )
    if len(set(spec.resources)) != num_resources:
        raise UnprocessableError(f"fleet.resources={spec.resources!r}: names must differ.")
    no_curve = [0.0] * CURVE_POINTS
    try:
        return Fleet(
            resources=tuple(spec.resources),
            models=("server",) * len(spec.servers),
            capacity=np.array([server.capacity for server in spec.servers]),
            idle_w=np.array([server.idle_w for server in spec.servers]),
            max_w=np.array([server.max_w for server in spec.servers]),
            exponent=np.array([0.0 if s.curve_w else s.exponent for s in spec.servers]),
            curve_w=np.array([server.curve_w or no_curve for server in spec.servers]),
        )
    except CloudschedError as error:
        raise UnprocessableError(str(error)) from error


def _key(spec: Any) -> Any:
    """Return what two documents of the same fleet have in common."""
    return (
        tuple(spec.resources),
        tuple(
            (tuple(s.capacity), s.idle_w, s.max_w, s.exponent, tuple(s.curve_w or ()))
            for s in spec.servers
        ),
    )
