"""The benchmark: every policy on every workload, as trials that are planned, run and collected.

A trial that has an outcome in its folder is never run again, so the same plan can be run any number
of times: after a kill it goes on, and a longer plan adds to a shorter one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray import tune

from cloudsched.envs.scenario import Scenario
from cloudsched.errors import CloudschedError
from cloudsched.heuristics.catalog import load_heuristic, tuned_policy
from cloudsched.registry import Registry
from cloudsched.rl.training import CHECKPOINT, STATE, fit_schedules
from cloudsched.sweeps.progress import ProgressLines
from cloudsched.sweeps.specs import Outcome, TrialSpec, config_digest, read_outcome
from cloudsched.sweeps.trials import BenchmarkTrial
from cloudsched.workload.catalog import WORKLOADS

TUNED = "tuned"
MAX_FAILURES = 3


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much a benchmark may cost."""

    steps: int
    """Decisions of each training."""
    reports: int
    """Measurements on train seeds during a training; the best of them is kept."""
    report_seeds: int
    """Train seeds of such a measurement."""
    minutes: float
    """Longest training, without what follows."""
    other_minutes: float
    """What a trial takes beside its training, about: start, measurements, evaluation."""
    train_seeds: int
    """Trainings of each learner on each workload."""
    num_seeds: int
    """Train seeds and test seeds that every policy is measured on, each."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the rules of the cluster."""


BUDGETS: Registry[Budget] = Registry(
    "budget",
    {
        "tiny": Budget(
            steps=8_192,
            reports=4,
            report_seeds=2,
            minutes=2.0,
            other_minutes=0.2,
            train_seeds=1,
            num_seeds=4,
            settings={"episode_ticks": 60},
        ),
        # 27 trainings, two at a time, with all that belongs to them: under 45 minutes on two cores.
        "small": Budget(
            steps=800_000,
            reports=6,
            report_seeds=16,
            minutes=2.0,
            other_minutes=1.0,
            train_seeds=3,
            num_seeds=50,
        ),
        "full": Budget(
            steps=5_000_000,
            reports=40,
            report_seeds=50,
            minutes=240.0,
            other_minutes=15.0,
            train_seeds=5,
            num_seeds=50,
        ),
    },
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All trials of a benchmark."""

    specs: tuple[TrialSpec, ...]
    algorithms: Mapping[str, Any]
    """`AlgorithmConfig` of each trial that learns, by its key."""
    budget: Budget
    folder: Path

    def folder_of(self, spec: TrialSpec) -> Path:
        """Return where a trial keeps all that it knows."""
        return self.folder / "trials" / spec.key

    def outcomes(self) -> dict[str, Outcome]:
        """Return what the finished trials found, by their keys."""
        read = {spec.key: read_outcome(spec, self.folder_of(spec)) for spec in self.specs}
        return {key: outcome for key, outcome in read.items() if outcome is not None}

    def steps_done(self) -> dict[str, int]:
        """Return how many decisions each training has behind it, by its trial's key."""
        return {spec.key: _steps_done(self.folder_of(spec)) for spec in self.specs}


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What each training gets beside one core."""

    gpus: float = 0.0
    """GPUs, or a share of one."""
    runners: int = 0
    """Remote runners, a core each; without any, the training samples by itself."""

    def apply(self, config: Any) -> None:
        """Let an algorithm use them."""
        config.learners(num_gpus_per_learner=self.gpus)
        config.env_runners(num_env_runners=self.runners)


def plan(
    *,
    policies: Mapping[str, Any | None],
    workloads: Sequence[str],
    preset: str,
    budget: Budget,
    resources: Resources,
    folder: Path,
) -> Plan:
    """List the trials: one for each heuristic and workload, and for learners also training seed.

    Args:
        policies: by name, the `AlgorithmConfig` of a learner or None for a heuristic; `tuned`
            stands for the headroom controller tuned to each workload.
    """
    specs: list[TrialSpec] = []
    algorithms: dict[str, Any] = {}
    for workload in workloads:
        _ = WORKLOADS[workload]  # refuses unknown names
        scenario = Scenario(preset=preset, workload=workload, settings=dict(budget.settings))
        for policy, learner in policies.items():
            if learner is None:
                name = tuned_policy(preset, workload) if policy == TUNED else policy
                load_heuristic(name)  # refuses unknown names
                specs.append(TrialSpec(policy=name, scenario=scenario, num_seeds=budget.num_seeds))
                continue
            for seed in range(budget.train_seeds):
                config = learner.copy(copy_frozen=False)
                config.environment(env_config=scenario.to_dict())
                config.debugging(seed=seed)
                fit_schedules(config, budget.steps)
                spec = TrialSpec(
                    policy=policy,
                    scenario=scenario,
                    num_seeds=budget.num_seeds,
                    train_seed=seed,
                    steps=budget.steps,
                    minutes=budget.minutes,
                    config_digest=config_digest(config),
                )
                resources.apply(config)
                specs.append(spec)
                algorithms[spec.key] = config
    ordered = sorted(specs, key=lambda spec: spec.is_learned)  # heuristics take no time: first
    return Plan(specs=tuple(ordered), algorithms=algorithms, budget=budget, folder=folder)


def tuner(a_plan: Plan) -> tune.Tuner:
    """Return what runs the trials of a plan that have no outcome yet."""
    finished = a_plan.outcomes()
    waiting = [spec for spec in a_plan.specs if spec.key not in finished]
    budget = a_plan.budget
    trials = [
        {
            "spec": spec.to_dict(),
            "folder": str(a_plan.folder_of(spec)),
            "algorithm": a_plan.algorithms.get(spec.key),
            "steps_a_report": budget.steps // budget.reports,
            "num_seeds": budget.report_seeds,
            "limit_s": 60.0 * budget.minutes,
        }
        for spec in waiting
    ]
    steps = a_plan.steps_done()
    progress = ProgressLines(
        num_done=len(finished),
        num_trials=len(a_plan.specs),
        steps={spec.key: steps[spec.key] for spec in waiting},
        goal=sum(spec.steps for spec in waiting),
    )
    return tune.Tuner(
        BenchmarkTrial,
        param_space={"trial": tune.grid_search(trials)},
        tune_config=tune.TuneConfig(trial_name_creator=trial_key, trial_dirname_creator=trial_key),
        run_config=tune.RunConfig(
            storage_path=str(a_plan.folder / "tune"),
            name=time.strftime("%Y%m%d-%H%M%S"),
            failure_config=tune.FailureConfig(max_failures=MAX_FAILURES),
            # Trials keep checkpoints in their own folders, where a later run finds them.
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            callbacks=[progress],
            verbose=0,
        ),
    )


def trial_key(trial: Any) -> str:
    """Return what Tune, TensorBoard and Ray's dashboard call a trial."""
    return TrialSpec.from_dict(trial.config["trial"]["spec"]).key


def run(a_plan: Plan) -> dict[str, Outcome]:
    """Run what is left of a plan, and return what all its trials found."""
    outcomes = a_plan.outcomes()
    if len(outcomes) == len(a_plan.specs):
        return outcomes
    results = tuner(a_plan).fit()
    outcomes = a_plan.outcomes()
    missing = [spec.key for spec in a_plan.specs if spec.key not in outcomes]
    if missing and results.errors:
        fault = str(results.errors[0]).strip().splitlines()[-1]
        raise CloudschedError(
            f"{len(missing)} of {len(a_plan.specs)} trials failed ({', '.join(missing)}): {fault}. "
            "The same command runs these again, and only these."
        )
    if missing:
        raise KeyboardInterrupt
    return outcomes


def _steps_done(folder: Path) -> int:
    path = folder / CHECKPOINT / STATE
    return int(json.loads(path.read_text("utf-8"))["steps"]) if path.is_file() else 0
