"""The clusters that the service keeps: optimistic changes against the store.

A replica works on its own copy of a state and commits the result. If another replica was faster, it
starts again from what is stored; if it dies before the commit, nothing has happened, and the
caller's retry goes to another replica.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from cloudsched.serving import schemas
from cloudsched.serving.errors import ConflictError, OverloadedError, UnknownError
from cloudsched.serving.live import (
    LiveCluster,
    apply_events,
    apply_reply,
    decision_request,
    decode_live,
    encode_live,
    has_decisions_left,
    new_cluster,
    view_of,
)
from cloudsched.serving.service import DecisionService, FleetDesk, fleet_of
from cloudsched.serving.store import Store, Stored
from cloudsched.serving.wire import encode, struct_of

MAX_ATTEMPTS = 50  # under contention each round lets one replica through
MAX_CACHED = 1024

EventsReply = struct_of(schemas.EventsReply)
FleetSpec = struct_of(schemas.FleetSpec)
decode_reply = msgspec.json.Decoder(EventsReply).decode


class ClusterKeeper:
    """Answers the calls about clusters whose state is kept."""

    def __init__(self, service: DecisionService, store: Store) -> None:
        self._service = service
        self._store = store
        self._cache: OrderedDict[str, tuple[int, LiveCluster]] = OrderedDict()

    async def create(self, request: Any) -> Any:
        """Register a cluster; the same again changes nothing."""
        desk = await self.desk(request.fleet)
        live = new_cluster(request, desk.fleet)
        if not await self._store.create(request.id, encode_live(live)):
            stored = await self._stored(request.id)
            there = decode_live(stored.state)
            if (there.fleet, there.time_of_day_s) != (live.fleet, live.time_of_day_s):
                raise ConflictError(
                    f"There is a cluster {request.id!r} already, with another fleet or time of day."
                )
            return view_of(there, stored.version, desk)
        return view_of(live, 0, desk)

    async def view(self, cluster: str) -> Any:
        """Return the state of a cluster."""
        stored = await self._stored(cluster)
        live = decode_live(stored.state)
        return view_of(live, stored.version, await self.desk(_fleet(live)))

    async def events(self, cluster: str, request: Any) -> bytes:
        """Apply events and decide; return the reply as JSON."""
        ids = [event.id for event in request.events]
        if len(set(ids)) != len(ids):
            raise ConflictError("Two events of the call have the same id; each needs its own.")
        seen: dict[str, int] = {}
        for _ in range(MAX_ATTEMPTS):
            version, live = await self._current(cluster)
            fresh = [event for event in request.events if event.id not in seen]
            if not fresh:
                return await self._repeat(cluster, ids, seen, version, live.tick)
            if request.expect_version is not None and request.expect_version != version:
                # The caller may have been overtaken by its own lost call.
                known = await self._known(cluster, version, ids)
                if known and len(known) == len(ids):
                    seen = known
                    continue
                raise ConflictError(
                    f"The state of {cluster!r} has version {version}, not {request.expect_version}."
                )
            desk = await self.desk(_fleet(live))
            try:
                changed, reply = self._decide(live, fresh, desk, request.alternatives)
            except ConflictError:
                # The state may be an old copy, or the events repeats of what it already holds.
                known = await self._known(cluster, version, ids)
                is_current = self._cache.get(cluster, (None,))[0] == version
                if is_current and set(known) <= set(seen):
                    raise
                seen.update(known)
                continue
            reply.version, reply.repeated = version + 1, [i for i in ids if i in seen]
            if seen:
                earlier = await self._replies(cluster, seen)
                reply.decisions = [d for r in earlier for d in r.decisions] + reply.decisions
            body = encode(reply)
            done = await self._store.commit(
                cluster, version, encode_live(changed), [e.id for e in fresh], body
            )
            if done.is_done:
                self._keep(cluster, version + 1, changed)
                return body
            seen.update(done.seen)
            self._take(cluster, done.current)
        raise OverloadedError(f"Too many calls change {cluster!r} at once; try again.")

    async def desk(self, fleet: Any) -> FleetDesk:
        """Return the desk of a fleet, which may be named after a cluster that uses it."""
        try:
            return self._service.desk(fleet)
        except UnknownError:
            stored = await self._store.load(fleet)
            if stored is None:
                raise
            inner = _fleet(decode_live(stored.state))
            if isinstance(inner, str):
                return await self.desk(inner)
            return self._service.keep(fleet, fleet_of(inner))

    def _decide(
        self, live: LiveCluster, events: list[Any], desk: FleetDesk, alternatives: int
    ) -> tuple[LiveCluster, Any]:
        service = self._service
        changed, changes = apply_events(live, events, desk, service.shield)
        decisions: list[Any] = []
        interventions: list[Any] = []
        policy = service.versions.of_cluster(live.id).name
        if changed.tick >= 0 and has_decisions_left(changed, desk):
            answer = service.decide_at(
                desk, decision_request(changed, desk, alternatives), is_paid=changed.has_waited
            )
            apply_reply(changed, answer, desk.config)
            decisions, interventions = answer.decisions, answer.interventions
        return changed, EventsReply(
            cluster=live.id,
            version=0,
            tick=changed.tick,
            applied=[event.id for event in events],
            repeated=[],
            rejected=changes.rejected,
            requeued=changes.requeued,
            policy=policy,
            decisions=decisions,
            interventions=interventions,
        )

    async def _repeat(
        self, cluster: str, ids: list[str], seen: dict[str, int], version: int, tick: int
    ) -> bytes:
        """Answer a call that was answered before: with what it got then."""
        earlier = await self._replies(cluster, seen)
        if len(earlier) == 1:
            reply = earlier[0]
            reply.applied, reply.repeated = [], ids
            return encode(reply)
        return encode(
            EventsReply(
                cluster=cluster,
                version=version,
                tick=tick,
                applied=[],
                repeated=ids,
                rejected=[name for r in earlier for name in r.rejected],
                requeued=[name for r in earlier for name in r.requeued],
                policy=earlier[-1].policy if earlier else "",
                decisions=[d for r in earlier for d in r.decisions],
                interventions=[note for r in earlier for note in r.interventions],
            )
        )

    async def _replies(self, cluster: str, seen: dict[str, int]) -> list[Any]:
        bodies = await self._store.replies(cluster, sorted(set(seen.values())))
        return [decode_reply(body) for body in bodies]

    async def _known(self, cluster: str, version: int, ids: list[str]) -> dict[str, int]:
        """Return which events were applied before, and take over the state if ours is old.

        A commit that builds on no version asks without changing anything.
        """
        answer = await self._store.commit(cluster, -1, b"", ids, b"")
        self._take(cluster, answer.current)
        return answer.seen

    async def _current(self, cluster: str) -> tuple[int, LiveCluster]:
        if cluster not in self._cache:
            self._take(cluster, await self._stored(cluster))
        return self._cache[cluster]

    async def _stored(self, cluster: str) -> Stored:
        stored = await self._store.load(cluster)
        if stored is None:
            raise UnknownError(f"No cluster {cluster!r}; register it with POST /v1/clusters.")
        return stored

    def _take(self, cluster: str, stored: Stored | None) -> None:
        if stored is None:
            self._cache.pop(cluster, None)
        else:
            self._keep(cluster, stored.version, decode_live(stored.state))

    def _keep(self, cluster: str, version: int, live: LiveCluster) -> None:
        if self._cache.get(cluster, (-1,))[0] > version:
            return  # a later call was faster
        self._cache[cluster] = (version, live)
        self._cache.move_to_end(cluster)
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)


def _fleet(live: LiveCluster) -> Any:
    """Return the fleet of a cluster as the service takes it."""
    return live.fleet if isinstance(live.fleet, str) else msgspec.convert(live.fleet, FleetSpec)
