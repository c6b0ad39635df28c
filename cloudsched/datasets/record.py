"""Records a dataset: episodes fanned out with Ray Data, streamed to Parquet, then the manifest."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cloudsched.config import Settings
from cloudsched.datasets.manifest import (
    ACTION_KINDS,
    EPISODES,
    MANIFEST,
    Behaviour,
    Manifest,
    PartFile,
)
from cloudsched.datasets.shard import MakePolicy, Shard, record_shard
from cloudsched.envs.cluster import FRESH_SEEDS
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError, DatasetError

FIRST_SEED = 50  # below lie the train seeds, on which policies are compared before they are tested


def default_behaviours() -> tuple[Behaviour, ...]:
    """Return the mix that is recorded unless told otherwise: 16 plain rules, none of them tuned.

    The four that never sleep decide by themselves alone. Of the others each is logged three times:
    by itself, with 5 % of its decisions drawn at random, and with 20 %.
    """
    return tuple(
        Behaviour(policy=base + sleep, epsilon=epsilon)
        for base in ("rr", "sjf", "best_fit", "power_aware")
        for sleep in ("", "+sleep", "+band", "+headroom")
        for epsilon in ((0.0, 0.05, 0.2) if sleep else (0.0,))
    )


@dataclass(frozen=True, kw_only=True)
class RecordingConfig(Settings):
    """How much is recorded, and by whom."""

    num_episodes: int = 400
    """Episodes, each with its own arrivals; behaviours take turns."""
    episodes_per_file: int = 40
    """Episodes that run side by side and share a file."""
    seed: int = 0
    """Seed of the choice of arrivals and of random decisions."""
    behaviours: tuple[Behaviour, ...] = field(default_factory=default_behaviours)
    """The policies that are logged."""

    def __post_init__(self) -> None:
        self._integer("num_episodes", low=1, high=FRESH_SEEDS - FIRST_SEED)
        self._integer("episodes_per_file", low=1, high=4096)
        self._integer("seed", low=0)
        if not self.behaviours:
            raise ConfigError("behaviours=(): expected at least one.")


def record(
    scenario: Scenario,
    config: RecordingConfig,
    folder: Path,
    make_policy: MakePolicy,
    report: Callable[[int, int], None],
    provenance: Mapping[str, Any],
    spread: Spread,
) -> Manifest:
    """Record a dataset into a new folder, which appears only when it is whole.

    Args:
        make_policy: builds behaviours that are no heuristics.
        report: called with files done and decisions so far.
        provenance: versions and commit of what records, for the manifest.
        spread: `with_ray_data` or `in_process`.
    """
    if folder.exists() and any(folder.iterdir()):
        raise DatasetError(f"{folder} is not empty; choose another folder or remove it.")
    shards = plan(scenario, config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.part").absolute()
    partial.mkdir()
    try:
        results: dict[int, dict[str, Any]] = {}
        num_decisions = 0
        for row in spread(Recorder(shards, str(partial), make_policy), len(shards)):
            result = json.loads(row["result"])
            results[row["shard"]] = result
            num_decisions += result["rows"]
            report(len(results), num_decisions)
        manifest = _manifest(scenario, config, shards, results, provenance)
        pq.write_table(_episodes(shards, results), partial / EPISODES)
        (partial / MANIFEST).write_text(manifest.to_json(), "utf-8")
        if folder.exists():
            folder.rmdir()
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def plan(scenario: Scenario, config: RecordingConfig) -> list[Shard]:
    """Deal out seeds and behaviours; no two episodes have the same arrivals."""
    generator = np.random.default_rng(config.seed)
    num_fresh = FRESH_SEEDS - FIRST_SEED
    seeds = FIRST_SEED + generator.choice(num_fresh, size=config.num_episodes, replace=False)
    # Behaviours take turns, and then gather: who learns from one of them reads few files.
    rows = np.sort(np.arange(config.num_episodes) % len(config.behaviours))
    shards = []
    for first in range(0, config.num_episodes, config.episodes_per_file):
        last = min(first + config.episodes_per_file, config.num_episodes)
        shards.append(
            Shard(
                scenario=scenario,
                behaviours=config.behaviours,
                rows=tuple(rows[first:last].tolist()),
                seeds=tuple(seeds[first:last].tolist()),
                first_episode=first,
                entropy=config.seed,
            )
        )
    return shards


class Recorder:
    """The stage that does the work: from the number of a shard to what its file holds."""

    def __init__(self, shards: list[Shard], folder: str, make_policy: MakePolicy) -> None:
        self._shards = shards
        self._folder = folder
        self._make_policy = make_policy

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Record the shard that a row names."""
        number = int(row["shard"])
        path = Path(self._folder) / part_name(number)
        result = record_shard(self._shards[number], path, self._make_policy)
        return {"shard": number, "result": json.dumps(result._asdict())}


Spread = Callable[[Recorder, int], Iterator[dict[str, Any]]]
"""Runs the recorder on the numbers of so many shards and yields what it returns, in any order."""


def with_ray_data(recorder: Recorder, num_shards: int) -> Iterator[dict[str, Any]]:
    """Record on all cores of the Ray that runs."""
    import ray

    from cloudsched.datasets.quiet import quiet_ray_data

    quiet_ray_data()
    numbers = [{"shard": i} for i in range(num_shards)]
    dataset = ray.data.from_items(numbers, override_num_blocks=num_shards).map(recorder)
    yield from dataset.iter_rows()


def in_process(recorder: Recorder, num_shards: int) -> Iterator[dict[str, Any]]:
    """Record here, one file after another."""
    for i in range(num_shards):
        yield recorder({"shard": i})


def part_name(number: int) -> str:
    """Return the name of a file of decisions."""
    return f"part-{number:05d}.parquet"


def _manifest(
    scenario: Scenario,
    config: RecordingConfig,
    shards: list[Shard],
    results: Mapping[int, dict[str, Any]],
    provenance: Mapping[str, Any],
) -> Manifest:
    ordered = [results[i] for i in range(len(shards))]
    return Manifest(
        scenario=scenario,
        behaviours=config.behaviours,
        seeds=tuple(seed for shard in shards for seed in shard.seeds),
        num_decisions=sum(result["rows"] for result in ordered),
        num_episodes=config.num_episodes,
        num_ticks=sum(result["num_ticks"] for result in ordered),
        num_arrived=int(sum(sum(result["episodes"]["arrived"]) for result in ordered)),
        action_counts={
            kind: sum(result["action_counts"][kind] for result in ordered) for kind in ACTION_KINDS
        },
        files={
            part_name(i): PartFile(rows=result["rows"], sha256=result["sha256"])
            for i, result in enumerate(ordered)
        },
        provenance=provenance,
    )


def _episodes(shards: list[Shard], results: Mapping[int, dict[str, Any]]) -> pa.Table:
    tables = []
    for i, shard in enumerate(shards):
        measures = results[i]["episodes"]
        tables.append(
            pa.table(
                {
                    "episode": shard.first_episode + np.arange(len(shard.seeds)),
                    "seed": np.array(shard.seeds),
                    "behaviour": np.array(shard.rows),
                    **{name: np.array(values) for name, values in measures.items()},
                }
            )
        )
    return pa.concat_tables(tables)
