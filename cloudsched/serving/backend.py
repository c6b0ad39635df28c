"""Everything behind the wire of one replica, put together from settings; no transport, no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cloudsched.config import ClusterConfig, Settings
from cloudsched.envs.catalog import PRESETS
from cloudsched.envs.observation import ENCODER_VERSION
from cloudsched.errors import CloudschedError
from cloudsched.serving import schemas
from cloudsched.serving.decision_log import DecisionLog
from cloudsched.serving.errors import ConflictError, OverloadedError, UnprocessableError
from cloudsched.serving.keeper import ClusterKeeper
from cloudsched.serving.kubernetes import Extender
from cloudsched.serving.limits import LimitSettings
from cloudsched.serving.measures import Measures
from cloudsched.serving.service import DecisionService
from cloudsched.serving.shield import ShieldSettings
from cloudsched.serving.store import Store
from cloudsched.serving.versions import ACTIVE, CANARY, SHADOW, Version, Versions, load_version
from cloudsched.serving.wire import struct_of

logger = logging.getLogger("ray.serve")

MAX_ATTEMPTS = 20
SYNC_S = 0.5  # seconds between two looks at what other replicas wrote on the board
STALE_S = 10.0  # a replica that has written nothing for so long is gone
VERSIONS_NOTE, MEASURES_NOTE = "versions", "measures/"

PolicyView = struct_of(schemas.PolicyView)
PoliciesView = struct_of(schemas.PoliciesView)


@dataclass(frozen=True, kw_only=True)
class ServingSettings(Settings):
    """What a replica serves, and how; it travels to all replicas as a dictionary."""

    policy: str = "best_fit+sleep"
    """Name of a rule, or folder of a bundle."""
    preset: str = ""
    """Rules of the clusters; those that the bundle was trained on when empty."""
    rules: dict[str, Any] = field(default_factory=dict)
    """Changes to the rules."""
    token: str = ""
    """What callers must know; empty: only callers on the same machine."""
    state_dir: str = "cloudsched-state"
    """Folder in which the states of clusters are kept."""
    log_dir: str = ""
    """Folder for the log of decisions; none when empty."""
    epsilon: float = 0.0
    """Share of decisions drawn at random, for those who learn from the log."""
    shield: ShieldSettings = field(default_factory=ShieldSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)

    @property
    def config(self) -> ClusterConfig:
        """The rules."""
        base = PRESETS[self.preset or "default"].config
        if not self.preset and (Path(self.policy) / "bundle.json").exists():
            from cloudsched.bundle import load_bundle

            base = load_bundle(Path(self.policy)).cluster
        changes = dict(self.rules)
        for part in ("fleet", "reward"):
            if isinstance(changes.get(part), dict):
                changes[part] = getattr(base, part).replace(**changes[part])
        return base.replace(**changes)


class Backend:
    """Service, keeper, extender, versions and log of one replica.

    Args:
        replica: name of this replica, in metrics and log files.
    """

    def __init__(self, settings: ServingSettings, store: Store, replica: str) -> None:
        self.settings = settings
        self.replica = replica
        self.measures = Measures()
        rules = settings.config
        self.log = DecisionLog(Path(settings.log_dir), replica, rules) if settings.log_dir else None
        self.service = DecisionService(
            rules,
            Versions(active=load_version(settings.policy)),
            load_version(settings.shield.fallback),
            settings.shield,
            measures=self.measures,
            log=None if self.log is None else self.log.add,
            epsilon=settings.epsilon,
        )
        self.keeper = ClusterKeeper(self.service, store)
        self.extender = Extender(self.service)
        self._store = store
        self._note = b""  # the versions that this replica has taken over
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take over what other replicas agreed on, and keep doing so."""
        await self._sync()
        self._task = asyncio.get_running_loop().create_task(self._sync_forever())

    async def stop(self) -> None:
        """Write out what is not written yet."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self.log is not None:
            self.log.close()

    async def load_policy(self, request: Any) -> Any:
        """Load a version for this replica now, and for the others within a second."""
        try:
            version = load_version(request.source, request.name)
            self.service.check(version)
        except (CloudschedError, OSError) as error:
            raise UnprocessableError(f"Cannot load {request.source!r}: {error}") from error
        return await self._agree(lambda v: v.with_version(version, request.role, request.share))

    async def drop_policy(self, role: str) -> Any:
        """End the trial of a canary or a shadow."""
        if role == ACTIVE:
            raise ConflictError("The active version cannot be taken away; load another instead.")
        return await self._agree(lambda versions: versions.without(role))

    def policies(self) -> Any:
        """Return the versions in use."""
        versions = self.service.versions
        listed = [_view(versions.active, ACTIVE, 1.0 - versions.canary_share)]
        if versions.canary is not None:
            listed.append(_view(versions.canary, CANARY, versions.canary_share))
        if versions.shadow is not None:
            listed.append(_view(versions.shadow, SHADOW, 0.0))
        return PoliciesView(
            policies=listed,
            encoder_version=ENCODER_VERSION,
            fallback=self.settings.shield.fallback,
        )

    async def metrics(self) -> str:
        """Return the metrics of all replicas, each with its name."""
        versions = self.service.versions
        roles = {versions.active.name: ACTIVE}
        for version, role in ((versions.canary, CANARY), (versions.shadow, SHADOW)):
            if version is not None:
                roles[version.name] = role
        notes = await self._store.read(MEASURES_NOTE, STALE_S)
        everyone = {
            name.removeprefix(MEASURES_NOTE): pickle.loads(note) for name, note in notes.items()
        }
        everyone[self.replica] = self.measures
        return Measures.text(everyone, roles)

    async def _agree(self, change: Callable[[Versions], Versions]) -> Any:
        """Change the versions of all replicas; another's change at the same time is kept, too."""
        for _ in range(MAX_ATTEMPTS):
            await self._sync()
            versions = change(self.service.versions)
            note = msgspec.json.encode(_document(versions))
            if await self._store.swap(VERSIONS_NOTE, self._note, note):
                self._note = note
                self.service.versions = versions
                return self.policies()
        raise OverloadedError("Too many changes of the versions at once; try again.")

    async def _sync_forever(self) -> None:
        while True:
            await asyncio.sleep(SYNC_S)
            try:
                await self._sync()
            except Exception:
                # The store is restarting, or a bundle is not readable here; the versions in use
                # stay in use until it works.
                logger.exception("Cannot take over what the other replicas agreed on.")

    async def _sync(self) -> None:
        note = (await self._store.read(VERSIONS_NOTE)).get(VERSIONS_NOTE, b"")
        if note and note != self._note:
            self.service.versions = self._versions(msgspec.json.decode(note))
            self._note = note
        if self.log is not None:
            self.log.flush_if_due()
        await self._store.post(MEASURES_NOTE + self.replica, pickle.dumps(self.measures))

    def _versions(self, document: dict[str, Any]) -> Versions:
        """Load the versions that the board names; those in use already are kept."""
        current = self.service.versions
        known = {
            (v.source, v.name, v.weights_sha256): v
            for v in (current.active, current.canary, current.shadow)
            if v is not None
        }

        def loaded(entry: dict[str, Any] | None) -> Version | None:
            if entry is None:
                return None
            key = (entry["source"], entry["name"], entry["weights_sha256"])
            if key not in known:
                version = load_version(entry["source"], entry["name"])
                self.service.check(version)
                return version
            return known[key]

        active = loaded(document["active"])
        assert active is not None
        return Versions(
            active=active,
            canary=loaded(document["canary"]),
            canary_share=document["canary_share"],
            shadow=loaded(document["shadow"]),
        )


def _document(versions: Versions) -> dict[str, Any]:
    def entry(version: Version | None) -> dict[str, Any] | None:
        if version is None:
            return None
        return {
            "source": version.source,
            "name": version.name,
            "weights_sha256": version.weights_sha256,
        }

    return {
        "active": entry(versions.active),
        "canary": entry(versions.canary),
        "canary_share": versions.canary_share,
        "shadow": entry(versions.shadow),
    }


def _view(version: Version, role: str, share: float) -> Any:
    return PolicyView(
        name=version.name,
        role=role,
        source=version.source,
        weights_sha256=version.weights_sha256,
        share=share,
        training=dict(version.training),
        evaluation=None if version.evaluation is None else dict(version.evaluation),
    )
