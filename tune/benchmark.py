"""Every policy on every workload as Ray Tune trials, ending in one table, a picture and a winner.

Run: `python -m tune.benchmark --budget small`
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from cloudsched.cli import run_script
from cloudsched.commands.output import console, print_json
from cloudsched.commands.train import load_config
from cloudsched.errors import ConfigError
from cloudsched.sweeps import report
from cloudsched.sweeps.benchmark import BUDGETS, TUNED, Budget, Plan, Resources, plan, run
from cloudsched.sweeps.cluster import check_shared, connected, output_folder, quiet
from cloudsched.sweeps.specs import Outcome

CONFIGS = Path(__file__).parents[1] / "rllib_configs"
POLICIES = ("rr", "sjf", "ffd", TUNED, "dqn", "ppo", "hierarchical")
WORKLOADS = ("poisson", "google_v2_sampled", "diurnal")


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Compare heuristics and learners on held-out seeds, with every training as a Ray Tune trial.

    Learners are files in rllib_configs/, trained on the workload that they are measured on, from
    several training seeds; intervals cover training seeds and test seeds. The winner is chosen by
    its return on train seeds. After a kill or Ctrl-C the same command goes on: finished trials are
    not run again, the others start from their checkpoints. A local Ray starts by itself.

    Examples:
      python -m tune.benchmark --budget small
      python -m tune.benchmark --policies tuned ppo --workloads poisson --train-seeds 5
      ray job submit --working-dir . --runtime-env runtime_env.yaml -- \\
          python -m tune.benchmark --budget full --out /shared/benchmark
    """

    budget: str = "small"
    """tiny: two minutes, to see it work; small: under 45 minutes on two cores; full: hours."""
    policies: tuple[str, ...] = POLICIES
    """Names of heuristics, `tuned` (the headroom controller tuned to each workload), and learners:
    names of files in rllib_configs/, or paths of such files."""
    workloads: tuple[str, ...] = WORKLOADS
    """What arrives (`cloudsched workloads` lists them)."""
    preset: str = "default"
    """Rules of the cluster (`cloudsched presets` lists them)."""
    train_seeds: int | None = None
    """Trainings of each learner on each workload, instead of the budget's."""
    steps: int | None = None
    """Decisions of each training, instead of the budget's."""
    gpus: float = 0.0
    """GPUs, or the share of one, for each training."""
    runners: int = 0
    """Remote runners of each training, a core each."""
    out: Path = field(default_factory=lambda: Path("runs/benchmark"))
    """Folder for everything; on a cluster one that every node sees."""
    address: str | None = None
    """A Ray cluster (`auto` for the one on this machine); RAY_ADDRESS or a local one by default."""
    json: bool = False
    """Print one JSON document on stdout; all else goes to stderr."""

    def run(self) -> None:
        """Run the trials, then save and print what they found."""
        a_plan = self.plan()
        with connected(self.address) as context:
            check_shared(a_plan.folder)
            self._announce(a_plan, context.dashboard_url)
            # All of it while connected: in a Ray job, the code goes when the driver lets go of Ray.
            self._finish(a_plan, run(a_plan))

    def _finish(self, a_plan: Plan, outcomes: Mapping[str, Outcome]) -> None:
        baselines = {
            outcome.spec.scenario.workload: outcome.spec.policy
            for outcome in outcomes.values()
            if outcome.spec.policy.startswith("headroom@")
        }
        found = report.contests(list(outcomes.values()), baselines)
        document = report.save(found, a_plan.folder, a_plan.folder / "trials")
        if self.json:
            print_json(document)
            return
        console().print(report.table(document))
        for line in report.notes(document):
            print(line)
        for path in document["files"].values():
            print(path)

    def plan(self) -> Plan:
        """Return the trials that the options ask for."""
        return plan(
            policies=dict(named(name) for name in (TUNED, *self.policies)),
            workloads=tuple(dict.fromkeys(self.workloads)),
            preset=self.preset,
            budget=self._budget(),
            resources=Resources(gpus=self.gpus, runners=self.runners),
            folder=output_folder(self.out),
        )

    def _budget(self) -> Budget:
        changes = {"train_seeds": self.train_seeds, "steps": self.steps}
        for name, value in changes.items():
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: expected at least 1.")
        return replace(BUDGETS[self.budget], **{k: v for k, v in changes.items() if v is not None})

    def _announce(self, a_plan: Plan, dashboard: str | None) -> None:
        learned = [spec for spec in a_plan.specs if spec.is_learned]
        slots = max(1, int(ray.cluster_resources().get("CPU", 1.0) // (1 + self.runners)))
        budget, finished = a_plan.budget, a_plan.outcomes()
        left = sum(spec.key not in finished for spec in learned)
        minutes = -(-left // slots) * (budget.minutes + budget.other_minutes)
        lines = [
            f"budget: {self.budget}  preset: {self.preset}  folder: {a_plan.folder}",
            f"trials: {len(a_plan.specs)}, of which {len(learned)} train, {slots} at a time; "
            f"{len(finished)} are finished",
            f"each training: {budget.steps:,} decisions or {budget.minutes:g} minutes; estimate "
            f"for what is left: at most {minutes:.0f} minutes",
        ]
        if dashboard:
            lines.append(f"dashboard: http://{dashboard}")
        print("\n".join(lines), file=sys.stderr, flush=True)


def named(policy: str) -> tuple[str, Any | None]:
    """Return a policy's name and, if it learns, its `AlgorithmConfig`."""
    quiet()
    path = Path(policy) if policy.endswith(".py") else CONFIGS / f"{policy}.py"
    if policy.endswith(".py") or path.is_file():
        return path.stem, load_config(path)
    return policy, None


if __name__ == "__main__":
    sys.exit(run_script(Benchmark, "python -m tune.benchmark"))
