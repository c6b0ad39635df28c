"""What a dataset says of itself: `manifest.json`, written last, so that without it there is none.

| key               | value                                                                    |
|-------------------|--------------------------------------------------------------------------|
| `schema`          | "cloudsched.dataset.v1"                                                  |
| `encoder_version` | of the observations                                                      |
| `scenario`        | preset, workload, load, settings, workload_options                       |
| `behaviours`      | list of `policy` and `epsilon`; rows refer to them by position           |
| `seeds`           | of the episodes, in their order                                          |
| `num_decisions`, `num_episodes`, `num_ticks`, `num_arrived` | counts                         |
| `action_counts`   | decisions of each kind: `place`, `sleep`, `wake`, `wait`                 |
| `files`           | name -> `rows`, `sha256`                                                 |
| `versions`, `git_commit` | of what recorded it                                               |

Beside it lie `part-*.parquet` (the decisions) and `episodes.parquet`: one row an episode with
`episode`, `seed`, `behaviour` and the measures of `cloudsched.metrics` but the bound.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cloudsched.config import Settings
from cloudsched.datasets.schema import SCHEMA, arrow_schema, check_schema
from cloudsched.envs.observation import ENCODER_VERSION
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import CloudschedError, DatasetError

MANIFEST, EPISODES = "manifest.json", "episodes.parquet"
ACTION_KINDS = ("place", "sleep", "wake", "wait")
MAX_MANIFEST_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class Behaviour(Settings):
    """A policy that was logged."""

    policy: str
    """Name of a heuristic, or folder of a bundle."""
    epsilon: float = 0.0
    """Share of decisions drawn at random: first the kind of action (placement, toggle or waiting),
    then one legal action of that kind."""

    def __post_init__(self) -> None:
        self._number("epsilon", low=0.0, high=1.0)

    @property
    def name(self) -> str:
        """The policy, with its share of random decisions if there are any."""
        return f"{self.policy}~{self.epsilon:g}" if self.epsilon else self.policy

    @classmethod
    def parse(cls, text: str) -> Behaviour:
        """Read `POLICY` or `POLICY~EPSILON`."""
        policy, tilde, number = text.partition("~")
        try:
            return cls(policy=policy, epsilon=float(number) if tilde else 0.0)
        except ValueError as error:
            raise DatasetError(
                f"Behaviour {text!r}: expected POLICY or POLICY~EPSILON with EPSILON in [0, 1]."
            ) from error


@dataclass(frozen=True, kw_only=True)
class PartFile(Settings):
    """One file of decisions."""

    rows: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a dataset holds and where it comes from."""

    scenario: Scenario
    behaviours: tuple[Behaviour, ...]
    seeds: tuple[int, ...]
    num_decisions: int
    num_episodes: int
    num_ticks: int
    num_arrived: int
    action_counts: Mapping[str, int]
    files: Mapping[str, PartFile]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arrivals_per_tick(self) -> float:
        """Jobs that arrived in a tick, on average; turns a cost a tick into a rate of jobs."""
        return self.num_arrived / max(1, self.num_ticks)

    @property
    def authors(self) -> tuple[str, ...]:
        """The policies behind the behaviours, whatever their share of random decisions."""
        return tuple(dict.fromkeys(behaviour.policy for behaviour in self.behaviours))

    def to_json(self) -> str:
        """Return the document."""
        document = {
            "schema": SCHEMA,
            "encoder_version": ENCODER_VERSION,
            "scenario": self.scenario.to_dict(),
            "behaviours": [asdict(behaviour) for behaviour in self.behaviours],
            "seeds": list(self.seeds),
            "num_decisions": self.num_decisions,
            "num_episodes": self.num_episodes,
            "num_ticks": self.num_ticks,
            "num_arrived": self.num_arrived,
            "action_counts": dict(self.action_counts),
            "files": {name: asdict(part) for name, part in self.files.items()},
            **self.provenance,
        }
        return json.dumps(document, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read and check a dataset's manifest; the files themselves are checked when they are read."""
    document = _read_document(folder / MANIFEST)
    if document.get("schema") != SCHEMA:
        raise DatasetError(
            f"{folder}: schema {document.get('schema')!r} is not {SCHEMA!r}; "
            "record it again with this version."
        )
    if document.get("encoder_version") != ENCODER_VERSION:
        raise DatasetError(
            f"{folder}: recorded with encoder version {document.get('encoder_version')!r}, but "
            f"this is version {ENCODER_VERSION}; record it again."
        )
    counts = ("num_decisions", "num_episodes", "num_ticks", "num_arrived")
    try:
        manifest = Manifest(
            scenario=Scenario.from_dict(document["scenario"]),
            behaviours=tuple(Behaviour.from_dict(entry) for entry in document["behaviours"]),
            seeds=tuple(int(seed) for seed in document["seeds"]),
            action_counts={kind: int(document["action_counts"][kind]) for kind in ACTION_KINDS},
            files={n: PartFile.from_dict(entry) for n, entry in document["files"].items()},
            provenance={key: document.get(key) for key in ("versions", "git_commit")},
            **{name: int(document[name]) for name in counts},
        )
        _ = manifest.scenario.config
    except (KeyError, TypeError, ValueError, AttributeError, CloudschedError) as error:
        raise DatasetError(
            f"{folder / MANIFEST}: damaged: {type(error).__name__}: {error}"
        ) from error
    if any(Path(name).name != name for name in manifest.files):
        raise DatasetError(f"{folder / MANIFEST}: names files outside its folder.")
    return manifest


def open_part(folder: Path, name: str, manifest: Manifest) -> pq.ParquetFile:
    """Open one file of decisions and check its columns and rows against the manifest."""
    path = folder / name
    try:
        # Mapped: what is read is not first copied into a buffer as large as a row group.
        file = pq.ParquetFile(path, memory_map=True)
        rows = file.metadata.num_rows
        found = file.schema_arrow
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"{path}: cannot be read: {error}; record it again.") from error
    check_schema(found, arrow_schema(manifest.scenario.config), str(path))
    if rows != manifest.files[name].rows:
        raise DatasetError(
            f"{path}: has {rows} rows, but the manifest says {manifest.files[name].rows}."
        )
    return file


def read_episodes(folder: Path) -> pa.Table:
    """Return the table of episodes."""
    try:
        return pq.read_table(folder / EPISODES)
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"{folder / EPISODES}: cannot be read: {error}.") from error


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_document(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise DatasetError(f"{path}: larger than any manifest; not a dataset.")
        document = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise DatasetError(
            f"{path}: cannot be read: {error}. Expected a folder that offline/record.py wrote."
        ) from error
    if not isinstance(document, dict):
        raise DatasetError(f"{path}: not a manifest.")
    return document
