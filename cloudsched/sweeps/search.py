"""A search of hyper-parameters by a scheduler of Ray Tune: run or resume, table, best trial.

A search's folder holds

| file          | content                                                                      |
|---------------|------------------------------------------------------------------------------|
| `search.json` | what is searched; another search in the same folder is refused               |
| `tune/`       | Tune's own state, from which a killed search goes on                         |
| `trials.json` | a row for each trial, the best first                                         |
| `best.json`   | hyper-parameters of the best trial: `cloudsched train --hyperparameters`     |
| `bundle/`     | its policy                                                                   |

Trials are judged by the return of their policy on train seeds, without exploration.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray import tune
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cloudsched.bundle import load_bundle, save_bundle
from cloudsched.errors import CloudschedError, ConfigError
from cloudsched.results import provenance, to_json, write_files
from cloudsched.sweeps.progress import ProgressLines
from cloudsched.sweeps.specs import BUNDLE
from cloudsched.sweeps.trials import TrainingTrial

METRIC = "train_seeds/episode_return"
TIME = "steps"
STATE_SECONDS = "2"  # how often Tune saves which trials are finished
CHECKPOINTS_KEPT = 4  # PBT copies from checkpoints of others, which must not be gone by then
MAX_FAILURES = 3

Document = dict[str, Any]


def _is_grid(value: Any) -> bool:
    return isinstance(value, dict) and "grid_search" in value


def make_tuner(
    *,
    algorithm: Any,
    search_space: Mapping[str, Any],
    scheduler: Any,
    num_trials: int,
    steps: int,
    reports: int,
    num_seeds: int,
    folder: Path,
) -> tune.Tuner:
    """Return what runs a search.

    Args:
        algorithm: `AlgorithmConfig` that the hyper-parameters of a trial change.
        search_space: for `apply_hyperparameters`, with values or domains of Tune.
        scheduler: judges trials by `METRIC` at times counted in `TIME`.
        steps: decisions of the longest trial.
        reports: measurements of the longest trial.
        num_trials: trials of each point of the grids in `search_space`.
        num_seeds: train seeds of a measurement.
    """
    grids = [value["grid_search"] for value in search_space.values() if _is_grid(value)]
    num_variants = math.prod(map(len, grids))
    return tune.Tuner(
        TrainingTrial,
        param_space={
            "algorithm": algorithm,
            "hyperparameters": dict(search_space),
            "steps_a_report": max(1, steps // reports),
            "num_seeds": num_seeds,
        },
        tune_config=tune.TuneConfig(
            metric=METRIC,
            mode="max",
            scheduler=scheduler,
            num_samples=num_trials,
            reuse_actors=True,
            trial_name_creator=trial_name,
            trial_dirname_creator=trial_name,
        ),
        run_config=tune.RunConfig(
            storage_path=str(folder),
            name="tune",
            stop={TIME: steps},
            failure_config=tune.FailureConfig(max_failures=MAX_FAILURES),
            checkpoint_config=tune.CheckpointConfig(
                checkpoint_frequency=1, num_to_keep=CHECKPOINTS_KEPT
            ),
            callbacks=[ProgressLines(num_done=0, num_trials=num_trials * num_variants)],
            verbose=0,
        ),
    )


def trial_name(trial: Any) -> str:
    """Return what Tune, TensorBoard and Ray's dashboard call a trial."""
    return f"trial-{trial.trial_id}"


def fit_or_resume(build: Callable[[], tune.Tuner], folder: Path, what: Document) -> Any:
    """Run a search, or go on with the one that is in the folder; return Tune's results.

    A scheduler starts afresh when a search is resumed; trials keep their hyper-parameters.
    """
    os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", STATE_SECONDS)
    _check_same(folder, what)
    state = str(folder / "tune")
    if tune.Tuner.can_restore(state):
        tuner = tune.Tuner.restore(state, trainable=TrainingTrial, resume_errored=True)
    else:
        tuner = build()
    results = tuner.fit()
    if results.num_terminated + results.num_errors < len(results):
        raise KeyboardInterrupt
    if results.num_terminated == 0:
        fault = str(results.errors[0]).strip().splitlines()[-1]
        raise CloudschedError(f"All {len(results)} trials failed: {fault}.")
    return results


def save(results: Any, folder: Path, what: Document) -> Document:
    """Write table, best hyper-parameters and best policy, and return what `trials.json` holds."""
    trials = sorted(
        (
            {
                "trial": Path(result.path).name,
                **{k: result.metrics[k] for k in ("steps", "seconds", "best_return")},
                **{k: result.metrics["train_seeds"][k] for k in MEASURES},
                "hyperparameters": result.config["hyperparameters"],
            }
            for result in results
            if result.error is None and result.metrics
        ),
        key=lambda row: -row["best_return"],
    )
    best = next(r for r in results if Path(r.path).name == trials[0]["trial"])
    with best.checkpoint.as_directory() as checkpoint:
        save_bundle(load_bundle(Path(checkpoint) / BUNDLE), folder / BUNDLE)
    files = {name: folder / name for name in ("trials.json", "best.json", BUNDLE)}
    document = {
        **what,
        "trials": trials,
        "num_failed": results.num_errors,
        **provenance(),
        "files": {name: str(path) for name, path in files.items()},
    }
    found = {"found_by": {**what, "trial": trials[0]["trial"]}, **trials[0]["hyperparameters"]}
    write_files(
        {
            files["trials.json"]: to_json(document).encode(),
            files["best.json"]: to_json(found).encode(),
        }
    )
    return document


MEASURES = ("episode_return", "mean_power_w", "sla_violation_rate")


def table(document: Document) -> Table:
    """Return the trials as a table, the best first."""
    shown = Table(
        title=f"{document['search']}: {len(document['trials'])} trials on {document['workload']}, "
        f"by their best return on train seeds ({document['num_failed']} failed)",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    names = sorted({name for row in document["trials"] for name in _flat(row)})
    for column in ("trial", "decisions", "best return", "last return", "power W", "late %", *names):
        shown.add_column(column, justify="left" if column == "trial" else "right")
    for row in document["trials"]:
        values = _flat(row)
        shown.add_row(
            row["trial"],
            f"{row['steps']:,}",
            f"{row['best_return']:,.1f}",
            f"{row['episode_return']:,.1f}",
            f"{row['mean_power_w']:,.0f}",
            f"{100.0 * row['sla_violation_rate']:.2f}",
            *(_shown(values[name]) if name in values else "" for name in names),
        )
    return shown


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _flat(row: Document) -> dict[str, Any]:
    return {k: v for part in row["hyperparameters"].values() for k, v in part.items()}


def _check_same(folder: Path, what: Document) -> None:
    path = folder / "search.json"
    if path.is_file():
        found = json.loads(path.read_text("utf-8"))
        if found != json.loads(json.dumps(what)):
            raise ConfigError(f"{str(folder)!r} holds another search ({found}); use another --out.")
    write_files({path: to_json(what).encode()})
