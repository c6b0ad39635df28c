"""Evaluations as files: JSON for the means, Parquet for each episode, with all that made them.

An evaluation's JSON has these keys; they are stable, and a change of meaning changes `schema`.

| key                      | value                                                        |
|--------------------------|--------------------------------------------------------------|
| `schema`                 | "cloudsched.evaluation.v1"                                   |
| `policy`                 | its name, or the file that holds its numbers                 |
| `scenario`               | preset, workload, load, settings, workload_options           |
| `cluster`                | every rule, fleet and reward setting that follows from those |
| `split`, `seeds`         | "test", "train" or null; the list of seeds                   |
| each name in `METRICS`   | `mean`, `ci_low`, `ci_high`: 95 % bootstrap over seeds       |
| `energy_over_bound`      | the same three, of energy / energy bound                     |
| `versions`, `git_commit` | of what ran; the commit is null outside a repository         |
| `files`                  | where it was saved, if it was                                |

A comparison's has `schema` "cloudsched.comparison.v1", `scenario`, `cluster`, `split`, `seeds`,
`versions`, `git_commit` and `files` as above, and

| key                      | value                                                        |
|--------------------------|--------------------------------------------------------------|
| `policies`               | name -> metric -> `mean`, `ci_low`, `ci_high`                |
| `baseline`               | the policy that all others are compared with                 |
| `differences`            | name -> metric -> the same three, of policy - baseline,      |
|                          | paired by seed; the baseline itself is absent                |

An interval needs at least two seeds. With one there is nothing to resample: `ci_low` and `ci_high`
are then equal to `mean`, so that readers of the keys need no special case, and say nothing about
the spread; the length of `seeds` tells. People are shown `n/a` instead, and `ONE_SEED_NOTE`.

The Parquet file has one row for each policy and seed: `policy`, `seed`, and one column a metric.
"""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numba
import numpy as np

import cloudsched
from cloudsched.errors import ConfigError
from cloudsched.evaluation import Evaluation, paired_difference

EVALUATION_SCHEMA = "cloudsched.evaluation.v1"
COMPARISON_SCHEMA = "cloudsched.comparison.v1"
ONE_SEED_NOTE = "one seed: no interval"

Document = dict[str, Any]


def evaluation_document(evaluation: Evaluation, *, split: str | None = None) -> Document:
    """Return the JSON document of one evaluation."""
    return {
        "schema": EVALUATION_SCHEMA,
        "policy": evaluation.policy,
        **_settings(evaluation, split),
        **_entries(evaluation),
        **provenance(),
        "files": {},
    }


def comparison_document(
    evaluations: Mapping[str, Evaluation], *, baseline: str, split: str | None = None
) -> Document:
    """Return the JSON document of several evaluations on the same episodes."""
    reference = evaluations[baseline]
    return {
        "schema": COMPARISON_SCHEMA,
        **_settings(reference, split),
        "policies": {name: _entries(evaluation) for name, evaluation in evaluations.items()},
        "baseline": baseline,
        "differences": {
            name: {
                metric: asdict(estimate)
                for metric, estimate in paired_difference(evaluation, reference).items()
            }
            for name, evaluation in evaluations.items()
            if name != baseline
        },
        **provenance(),
        "files": {},
    }


def _settings(evaluation: Evaluation, split: str | None) -> Document:
    return {
        "scenario": evaluation.scenario.to_dict(),
        "cluster": evaluation.scenario.config.to_dict(),
        "split": split,
        "seeds": list(evaluation.seeds),
    }


def _entries(evaluation: Evaluation) -> Document:
    entries = {metric: asdict(estimate) for metric, estimate in evaluation.summary.items()}
    return {**entries, "energy_over_bound": asdict(evaluation.energy_over_bound)}


def provenance() -> Document:
    """Return the versions and the git commit of what runs."""
    return {
        "versions": {
            "cloudsched": cloudsched.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "numba": numba.__version__,
        },
        "git_commit": git_commit(Path(cloudsched.__file__).parent),
    }


def git_commit(folder: Path) -> str | None:
    """Return the commit that tracks a folder, with `-dirty` if it has changes; None without."""
    try:
        # An installed copy may lie inside somebody else's repository, which says nothing about it.
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def to_json(document: Document) -> str:
    """Return a document as text that any JSON reader takes."""
    return json.dumps(document, indent=2, allow_nan=False)


def to_parquet(evaluations: Sequence[Evaluation]) -> bytes:
    """Return the table of all episodes."""
    # Imported late: commands that save nothing start a third of a second sooner.
    import pyarrow
    import pyarrow.parquet

    columns: dict[str, Any] = {
        "policy": [e.policy for e in evaluations for _ in e.seeds],
        "seed": [seed for e in evaluations for seed in e.seeds],
    }
    for metric in evaluations[0].metrics:
        columns[metric] = np.concatenate([e.metrics[metric] for e in evaluations])
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written to, before the work and without making it."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"Cannot write to {str(folder)!r}: {str(existing)!r} is not a folder.")
    try:
        # Permissions alone do not tell, for example of read-only file systems or for root.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigError(
            f"Cannot write to {str(folder)!r}: {error.strerror} in {str(existing)!r}."
        ) from error


def write_files(contents: Mapping[Path, bytes]) -> None:
    """Write files that appear complete or not at all, also when interrupted."""
    drafts = {path: path.with_name(f".{path.name}.{os.getpid()}.part") for path in contents}
    try:
        for path, draft in drafts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(contents[path])
        for path, draft in drafts.items():
            os.replace(draft, path)
    except OSError as error:
        raise ConfigError(f"Cannot write {str(error.filename)!r}: {error.strerror}.") from error
    finally:
        for draft in drafts.values():
            with suppress(OSError):
                draft.unlink()
