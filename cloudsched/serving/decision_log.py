"""Every decision, with its propensity, as a dataset that the offline learner can train on.

Each replica writes folders of its own, one for each shape of cluster, in the format of
`cloudsched.datasets`: a file holds what some clusters decided until it was written, and each
cluster's part of it counts as an episode. Reward and cost are those of the rules, from the state
that the caller described.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cloudsched.config import ClusterConfig
from cloudsched.datasets.manifest import (
    ACTION_KINDS,
    EPISODES,
    MANIFEST,
    Behaviour,
    Manifest,
    PartFile,
    checksum,
)
from cloudsched.datasets.schema import OBSERVATION, arrow_schema, to_table
from cloudsched.envs.observation import columns
from cloudsched.envs.scenario import Scenario
from cloudsched.results import provenance
from cloudsched.serving.service import Logged

MAX_ROWS = 8192  # decisions in one file
MAX_AGE_S = 10.0  # after which a file is written anyway
MAX_FILES = 500  # in one folder, whose manifest is written anew with each
MAX_PENDING = 4  # files being written; more decisions are not logged until the disk keeps up

Rows = dict[str, list[Any]]


class DecisionLog:
    """Collects decisions and writes them in the background."""

    def __init__(self, folder: Path, replica: str, rules: ClusterConfig) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._replica = replica
        self._rules = rules
        self._shapes: dict[str, _Shape] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="decision-log")
        self._pending: list[Future[None]] = []
        self._since = time.monotonic()
        self.num_lost = 0

    def add(self, logged: Logged) -> None:
        """Take note of the decisions of one call."""
        config = logged.config
        name = f"{self._replica}-N{config.num_servers}-R{config.num_resources}"
        if name not in self._shapes:
            self._shapes[name] = _Shape(self._folder / name, config)
        if self._shapes[name].add(logged) >= MAX_ROWS:
            self.flush()

    def flush_if_due(self) -> None:
        """Write what has waited long enough."""
        if time.monotonic() - self._since > MAX_AGE_S:
            self.flush()

    def flush(self) -> None:
        """Hand everything that was collected to the writer."""
        self._since = time.monotonic()
        self._pending = [future for future in self._pending if not future.done()]
        for shape in self._shapes.values():
            if len(self._pending) >= MAX_PENDING:
                self.num_lost += shape.drop()
                continue
            clusters = shape.take()
            if clusters:
                self._pending.append(self._writer.submit(shape.write, clusters))

    def close(self) -> None:
        """Write the rest and wait for it."""
        self.flush()
        self._writer.shutdown(wait=True)
        for future in self._pending:
            future.result()


class _Shape:
    """The log of clusters whose observations have one shape."""

    def __init__(self, folder: Path, config: ClusterConfig) -> None:
        self._base = folder
        self._config = config
        self._schema = arrow_schema(config)
        self._columns = columns(config.num_resources)
        self._behaviours: list[Behaviour] = []
        self._clusters: dict[tuple[str, int], Rows] = {}
        self._num_rows = 0
        self._num_folders = 0
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        """Begin a new folder."""
        self._folder = self._base.with_name(f"{self._base.name}-{self._num_folders:04d}")
        self._num_folders += 1
        self._files: dict[str, PartFile] = {}
        self._episodes: Rows = {"episode": [], "seed": [], "behaviour": []}
        self._counts = dict.fromkeys(ACTION_KINDS, 0)
        self._num_decisions = self._num_ticks = 0
        self._num_arrived = 0.0

    def add(self, logged: Logged) -> int:
        """Collect decisions; return how many wait to be written."""
        behaviour = Behaviour(policy=logged.version.source, epsilon=logged.epsilon)
        if behaviour not in self._behaviours:
            self._behaviours.append(behaviour)
        number = self._behaviours.index(behaviour)
        for trace in logged.traces:
            for i, row in enumerate(trace.rows.tolist()):
                key = (logged.clusters[row], number)
                rows = self._clusters.setdefault(key, {})
                is_paid = logged.is_paid[row] or not trace.elapsed_ticks[i]
                values = {
                    **{part: trace.observation[part][i] for part in OBSERVATION},
                    "action": trace.verdict.actions[i],
                    "behaviour_probability": trace.verdict.propensity[i],
                    # The tick is paid for once, by the first decision that ended it.
                    "reward": 0.0 if logged.is_paid[row] else trace.reward[i],
                    "cost": 0.0 if is_paid else trace.cost[i],
                    "power_w": 0.0 if is_paid else trace.power_w[i],
                    "elapsed_ticks": 0 if is_paid else 1,
                }
                for name, value in values.items():
                    rows.setdefault(name, []).append(value)
                self._num_rows += 1
        return self._num_rows

    def take(self) -> dict[tuple[str, int], Rows]:
        """Return what was collected, and start anew."""
        clusters, self._clusters, self._num_rows = self._clusters, {}, 0
        return clusters

    def drop(self) -> int:
        """Forget what was collected; return how many decisions."""
        num_lost = self._num_rows
        self.take()
        return num_lost

    def write(self, clusters: dict[tuple[str, int], Rows]) -> None:
        """Write one file, then the manifest that makes it part of the dataset."""
        with self._lock:
            if len(self._files) == MAX_FILES:
                self._begin()
            self._folder.mkdir(parents=True, exist_ok=True)
            first = len(self._episodes["episode"])
            parts = [
                self._episode(first + i, behaviour, rows)
                for i, ((_, behaviour), rows) in enumerate(clusters.items())
            ]
            table = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            name = f"part-{len(self._files):06d}.parquet"
            path = self._folder / name
            pq.write_table(
                to_table(table, self._schema), path, compression="lz4", use_dictionary=False
            )
            self._files[name] = PartFile(rows=len(table["action"]), sha256=checksum(path))
            for number, (_, behaviour) in enumerate(clusters):
                self._episodes["episode"].append(first + number)
                self._episodes["seed"].append(first + number)
                self._episodes["behaviour"].append(behaviour)
            self._count(table)
            _replace(self._folder / EPISODES, lambda p: pq.write_table(pa.table(self._episodes), p))
            text = self._manifest().to_json()
            _replace(self._folder / MANIFEST, lambda p: p.write_text(text, "utf-8"))

    def _episode(self, number: int, behaviour: int, rows: Rows) -> dict[str, NDArray[Any]]:
        length = len(rows["action"])
        is_last = np.arange(length) == length - 1
        return {
            **{name: np.stack(values) for name, values in rows.items()},
            "terminated": np.zeros(length, np.bool_),
            "truncated": is_last,
            "behaviour": np.full(length, behaviour),
            "episode": np.full(length, number),
            # Production has no arrival seeds; every episode has arrivals of its own.
            "seed": np.full(length, number),
            "step": np.arange(length),
        }

    def _count(self, table: dict[str, NDArray[Any]]) -> None:
        config, at = self._config, self._columns
        toggles = config.visible_jobs * config.num_servers
        action = table["action"]
        is_toggle = (action >= toggles) & (action < config.num_actions - 1)
        server = np.where(is_toggle, action - toggles, 0)
        is_asleep = table["servers"][np.arange(len(action)), server, at.is_asleep] != 0.0
        self._counts["place"] += int((action < toggles).sum())
        self._counts["wake"] += int((is_toggle & is_asleep).sum())
        self._counts["sleep"] += int((is_toggle & ~is_asleep).sum())
        self._counts["wait"] += int((action == config.num_actions - 1).sum())
        self._num_decisions += len(action)
        ended = table["elapsed_ticks"] > 0
        self._num_ticks += int(ended.sum())
        # Callers send rates, not arrivals; the fastest average is closest to what came.
        rate = table["context"][ended, config.num_resources + 1].astype(np.float64)
        self._num_arrived += float((config.num_servers * rate / (1.0 - rate)).sum())

    def _manifest(self) -> Manifest:
        config = self._config.to_dict()
        return Manifest(
            scenario=Scenario(settings=config),
            behaviours=tuple(self._behaviours),
            seeds=tuple(self._episodes["seed"]),
            num_decisions=self._num_decisions,
            num_episodes=len(self._episodes["episode"]),
            num_ticks=self._num_ticks,
            num_arrived=round(self._num_arrived),
            action_counts=dict(self._counts),
            files=dict(self._files),
            provenance=provenance(),
        )


def _replace(path: Path, write: Any) -> None:
    """Write a file so that readers see the old one or the new one."""
    part = path.with_name(f".{path.name}.part")
    write(part)
    os.replace(part, path)
