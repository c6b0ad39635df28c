"""Where the states of clusters live: one place that all replicas find, on disk.

A commit names the version that it builds on, and is refused when another came first. Ids of applied
events and the replies they got are kept beside the state, so that an event applies once however
often it is sent, and a caller who lost a reply gets it again.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

KEPT_VERSIONS = 20_000  # replies and event ids kept for each cluster

TABLES = """
CREATE TABLE IF NOT EXISTS clusters (id TEXT PRIMARY KEY, version INTEGER, state BLOB);
CREATE TABLE IF NOT EXISTS events (
    cluster TEXT, id TEXT, version INTEGER, PRIMARY KEY (cluster, id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS replies (
    cluster TEXT, version INTEGER, reply BLOB, PRIMARY KEY (cluster, version)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS events_by_version ON events (cluster, version);
CREATE TABLE IF NOT EXISTS board (name TEXT PRIMARY KEY, value BLOB, written REAL);
"""


class Stored(NamedTuple):
    """A state and its version."""

    version: int
    state: bytes


class Committed(NamedTuple):
    """What became of a commit."""

    is_done: bool
    current: Stored | None  # the state that came first, where there is one
    seen: dict[str, int]  # events that were applied before -> version that they made


class Store(Protocol):
    """What replicas ask of the place where states live."""

    async def create(self, cluster: str, state: bytes) -> bool:
        """Store a new cluster; False if there is one of that name."""

    async def load(self, cluster: str) -> Stored | None:
        """Return a cluster's state."""

    async def commit(
        self, cluster: str, base: int, state: bytes, events: Sequence[str], reply: bytes
    ) -> Committed:
        """Replace the state of version `base`, once, and remember events and reply."""

    async def replies(self, cluster: str, versions: Sequence[int]) -> list[bytes]:
        """Return the replies that made some versions; those too old are left out."""

    async def post(self, name: str, value: bytes) -> None:
        """Put a note on the board."""

    async def swap(self, name: str, expected: bytes, value: bytes) -> bool:
        """Replace a note, unless it is no longer what the caller expects (empty: there is none)."""

    async def read(self, prefix: str, max_age_s: float | None = None) -> dict[str, bytes]:
        """Return the notes whose names begin so."""


class ClusterBook:
    """States in an SQLite file; survives the death of the process that holds it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode=WAL")
        # In WAL mode nothing is lost when the process dies; a power cut may cost the last events.
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.executescript(TABLES)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def create(self, cluster: str, state: bytes) -> bool:
        """See `Store`."""
        with self._database:
            found = self._database.execute(
                "INSERT OR IGNORE INTO clusters VALUES (?, 0, ?)", (cluster, state)
            )
        return found.rowcount == 1

    def load(self, cluster: str) -> Stored | None:
        """See `Store`."""
        row = self._database.execute(
            "SELECT version, state FROM clusters WHERE id = ?", (cluster,)
        ).fetchone()
        return None if row is None else Stored(*row)

    def commit(
        self, cluster: str, base: int, state: bytes, events: Sequence[str], reply: bytes
    ) -> Committed:
        """See `Store`."""
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        try:
            seen = self._seen(cluster, events)
            current = self.load(cluster)
            if seen or current is None or current.version != base:
                database.execute("ROLLBACK")
                return Committed(False, current, seen)
            version = base + 1
            database.execute(
                "UPDATE clusters SET version = ?, state = ? WHERE id = ?", (version, state, cluster)
            )
            database.executemany(
                "INSERT INTO events VALUES (?, ?, ?)", [(cluster, e, version) for e in events]
            )
            database.execute("INSERT INTO replies VALUES (?, ?, ?)", (cluster, version, reply))
            if version % 1000 == 0:
                for table in ("events", "replies"):
                    database.execute(
                        f"DELETE FROM {table} WHERE cluster = ? AND version < ?",
                        (cluster, version - KEPT_VERSIONS),
                    )
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
        return Committed(True, None, {})

    def replies(self, cluster: str, versions: Sequence[int]) -> list[bytes]:
        """See `Store`."""
        found = []
        for version in versions:
            row = self._database.execute(
                "SELECT reply FROM replies WHERE cluster = ? AND version = ?", (cluster, version)
            ).fetchone()
            if row is not None:
                found.append(row[0])
        return found

    def post(self, name: str, value: bytes) -> None:
        """See `Store`."""
        with self._database:
            self._database.execute(
                "INSERT OR REPLACE INTO board VALUES (?, ?, ?)", (name, value, time.time())
            )

    def swap(self, name: str, expected: bytes, value: bytes) -> bool:
        """See `Store`."""
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        try:
            row = database.execute("SELECT value FROM board WHERE name = ?", (name,)).fetchone()
            # A repeat after the store's death finds its own value, which is as good.
            is_expected = (b"" if row is None else row[0]) in (expected, value)
            if is_expected:
                database.execute(
                    "INSERT OR REPLACE INTO board VALUES (?, ?, ?)", (name, value, time.time())
                )
        finally:
            database.execute("COMMIT")
        return is_expected

    def read(self, prefix: str, max_age_s: float | None = None) -> dict[str, bytes]:
        """See `Store`."""
        since = 0.0 if max_age_s is None else time.time() - max_age_s
        rows = self._database.execute(
            "SELECT name, value FROM board WHERE substr(name, 1, ?) = ? AND written >= ?",
            (len(prefix), prefix, since),
        )
        return dict(rows.fetchall())

    def _seen(self, cluster: str, events: Sequence[str]) -> dict[str, int]:
        seen: dict[str, int] = {}
        for start in range(0, len(events), 500):
            some = events[start : start + 500]
            marks = ",".join("?" * len(some))
            rows = self._database.execute(
                f"SELECT id, version FROM events WHERE cluster = ? AND id IN ({marks})",
                (cluster, *some),
            )
            seen.update(rows.fetchall())
        return seen


class LocalStore:
    """A book in this process, as a `Store`: for a server without Ray."""

    def __init__(self, path: Path) -> None:
        self._book = ClusterBook(path)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._book, name)

        async def wrapped(*arguments: Any) -> Any:
            return call(*arguments)

        return wrapped
