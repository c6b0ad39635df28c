"""`cloudsched evaluate`: one policy on the train or test seeds."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
from cloudsched.evaluation import Episodes, first_seeds
from cloudsched.metrics import METRICS
from cloudsched.results import (
    ONE_SEED_NOTE,
    check_folder,
    evaluation_document,
    to_json,
    to_parquet,
    write_files,
)


@dataclass(frozen=True, kw_only=True)
class Evaluate(ScenarioOptions):
    """Run one policy on the train or test seeds; every metric with its 95 % bootstrap interval.

    Examples:
      cloudsched evaluate --policy power_aware+headroom
      cloudsched evaluate --policy rr --workload diurnal --preset slow_wake --json
      cloudsched evaluate --policy runs/tuned.json --set fleet.num_servers=30 --out runs/tuned
    """

    policy: str
    """A name (`cloudsched policies`), a file of `tune-heuristic`, or the folder of a bundle."""
    split: Literal["test", "train"] = "test"
    """Which seeds: 0..49 are for training, 1000000..1000049 for reporting."""
    seeds: int | None = None
    """Use only the first so many seeds of the split; None for all."""
    out: Path | None = None
    """Folder to save evaluation.json and episodes.parquet in; None to save nothing."""
    json: bool = False
    """Print one JSON document on stdout; all else goes to stderr."""

    def run(self) -> None:
        """Evaluate, save and print."""
        scenario = self.scenario
        seeds = first_seeds(self.split, self.seeds)
        policy = make_policy(self.policy, scenario.config)
        if self.out is not None:
            check_folder(self.out)
        episodes = Episodes(scenario, seeds)
        print_settings(scenario, seeds, is_json=self.json, policy=self.policy, split=self.split)
        with progress_bar([self.policy]) as progress:
            evaluation = episodes.run(policy, name=self.policy, progress=progress)
        document = evaluation_document(evaluation, split=self.split)
        if self.out is not None:
            paths = {"json": self.out / "evaluation.json", "parquet": self.out / "episodes.parquet"}
            document["files"] = {name: str(path) for name, path in paths.items()}
            write_files(
                {
                    paths["parquet"]: to_parquet([evaluation]),
                    paths["json"]: to_json(document).encode(),
                }
            )
        if not has_interval(document):
            print(ONE_SEED_NOTE, file=sys.stderr)
        if self.json:
            print_json(document)
            return
        console().print(_table(document))
        for path in document["files"].values():
            print(path)


def _table(document: dict[str, Any]) -> Table:
    table = Table("metric", title=document["policy"], title_justify="left")
    for column in ("mean", "95 % low", "95 % high"):
        table.add_column(column, justify="right")
    table.add_column("meaning", style="dim")
    meanings = {**METRICS, "energy_over_bound": "energy / energy bound; 1 cannot be undercut"}
    is_known = has_interval(document)
    for metric, meaning in meanings.items():
        entry = document[metric]
        ends = [f"{entry[key]:,.5g}" if is_known else "n/a" for key in ("ci_low", "ci_high")]
        table.add_row(metric, f"{entry['mean']:,.5g}", *ends, meaning)
    return table
