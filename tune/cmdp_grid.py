"""Limits x pessimism x training seeds of offline learning, ending in the front of power and SLA.

Run: `python -m tune.cmdp_grid --budget small`
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ray
from rich.table import Table

from cloudsched.cli import run_script
from cloudsched.commands.output import console, print_json
from cloudsched.commands.policies import make_policy
from cloudsched.datasets.check import require_sound
from cloudsched.datasets.record import RecordingConfig, record, with_ray_data
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError, suggestion
from cloudsched.models.constrained import ConstrainedConfig
from cloudsched.plots import png
from cloudsched.results import provenance, to_json, write_files
from cloudsched.rl.offline import OfflineRunConfig
from cloudsched.statistics import Estimate
from cloudsched.sweeps.cluster import check_shared, connected, output_folder
from cloudsched.sweeps.cmdp import (
    Row,
    behaviour_metrics,
    behaviour_rows,
    front,
    outcomes,
    plan,
    table_rows,
    tuner,
)
from cloudsched.sweeps.cmdp_plot import draw_front


class Budget(NamedTuple):
    """How much is recorded and trained."""

    num_episodes: int
    num_steps: int
    num_train_seeds: int
    num_test_seeds: int | None
    pessimism: tuple[float, ...]
    settings: dict[str, Any]


BUDGETS = {
    "tiny": Budget(40, 40, 1, 4, (0.1,), {"episode_ticks": 400}),
    "small": Budget(400, OfflineRunConfig.num_steps, 3, None, (ConstrainedConfig.pessimism,), {}),
    # Not more steps: they sharpen the prior, and less is within the policy's reach.
    "full": Budget(2000, OfflineRunConfig.num_steps, 5, None, (0.0, 0.1, 1.0), {}),
}


@dataclass(frozen=True, kw_only=True)
class CmdpGrid:
    """Learn from one dataset at several limits and degrees of pessimism, as Ray Tune trials.

    Records the dataset first unless --dataset names one. Ends in a table on the test seeds: each
    learned policy beside the best behaviour that meets its limit, behaviour cloning and the mean of
    the behaviours, and the front of power against SLA. The same command goes on after a kill:
    finished trials are not run again. A local Ray starts by itself.

    Examples:
      python -m tune.cmdp_grid --budget small --workload diurnal
      python -m tune.cmdp_grid --dataset runs/offline/diurnal --limits 0.01 0.05 --train-seeds 3
    """

    budget: str = "small"
    """tiny: to see it work; small: three training seeds of each limit, one pessimism; full: five
    training seeds, three degrees of pessimism, five times the data."""
    workload: str = "diurnal"
    """What arrives, if a dataset is recorded (`cloudsched workloads` lists them)."""
    preset: str = "default"
    """Rules of the cluster, if a dataset is recorded."""
    dataset: Path | None = None
    """Folder that offline.record wrote, instead of recording one."""
    limits: tuple[float, ...] = (0.01, 0.02, 0.05)
    """Largest violation rates."""
    pessimism: tuple[float, ...] = ()
    """Weights of CQL on the cost head, instead of the budget's."""
    train_seeds: int | None = None
    """Trainings of each point of the grid, instead of the budget's."""
    steps: int | None = None
    """Gradient steps of a training, instead of the budget's."""
    concurrent: int = 2
    """Trainings at a time."""
    out: Path = field(default_factory=lambda: Path("runs/cmdp_grid"))
    """Folder for the dataset, trials, table and front."""
    address: str | None = None
    """Ray cluster to run on; a local Ray starts by itself."""
    json: bool = False
    """Print one JSON document on stdout; all else goes to stderr."""

    def run(self) -> None:
        """Record, train, measure and print."""
        if self.budget not in BUDGETS:
            raise ConfigError(f"--budget {self.budget!r}. {suggestion(self.budget, BUDGETS)}")
        budget = BUDGETS[self.budget]
        out = output_folder(self.out)
        with connected(self.address):
            check_shared(out)
            dataset = self._dataset(out, budget)
            manifest = require_sound(dataset)
            trials = plan(
                dataset,
                out / "trials",
                limits=self.limits,
                pessimisms=self.pessimism or budget.pessimism,
                num_train_seeds=self.train_seeds or budget.num_train_seeds,
                num_steps=self.steps or budget.num_steps,
                num_test_seeds=budget.num_test_seeds,
            )
            done = len(outcomes(trials))
            cpus = ray.cluster_resources().get("CPU", 1.0)
            _say(f"{len(trials)} trials, {done} are finished; {cpus:g} CPUs")
            if done < len(trials):
                tuner(trials, out, max_concurrent=self.concurrent).fit()
        found = outcomes(trials)
        if len(found) < len(trials):
            raise ConfigError(
                f"{len(trials) - len(found)} trials failed; see {out / 'tune'}, and run it again."
            )
        behaviours = behaviour_metrics(
            manifest, budget.num_test_seeds, make_policy, lambda name: _say(f"measuring {name}")
        )
        rows = table_rows(trials, found, behaviours)
        logged = behaviour_rows(behaviours)
        document = {
            "schema": "cloudsched.cmdp_grid.v1",
            "dataset": str(dataset),
            "rows": [_plain(row) for row in rows],
            "behaviours": [_plain(row) for row in logged],
            "front": [_plain(row) for row in front([*rows, *logged])],
            **provenance(),
        }
        title = f"{manifest.scenario.workload}: learned from {manifest.num_decisions:,} decisions"
        write_files(
            {
                out / "cmdp_grid.json": to_json(document).encode(),
                out / "front.png": png(draw_front(rows, logged, title)),
            }
        )
        if self.json:
            print_json(document)
            return
        console().print(_table(rows, front([*rows, *logged])))
        print(out / "front.png")
        print(out / "cmdp_grid.json")

    def _dataset(self, out: Path, budget: Budget) -> Path:
        if self.dataset is not None:
            return self.dataset
        folder = out / f"data_{self.workload}"
        if not folder.exists():
            _say(f"recording {budget.num_episodes} episodes of {self.workload}")
            scenario = Scenario(
                workload=self.workload, preset=self.preset, settings=budget.settings
            )
            config = RecordingConfig(num_episodes=budget.num_episodes)
            record(
                scenario,
                config,
                folder,
                make_policy,
                lambda files, decisions: _say(f"file {files}: {decisions:,} decisions"),
                provenance(),
                with_ray_data,
            )
        return folder


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _plain(row: Row) -> dict[str, Any]:
    return asdict(row)


def _table(rows: list[Row], best: list[Row]) -> Table:
    table = Table("limit, %", "policy")
    columns = ("trainings", "power, W", "against best behaviour, W", "SLA violations, %")
    for column in (*columns, "against mean, points", "within limit", "work served, %"):
        table.add_column(column, justify="right")
    table.add_column("front")
    for row in rows:
        power, rate = row.summary["mean_power_w"], row.summary["sla_violation_rate"]
        watts_apart, rate_apart = row.difference_w, row.difference_rate
        table.add_row(
            "" if row.limit is None else f"{100 * row.limit:g}",
            row.name,
            str(row.trainings),
            _interval(power, ",.0f"),
            "" if watts_apart is None else _interval(watts_apart, "+,.0f"),
            _interval(rate, ".2f", 100.0),
            "" if rate_apart is None else _interval(rate_apart, "+.2f", 100.0),
            "" if row.meets_limit is None else ("yes" if row.meets_limit else "NO"),
            f"{100 * row.summary['work_served'].mean:.1f}",
            "*" if row in best else "",
        )
    return table


def _interval(estimate: Estimate, style: str, unit: float = 1.0) -> str:
    mean, low, high = (
        f"{unit * value:{style}}" for value in (estimate.mean, estimate.ci_low, estimate.ci_high)
    )
    return f"{mean} [{low}, {high}]"


if __name__ == "__main__":
    sys.exit(run_script(CmdpGrid, "python -m tune.cmdp_grid"))
