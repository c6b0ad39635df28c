"""A benchmark's trials as data: what each measures, and what it leaves in its folder.

`outcome.json` is written last, whole or not at all, so a folder that has one is finished:

| key        | value                                                                        |
|------------|------------------------------------------------------------------------------|
| `schema`   | "cloudsched.trial.v1"                                                        |
| `spec`     | the fields of the `TrialSpec` that it belongs to                             |
| `splits`   | `train` and `test`: `seeds`, and `metrics` by name with a value for each     |
| `training` | decisions, seconds, best return on train seeds …; empty for heuristics       |
| `versions`, `git_commit` | of what ran                                                    |

A learner's folder also holds `bundle` and, for going on after a kill, `checkpoint`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cloudsched.config import Settings
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.evaluation import Evaluation
from cloudsched.results import provenance, to_json, write_files

SCHEMA = "cloudsched.trial.v1"
OUTCOME, SPEC, BUNDLE = "outcome.json", "spec.json", "bundle"


@dataclass(frozen=True, kw_only=True)
class TrialSpec(Settings):
    """One policy on one workload, and for learners one training seed."""

    policy: str
    """Name of a heuristic, or of a file in `rllib_configs/`."""
    scenario: Scenario = field(default_factory=Scenario)
    num_seeds: int = 50
    """Train seeds and test seeds that the policy is measured on, each."""
    train_seed: int | None = None
    """Seed of the training; None for heuristics."""
    steps: int = 0
    """Decisions to train for."""
    minutes: float = 0.0
    """Stop training after so many minutes, if that is sooner."""
    config_digest: str = ""
    """Tells whether the file in `rllib_configs/` says the same as when the trial ran."""

    @property
    def is_learned(self) -> bool:
        """Whether there is something to train."""
        return self.train_seed is not None

    @property
    def key(self) -> str:
        """A name for the trial, which is also its folder's."""
        seed = f"-seed{self.train_seed}" if self.is_learned else ""
        return re.sub(r"[^\w@+.-]", "_", f"{self.policy}-{self.scenario.workload}{seed}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What a trial found."""

    spec: TrialSpec
    train: Evaluation
    test: Evaluation
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_cut_short(self) -> bool:
        """Whether time ended the training before its decisions were up."""
        return self.spec.is_learned and int(self.training["steps"]) < self.spec.steps


def begin(spec: TrialSpec, folder: Path) -> None:
    """Note in a trial's folder what it will hold, so that nothing else goes on from there."""
    write_files({folder / SPEC: to_json(spec.to_dict()).encode()})


def write_outcome(outcome: Outcome, folder: Path) -> None:
    """Write what a trial found; this finishes it."""
    document = {
        "schema": SCHEMA,
        "spec": outcome.spec.to_dict(),
        "splits": {
            split: {
                "seeds": list(evaluation.seeds),
                "metrics": {name: row.tolist() for name, row in evaluation.metrics.items()},
            }
            for split, evaluation in (("train", outcome.train), ("test", outcome.test))
        },
        "training": dict(outcome.training),
        **provenance(),
    }
    write_files({folder / OUTCOME: to_json(document).encode()})


def read_outcome(spec: TrialSpec, folder: Path) -> Outcome | None:
    """Return what a trial found, or None if it has not finished; refuses another trial's."""
    path, begun = folder / OUTCOME, folder / SPEC
    if not path.is_file():
        if begun.is_file():
            _refuse_another(_read(begun), spec, folder)
        return None
    document = _read(path)
    try:
        found, splits, training = document["spec"], document["splits"], document["training"]
        evaluations = {
            split: Evaluation(
                policy=spec.policy,
                scenario=spec.scenario,
                seeds=tuple(splits[split]["seeds"]),
                metrics={k: np.array(v) for k, v in splits[split]["metrics"].items()},
            )
            for split in ("train", "test")
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _foreign(path, error) from error
    _refuse_another(found, spec, folder)
    return Outcome(spec=spec, training=training, **evaluations)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise _foreign(path, error) from error


def _foreign(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{str(path)!r} is not the outcome of a trial ({type(error).__name__}: {error}); "
        "delete it or use another --out."
    )


def _refuse_another(found: Any, spec: TrialSpec, folder: Path) -> None:
    wanted = json.loads(json.dumps(spec.to_dict()))
    differences = _differences(found, wanted) if isinstance(found, dict) else [f"{found!r}"]
    if differences:
        raise ConfigError(
            f"{str(folder)!r} holds a trial with other settings ({', '.join(differences)}); "
            "use another --out, or delete that folder to run it again."
        )


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: {found.get(name)!r}, now {wanted.get(name)!r}"
        for name in sorted({*found, *wanted})
        if found.get(name) != wanted.get(name)
    ]


def config_digest(config: Any) -> str:
    """Return a short fingerprint of an algorithm's settings, the same in every process."""
    text = json.dumps(config.to_dict(), default=str, sort_keys=True)
    return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", text).encode()).hexdigest()[:12]
