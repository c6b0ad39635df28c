"""Offline trainings as Ray Tune trials: limits x pessimism x training seeds on one dataset.

Each trial leaves `bundle`, `clone` and `outcome.json` in its folder; one that has its outcome is
not run again. The outcome holds every metric on the test seeds, by policy and seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ray import tune

from cloudsched.bundle import load_bundle
from cloudsched.datasets.manifest import Manifest, read_manifest
from cloudsched.datasets.mixing import MixedPolicy
from cloudsched.datasets.quiet import quiet_ray_data
from cloudsched.datasets.shard import MakePolicy
from cloudsched.evaluation import Episodes, Evaluation, first_seeds
from cloudsched.models.constrained import ConstrainedConfig
from cloudsched.models.constrained_learner import ConstrainedLearner
from cloudsched.models.lagrange import LagrangeConfig
from cloudsched.models.memory import keep_freed_memory
from cloudsched.results import write_files
from cloudsched.rl.feeding import endless, finished_batches
from cloudsched.rl.offline import (
    OfflineRunConfig,
    Position,
    build_model,
    config_from_dict,
    learn,
    reader,
)
from cloudsched.statistics import Estimate, summarise_grid
from cloudsched.sweeps.offline import CLONE, save_bundles
from cloudsched.sweeps.progress import ProgressLines

OUTCOME = "outcome.json"
SHOWN = ("mean_power_w", "sla_violation_rate", "episode_return", "work_served")

Metrics = dict[str, NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True)
class CmdpTrial:
    """One training of the grid."""

    dataset: str
    folder: str
    config: dict[str, Any]
    run: dict[str, Any]
    num_test_seeds: int | None

    @property
    def name(self) -> str:
        """What sets the trial apart from the others on its dataset."""
        limit = self.config["constraint"]["limit"]
        return f"limit={limit:g} pessimism={self.config['pessimism']:g} seed={self.run['seed']}"


def plan(
    dataset: Path,
    folder: Path,
    *,
    limits: Sequence[float],
    pessimisms: Sequence[float],
    num_train_seeds: int,
    num_steps: int,
    num_test_seeds: int | None,
) -> list[CmdpTrial]:
    """Return every training of the grid."""
    trials = []
    for limit in limits:
        for pessimism in pessimisms:
            config = ConstrainedConfig(
                constraint=LagrangeConfig(limit=limit), pessimism=pessimism
            ).to_dict()
            for seed in range(num_train_seeds):
                run = OfflineRunConfig(num_steps=num_steps, seed=seed).to_dict()
                name = f"limit_{limit:g}_pessimism_{pessimism:g}_seed_{seed}"
                trials.append(
                    CmdpTrial(
                        dataset=str(dataset.absolute()),
                        folder=str((folder / name).absolute()),
                        config=config,
                        run=run,
                        num_test_seeds=num_test_seeds,
                    )
                )
    return trials


def tuner(trials: Sequence[CmdpTrial], folder: Path, *, max_concurrent: int) -> tune.Tuner:
    """Return the sweep without running it; finished trials are left out."""
    waiting = [asdict(trial) for trial in trials if not (Path(trial.folder) / OUTCOME).exists()]
    progress = ProgressLines(
        num_done=len(trials) - len(waiting),
        num_trials=len(trials),
        goal=sum(trial["run"]["num_steps"] for trial in waiting),
    )
    return tune.Tuner(
        # The rest of a core is for the tasks that read the data.
        tune.with_resources(run_trial, {"cpu": 0.5}),
        param_space={"trial": tune.grid_search(waiting)},
        tune_config=tune.TuneConfig(
            max_concurrent_trials=max_concurrent, trial_name_creator=_trial_name
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(folder.absolute()),
            failure_config=tune.FailureConfig(max_failures=2),
            callbacks=[progress],
            verbose=0,
        ),
    )


def _trial_name(trial: Any) -> str:
    return CmdpTrial(**trial.config["trial"]).name


def run_trial(config: Mapping[str, Any]) -> None:
    """Train, write the bundles, and measure them on the test seeds."""
    quiet_ray_data()
    keep_freed_memory()
    trial = CmdpTrial(**config["trial"])
    folder, dataset = Path(trial.folder), Path(trial.dataset)
    learning = config_from_dict(trial.config)
    run = OfflineRunConfig.from_dict(trial.run)
    torch.set_num_threads(run.num_threads)
    model = build_model(dataset, learning, run.seed)
    learner = ConstrainedLearner(model, learning, num_steps=run.num_steps)
    manifest = read_manifest(dataset)
    source = reader(dataset, manifest, learning, run.seed)
    data = finished_batches(source, model.preparation(), learning.batch_size)

    def report(metrics: dict[str, float], _state: dict[str, Any] | None) -> None:
        tune.report({"steps": metrics["step"], **metrics})

    with closing(endless(data, "cpu")) as feed:
        learn(learner, feed, run, Position(), report)
    folder.mkdir(parents=True, exist_ok=True)
    bundle = save_bundles(dataset, learning, run, learner.state_dict(), folder)
    episodes = Episodes(manifest.scenario, first_seeds("test", trial.num_test_seeds))
    outcome = {}
    for name, path in (("policy", bundle), ("clone", folder / CLONE)):
        policy = load_bundle(path).policy(manifest.scenario.config)
        outcome[name] = _plain(episodes.run(policy, name=name))
    write_files({folder / OUTCOME: json.dumps(outcome).encode()})
    measured = {name: float(np.mean(outcome["policy"][name])) for name in SHOWN}
    tune.report({"steps": run.num_steps, "test_seeds": measured, **measured})


def outcomes(trials: Sequence[CmdpTrial]) -> dict[str, dict[str, Metrics]]:
    """Return what finished trials measured: trial -> `policy` or `clone` -> metric -> (S,)."""
    found = {}
    for trial in trials:
        path = Path(trial.folder) / OUTCOME
        if path.exists():
            document = json.loads(path.read_text("utf-8"))
            found[trial.name] = {
                name: {metric: np.array(values) for metric, values in metrics.items()}
                for name, metrics in document.items()
            }
    return found


def behaviour_metrics(
    manifest: Manifest,
    num_test_seeds: int | None,
    make_policy: MakePolicy,
    report: Callable[[str], None],
) -> dict[str, Metrics]:
    """Measure every behaviour of a dataset on the test seeds, random decisions included."""
    episodes = Episodes(manifest.scenario, first_seeds("test", num_test_seeds))
    found = {}
    for behaviour in manifest.behaviours:
        report(behaviour.name)
        policy = make_policy(behaviour.policy, manifest.scenario.config)
        mixed = MixedPolicy(policy, behaviour.epsilon)
        found[behaviour.name] = dict(episodes.run(mixed, name=behaviour.name).metrics)
    return found


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    name: str
    limit: float | None
    trainings: int
    summary: dict[str, Estimate]
    meets_limit: bool | None = None
    """Whether its violation rate is within the limit."""
    difference_w: Estimate | None = None
    """Power, seed by seed, minus that of the best behaviour that meets the limit."""
    difference_rate: Estimate | None = None
    """Violation rate, seed by seed, minus the mean of all behaviours."""


def table_rows(
    trials: Sequence[CmdpTrial],
    found: Mapping[str, dict[str, Metrics]],
    behaviours: Mapping[str, Metrics],
) -> list[Row]:
    """Return the learned policies, each beside the behaviours that meet its limit, and the clone.

    Intervals cover training seeds and test seeds.
    """
    rates = {name: float(m["sla_violation_rate"].mean()) for name, m in behaviours.items()}
    watts = {name: float(m["mean_power_w"].mean()) for name, m in behaviours.items()}
    usual_rate_S = np.mean([m["sla_violation_rate"] for m in behaviours.values()], axis=0)
    rows = []
    groups: dict[tuple[float, float], list[dict[str, Metrics]]] = {}
    for trial in trials:
        if trial.name in found:
            key = (trial.config["constraint"]["limit"], trial.config["pessimism"])
            groups.setdefault(key, []).append(found[trial.name])
    for limit in sorted({limit for limit, _ in groups}):
        able = [name for name, rate in rates.items() if rate <= limit]
        best = min(able, key=lambda name: watts[name]) if able else None
        rival_w_S = None if best is None else behaviours[best]["mean_power_w"]
        for (own_limit, pessimism), group in groups.items():
            if own_limit == limit:
                name = f"learned, pessimism {pessimism:g}"
                learned = [entry["policy"] for entry in group]
                rows.append(_row(name, limit, learned, rival_w_S, usual_rate_S))
                clones = [entry["clone"] for entry in group]
                rows.append(_row("behaviour cloning", limit, clones, rival_w_S, usual_rate_S))
        if best is not None:
            rows.append(_row(f"best behaviour that meets it: {best}", limit, [behaviours[best]]))
    rows.append(_row("mean of the behaviours", None, list(behaviours.values())))
    return rows


def behaviour_rows(behaviours: Mapping[str, Metrics]) -> list[Row]:
    """Return a line for each behaviour."""
    return [_row(name, None, [metrics]) for name, metrics in behaviours.items()]


def _row(
    name: str,
    limit: float | None,
    group: Sequence[Metrics],
    rival_w_S: NDArray[np.float64] | None = None,
    usual_rate_S: NDArray[np.float64] | None = None,
) -> Row:
    grid = {metric: np.stack([entry[metric] for entry in group]) for metric in SHOWN}
    summary = summarise_grid(grid)
    return Row(
        name=name,
        limit=limit,
        trainings=len(group),
        summary=summary,
        meets_limit=None if limit is None else summary["sla_violation_rate"].mean <= limit,
        difference_w=_apart(grid["mean_power_w"], rival_w_S),
        difference_rate=_apart(grid["sla_violation_rate"], usual_rate_S),
    )


def _apart(values_TS: NDArray[np.float64], others_S: NDArray[np.float64] | None) -> Estimate | None:
    """Estimate by how much values lie above others of the same test seeds."""
    return None if others_S is None else summarise_grid({"apart": values_TS - others_S})["apart"]


def front(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that no other beats in both power and violations, by rising power."""
    ranked = sorted(rows, key=lambda row: row.summary["mean_power_w"].mean)
    best: list[Row] = []
    for row in ranked:
        rate = row.summary["sla_violation_rate"].mean
        if not best or rate < best[-1].summary["sla_violation_rate"].mean:
            best.append(row)
    return best


def _plain(evaluation: Evaluation) -> dict[str, list[float]]:
    return {name: values.tolist() for name, values in evaluation.metrics.items()}
