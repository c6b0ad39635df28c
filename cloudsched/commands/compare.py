"""`cloudsched compare`: several policies on the same episodes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cloudsched.commands.options import ScenarioOptions
from cloudsched.commands.output import (
    console,
    has_interval,
    print_json,
    print_settings,
    progress_bar,
)
from cloudsched.commands.policies import make_policy
from cloudsched.envs.scenario import Scenario
from cloudsched.evaluation import Episodes, Evaluation, first_seeds
from cloudsched.heuristics.catalog import BASES, SLEEP_SUFFIXES, tuned_names
from cloudsched.results import (
    ONE_SEED_NOTE,
    check_folder,
    comparison_document,
    to_json,
    to_parquet,
    write_files,
)

COLUMNS = (
    *("return", "difference", "power W", "over bound", "SLA violations %"),
    *("wait p95", "work served %", "illegal"),
)


@dataclass(frozen=True, kw_only=True)
class Compare(ScenarioOptions):
    """Run several policies on the same episodes: a table, a picture, and files with every figure.

    Differences are paired by seed, with 95 % bootstrap intervals. The energy bound beside each
    result is what no schedule of the same service can undercut.

    Examples:
      cloudsched compare
      cloudsched compare --workload google_v2_sampled --preset slow_wake --out runs/google
      cloudsched compare --policies rr best_fit+sleep runs/tuned.json --baseline rr --json
    """

    policies: tuple[str, ...] = ()
    """As for evaluate; without any, all heuristics and those tuned for this preset and workload."""
    baseline: str | None = None
    """What the others are compared with; None for the best tuned one, or the best where none is."""
    split: Literal["test", "train"] = "test"
    """Which seeds: 0..49 are for training, 1000000..1000049 for reporting."""
    seeds: int | None = None
    """Use only the first so many seeds of the split; None for all."""
    out: Path = field(default_factory=lambda: Path("runs/compare"))
    """Folder for comparison.json, episodes.parquet and power_sla.png."""
    json: bool = False
    """Print one JSON document on stdout; all else goes to stderr."""

    def run(self) -> None:
        """Evaluate, save and print."""
        scenario = self.scenario
        seeds = first_seeds(self.split, self.seeds)
        names = list(self.policies) or default_policies(scenario)
        if self.baseline is not None:
            names.append(self.baseline)
        policies = {name: make_policy(name, scenario.config) for name in names}
        check_folder(self.out)
        episodes = Episodes(scenario, seeds)
        print_settings(
            scenario, seeds, is_json=self.json, policies=" ".join(policies), split=self.split
        )
        with progress_bar(list(policies)) as progress:
            evaluations = {
                name: episodes.run(policy, name=name, progress=progress)
                for name, policy in policies.items()
            }
        evaluations = dict(sorted(evaluations.items(), key=lambda item: -_return(item[1])))
        baseline = self.baseline or default_baseline(evaluations)
        document = self._save(evaluations, baseline)
        if not has_interval(document):
            print(ONE_SEED_NOTE, file=sys.stderr)
        if self.json:
            print_json(document)
            return
        console().print(_table(document))
        for path in document["files"].values():
            print(path)

    def _save(self, evaluations: Mapping[str, Evaluation], baseline: str) -> dict[str, Any]:
        # Imported late: matplotlib takes a second, which a mistake in the options need not wait.
        from cloudsched import plots

        document = comparison_document(evaluations, baseline=baseline, split=self.split)
        paths = {
            "json": self.out / "comparison.json",
            "parquet": self.out / "episodes.parquet",
            "plot": self.out / "power_sla.png",
        }
        document["files"] = {name: str(path) for name, path in paths.items()}
        write_files(
            {
                paths["plot"]: plots.png(plots.power_against_sla(evaluations)),
                paths["parquet"]: to_parquet(list(evaluations.values())),
                paths["json"]: to_json(document).encode(),
            }
        )
        return document


def default_policies(scenario: Scenario) -> list[str]:
    """Return every heuristic that means something here, and those tuned for this scenario."""
    suffixes = list(SLEEP_SUFFIXES) if scenario.config.sleep else [""]
    heuristics = [base + suffix for base in BASES for suffix in suffixes]
    return heuristics + tuned_names(scenario.preset, scenario.workload)


def default_baseline(evaluations: Mapping[str, Evaluation]) -> str:
    """Return the best tuned policy by return, or the best of all where none is tuned."""
    tuned = [name for name in evaluations if "@" in name]
    return max(tuned or evaluations, key=lambda name: _return(evaluations[name]))


def _return(evaluation: Evaluation) -> float:
    return float(evaluation.metrics["episode_return"].mean())


def _table(document: dict[str, Any]) -> Table:
    scenario, baseline = document["scenario"], document["baseline"]
    is_known = has_interval(document)
    num_seeds = len(document["seeds"])
    table = Table(
        title=f"{scenario['workload']} at load {scenario['load']:g}, preset {scenario['preset']}, "
        f"{num_seeds} {document['split']} {'seeds' if is_known else 'seed'}: "
        f"{'means with 95 % intervals' if is_known else ONE_SEED_NOTE}; "
        f"differences are paired, to {baseline}",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("policy", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for name, entry in document["policies"].items():
        difference = document["differences"].get(name, {}).get("episode_return")
        table.add_row(
            name,
            _half_width(entry["episode_return"], 1, is_known),
            "baseline" if difference is None else _interval(difference, 1, is_known, sign="+"),
            _half_width(entry["mean_power_w"], 0, is_known),
            f"{100.0 * (entry['energy_over_bound']['mean'] - 1.0):+.1f} %",
            _interval(entry["sla_violation_rate"], 3, is_known, scale=100.0),
            f"{entry['wait_p95_ticks']['mean']:.1f}",
            f"{100.0 * entry['work_served']['mean']:.2f}",
            f"{entry['illegal']['mean']:.0f}",
            style="bold" if difference is None else None,
        )
    return table


def _interval(
    entry: dict[str, float], digits: int, is_known: bool, *, scale: float = 1.0, sign: str = ""
) -> str:
    mean, low, high = (
        f"{scale * entry[key]:{sign},.{digits}f}" for key in ("mean", "ci_low", "ci_high")
    )
    return f"{mean} [{low}, {high}]" if is_known else f"{mean} (n/a)"


def _half_width(entry: dict[str, float], digits: int, is_known: bool) -> str:
    half = (entry["ci_high"] - entry["ci_low"]) / 2.0
    return f"{entry['mean']:,.{digits}f} ±" + (f"{half:,.{digits}f}" if is_known else "n/a")
