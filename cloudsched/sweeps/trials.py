"""What Ray Tune runs: a training that reports each measurement, and a trial of a benchmark."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray import tune
from ray.util.metrics import Gauge

from cloudsched.bundle import Bundle, load_bundle, save_bundle
from cloudsched.evaluation import evaluate, first_seeds
from cloudsched.heuristics.catalog import make_heuristic
from cloudsched.metrics import METRICS
from cloudsched.policy import Policy
from cloudsched.results import provenance
from cloudsched.rl.training import CHECKPOINT, TrainingRun, Weights, apply_hyperparameters
from cloudsched.sweeps.cluster import quiet
from cloudsched.sweeps.specs import (
    BUNDLE,
    Outcome,
    TrialSpec,
    begin,
    read_outcome,
    write_outcome,
)

GAUGES = ("episode_return", "mean_power_w", "energy_kwh", "sla_violation_rate", "wait_mean_ticks")

Result = dict[str, Any]


class TrainingTrial(tune.Trainable):  # type: ignore[misc]
    """Trains until the next measurement on train seeds, and reports it beside RLlib's results.

    Its config holds

    | key               | value                                                                |
    |-------------------|----------------------------------------------------------------------|
    | `algorithm`       | an `AlgorithmConfig` whose `env_config` is the scenario              |
    | `hyperparameters` | changes to it, as `apply_hyperparameters` takes them; may be absent  |
    | `steps_a_report`  | decisions between two measurements                                   |
    | `num_seeds`       | train seeds of a measurement                                         |
    | `limit_s`         | seconds of training that end it; may be absent                       |
    """

    run: TrainingRun
    _is_cold: bool

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> Any:
        """Ask for what the algorithm asks for: a core, and more for remote runners or GPUs."""
        algorithm = config["algorithm"]
        return algorithm.algo_class.default_resource_request(algorithm.copy(copy_frozen=False))

    def setup(self, config: dict[str, Any]) -> None:
        """Build the algorithm."""
        self._folder = Path(self.logdir)
        self._build(config, name=self.trial_name)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Serve another trial with the same process, which spares the time of a start."""
        self.cleanup()
        self.setup(new_config)
        return True

    def step(self) -> Result:
        """Train until the next measurement."""
        state = self.run.state
        goal = state.steps + self._steps_a_report
        if state.iteration == 0 and self.run.starts_as_rule:
            self.run.evaluate()
        result = self.run.iterate()
        if self._is_cold:  # compiling kernels is not training
            self._limit_s += result["time_this_iter_s"]
            self._is_cold = False
        while state.steps < goal and state.seconds < self._limit_s:
            result = self.run.iterate()
        early = asdict(self.run.evaluate())
        self._gauges.show(early)
        return {
            "env_runners": result["env_runners"],
            "learners": result["learners"],
            "train_seeds": early,
            **asdict(self.run.state),
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write algorithm, state and the best policy so far."""
        self.run.write_checkpoint(Path(checkpoint_dir))
        shutil.copytree(self._folder / BUNDLE, Path(checkpoint_dir) / BUNDLE)

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Go on from a checkpoint, with the hyper-parameters of this trial."""
        self.run.read_checkpoint(Path(checkpoint))
        save_bundle(load_bundle(Path(checkpoint) / BUNDLE), self._folder / BUNDLE)

    def cleanup(self) -> None:
        """Stop runners and learners."""
        self.run.algorithm.stop()

    def _build(self, config: dict[str, Any], *, name: str) -> None:
        quiet()
        algorithm = config["algorithm"].copy(copy_frozen=False)
        if config.get("hyperparameters"):
            apply_hyperparameters(algorithm, config["hyperparameters"])

        def keep(weights: Weights, state: Any) -> None:
            save_bundle(Bundle.of_run(self.run, weights, **provenance()), self._folder / BUNDLE)

        self._gauges = Gauges(name)
        self._steps_a_report = int(config["steps_a_report"])
        self._limit_s = float(config.get("limit_s", math.inf))
        self._is_cold = True
        self.run = TrainingRun(
            algorithm.build_algo(), self._folder, num_seeds=config["num_seeds"], keep=keep
        )


class BenchmarkTrial(TrainingTrial):
    """One policy on one workload: trained if it learns, then measured on train and test seeds.

    All that it knows is in its folder, so a trial that was killed goes on in any process and on
    any node that sees the folder. Its config has one key, `trial`, with the keys of a
    `TrainingTrial`, `spec` (the fields of a `TrialSpec`) and `folder`; heuristics have None as
    `algorithm`.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> Any:
        """Ask for a core for a heuristic."""
        if config["trial"]["algorithm"] is None:
            return tune.PlacementGroupFactory([{"CPU": 1.0}])
        return super().default_resource_request(config["trial"])

    def setup(self, config: dict[str, Any]) -> None:
        """Build what is measured, and go on from what is in the folder."""
        trial = config["trial"]
        self.spec = TrialSpec.from_dict(trial["spec"])
        self._folder = Path(trial["folder"])
        self._gauges = Gauges(self.spec.key)
        if self.spec.is_learned:
            begin(self.spec, self._folder)
            self._build(trial, name=self.spec.key)
            if self.run.has_checkpoint:
                self.run.restore()

    def __repr__(self) -> str:
        """Return what Ray's dashboard calls the process."""
        return self.spec.key

    def step(self) -> Result:
        """Train until the next measurement; once training is over, measure for good."""
        if self.spec.is_learned and not self._is_trained:
            result = super().step()
            self.run.save()
            return result
        outcome = read_outcome(self.spec, self._folder) or self._finish()
        means = {name: float(outcome.test.metrics[name].mean()) for name in METRICS}
        self._gauges.show(means)
        return {"test_seeds": means, **outcome.training, "done": True}

    def cleanup(self) -> None:
        """Stop runners and learners, if there are any."""
        if self.spec.is_learned:
            super().cleanup()

    @property
    def _is_trained(self) -> bool:
        state = self.run.state
        is_over = state.steps >= self.spec.steps or state.seconds >= self._limit_s
        return is_over and state.best_return is not None

    def _finish(self) -> Outcome:
        scenario, name = self.spec.scenario, self.spec.policy
        policy: Policy
        if self.spec.is_learned:
            policy = load_bundle(self._folder / BUNDLE).policy(scenario.config)
        else:
            policy = make_heuristic(name, scenario.config)
        train, test = (
            evaluate(policy, scenario, first_seeds(split, self.spec.num_seeds), name=name)
            for split in ("train", "test")
        )
        outcome = Outcome(
            spec=self.spec,
            train=train,
            test=test,
            training=asdict(self.run.state) if self.spec.is_learned else {},
        )
        write_outcome(outcome, self._folder)
        for path in (self._folder / CHECKPOINT, *self._folder.glob(".*.part")):
            shutil.rmtree(path, ignore_errors=True)  # of no more use, and large with a memory
        return outcome


class Gauges:
    """A trial's latest measures as metrics of Ray, by their names, for dashboard and Prometheus."""

    def __init__(self, trial: str) -> None:
        self._tags = {"trial": trial}
        self._gauges = {
            name: Gauge(name, description=METRICS[name], tag_keys=("trial",)) for name in GAUGES
        }

    def show(self, measures: Mapping[str, Any]) -> None:
        """Take over the measures that are there."""
        for name, gauge in self._gauges.items():
            if name in measures:
                gauge.set(float(measures[name]), tags=self._tags)
