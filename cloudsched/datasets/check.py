"""Validates a dataset: everything that is wrong, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cloudsched.config import ClusterConfig
from cloudsched.datasets.manifest import (
    Manifest,
    checksum,
    open_part,
    read_episodes,
    read_manifest,
)
from cloudsched.datasets.schema import Arrays, to_arrays
from cloudsched.errors import DatasetError

MAX_FINDINGS = 20


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a check found."""

    manifest: Manifest
    findings: tuple[str, ...]
    """Everything that is wrong, each with its place; the dataset is sound without any."""
    warnings: tuple[str, ...]
    """What is no fault, but may make learning from the data hard."""
    num_checked: int
    """Decisions looked at."""


def check_dataset(folder: Path, report: Callable[[str, int], None]) -> Report:
    """Check all of a dataset: checksums, columns, masks, episodes, coverage and costs.

    Args:
        report: called with each file's name and rows, once it is checked.
    """
    manifest = read_manifest(folder)
    findings: list[str] = []
    state = _Continuity(manifest)
    for name, part in manifest.files.items():
        for finding in _check_part(folder, name, manifest, state):
            findings.append(finding)
            if len(findings) == MAX_FINDINGS:
                findings.append("… and perhaps more; fix these first.")
                return _result(manifest, findings, state)
        report(name, part.rows)
    findings += state.conclude(folder)
    return _result(manifest, findings, state)


def require_sound(folder: Path) -> Manifest:
    """Return the manifest of a dataset whose files are the ones that were recorded, or refuse.

    Compares columns, rows and checksums, and not each decision: quick enough before every training.
    """
    manifest = read_manifest(folder)
    for name, part in manifest.files.items():
        open_part(folder, name, manifest).close()
        if checksum(folder / name) != part.sha256:
            raise DatasetError(f"{folder / name}: checksum differs; the file is damaged.")
    if manifest.num_decisions == 0:
        raise DatasetError(f"{folder}: holds no decisions.")
    return manifest


def _check_part(folder: Path, name: str, manifest: Manifest, state: _Continuity) -> Iterator[str]:
    try:
        file = open_part(folder, name, manifest)
        if checksum(folder / name) != manifest.files[name].sha256:
            yield f"{folder / name}: checksum differs; the file is damaged."
            return
        config = manifest.scenario.config
        for group in range(file.num_row_groups):
            where = f"{folder / name}, row group {group}"
            rows = to_arrays(file.read_row_group(group))
            yield from _check_rows(rows, config, manifest, where)
            yield from state.follow(rows, where)
    except (DatasetError, OSError, pa.ArrowException) as error:
        yield str(error) if name in str(error) else f"{folder / name}: {error}"


def _check_rows(
    rows: Arrays, config: ClusterConfig, manifest: Manifest, where: str
) -> Iterator[str]:
    action, mask = rows["action"], rows["action_mask"]
    is_known = (action >= 0) & (action < config.num_actions)
    yield from _say(~is_known, where, "action", action, f"is not in 0..{config.num_actions - 1}")
    yield from _say(
        ((mask != 0) & (mask != 1)).any(axis=1), where, "action_mask", None, "is not 0 or 1"
    )
    is_legal = np.zeros(len(action), np.bool_)
    is_legal[is_known] = mask[is_known.nonzero()[0], action[is_known]] != 0
    yield from _say(is_known & ~is_legal, where, "action", action, "is not legal by its own mask")
    for part in ("servers", "jobs", "context"):
        values = rows[part].reshape(len(action), -1)
        is_bad = np.asarray(~(np.abs(values) <= 1.0).all(axis=1))  # NaN too
        yield from _say(is_bad, where, part, None, "has values outside [-1, 1]")
    chance = rows["behaviour_probability"]
    is_chance = (chance > 0.0) & (chance <= 1.0)
    yield from _say(~is_chance, where, "behaviour_probability", chance, "is not in (0, 1]")
    # A tick can break at most every job of the queue and every arrival; waiting ones cost their
    # rate each.
    most = config.queue_capacity * (1.0 + config.reward.cost_late_rate) + 1e6
    cost = rows["cost"]
    yield from _say(~((cost >= 0.0) & (cost <= most)), where, "cost", cost, "is out of range")
    yield from _say(~np.isfinite(rows["reward"]), where, "reward", rows["reward"], "is not finite")
    power = rows["power_w"]
    is_power = (power >= 0.0) & np.isfinite(power)
    yield from _say(~is_power, where, "power_w", power, "is not a power")
    elapsed = rows["elapsed_ticks"]
    yield from _say(elapsed < 0, where, "elapsed_ticks", elapsed, "is negative")
    is_early = (elapsed == 0) & ((cost != 0.0) | (power != 0.0))
    yield from _say(is_early, where, "cost", cost, "or power before the tick ended")
    behaviour = rows["behaviour"]
    is_stranger = (behaviour < 0) | (behaviour >= len(manifest.behaviours))
    yield from _say(is_stranger, where, "behaviour", behaviour, "is not in the manifest")


def _say(
    is_bad: NDArray[np.bool_], where: str, column: str, values: NDArray[Any] | None, fault: str
) -> Iterator[str]:
    """Yield one line on the rows that are wrong, if any."""
    bad = is_bad.nonzero()[0]
    if len(bad):
        value = "" if values is None else f" {values[bad[0]].item()!r}"
        others = "" if len(bad) == 1 else f" (and {len(bad) - 1} more rows)"
        yield f"{where}, row {bad[0]}: {column}{value} {fault}{others}."


class _Continuity:
    """Follows episodes from row group to row group, and counts what there is."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._next_step = np.zeros(manifest.num_episodes, np.int64)
        self._has_ended = np.zeros(manifest.num_episodes, np.bool_)
        self.num_rows = 0
        self._num_toggles = 0
        self._counts = np.zeros(3, np.int64)  # placements, toggles, waits
        self._places = manifest.scenario.config

    def follow(self, rows: Arrays, where: str) -> Iterator[str]:
        """Yield where an episode skips a decision, goes on after its end, or changes its seed."""
        self.num_rows += len(rows["action"])
        num_pairs = self._places.visible_jobs * self._places.num_servers
        kind = (rows["action"] >= num_pairs).astype(int)
        kind += rows["action"] == self._places.num_actions - 1
        self._counts += np.bincount(kind, minlength=3)
        episode = rows["episode"]
        known = (episode >= 0) & (episode < self._manifest.num_episodes)
        yield from _say(~known, where, "episode", episode, "is not in the manifest")
        starts = np.flatnonzero(np.diff(episode, prepend=-1) != 0)
        for start, end in zip(starts, [*starts[1:], len(episode)], strict=True):
            e = int(episode[start])
            if not known[start]:
                continue
            steps = rows["step"][start:end]
            expected = self._next_step[e] + np.arange(end - start)
            if self._has_ended[e] or not np.array_equal(steps, expected):
                yield (
                    f"{where}, row {start}: episode {e} goes on at step {steps[0]}, expected "
                    f"{'nothing after its end' if self._has_ended[e] else self._next_step[e]}."
                )
            if (rows["seed"][start:end] != self._manifest.seeds[e]).any():
                yield f"{where}, row {start}: episode {e} has another seed than the manifest says."
            ends = rows["terminated"][start:end] | rows["truncated"][start:end]
            if ends[:-1].any():
                yield f"{where}, row {start}: episode {e} ends before its last decision."
            self._has_ended[e] |= ends[-1]
            self._next_step[e] = steps[-1] + 1

    def conclude(self, folder: Path) -> Iterator[str]:
        """Yield what only shows when everything has been read."""
        unended = np.flatnonzero(~self._has_ended)
        if len(unended):
            yield f"{folder}: {len(unended)} episodes never end, the first is {unended[0]}."
        if self.num_rows != self._manifest.num_decisions:
            yield (
                f"{folder}: holds {self.num_rows} decisions, but the manifest says "
                f"{self._manifest.num_decisions}."
            )
        found = len(read_episodes(folder))
        if found != self._manifest.num_episodes:
            yield f"{folder}: {found} rows of episodes, expected {self._manifest.num_episodes}."

    def warnings(self) -> Iterator[str]:
        """Yield what makes learning hard."""
        total = max(1, int(self._counts.sum()))
        kinds = ("placements", "toggles", "waits")
        for kind, count in zip(kinds, self._counts.tolist(), strict=True):
            if kind == "toggles" and not self._places.sleep:
                continue
            if count < 0.001 * total:
                yield f"Only {count} of {total} decisions are {kind}; nothing can be learned of it."
        num_seeds = len(set(self._manifest.seeds))
        if num_seeds < min(20, self._manifest.num_episodes):
            yield f"Only {num_seeds} arrival seeds in {self._manifest.num_episodes} episodes."
        if all(behaviour.epsilon == 0.0 for behaviour in self._manifest.behaviours):
            yield "No behaviour takes random decisions; importance weights will have no support."


def _result(manifest: Manifest, findings: list[str], state: _Continuity) -> Report:
    return Report(
        manifest=manifest,
        findings=tuple(findings),
        warnings=tuple(state.warnings()),
        num_checked=state.num_rows,
    )
