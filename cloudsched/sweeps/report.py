"""What a benchmark ends in: one table, a picture, files with every figure, and the winners.

`benchmark.json` has these keys; they are stable, and a change of meaning changes `schema`.

| key                      | value                                                             |
|--------------------------|-------------------------------------------------------------------|
| `schema`                 | "cloudsched.benchmark.v1"                                         |
| `workloads`              | name -> what follows                                              |
| … `scenario`, `cluster`  | the rules                                                         |
| … `baseline`             | the tuned heuristic that all others are compared with             |
| … `policies`             | name -> `trainings`, and each metric's `mean`, `ci_low`,          |
|                          | `ci_high` on the test seeds                                       |
| … `differences`          | name -> metric -> the same three, of policy - baseline, paired    |
| … `winner`               | trial of the learner with the best return on *train* seeds        |
| `winner`                 | the best of those, relative to the tuned heuristic on train seeds |
| `versions`, `git_commit` | of what ran                                                       |
| `files`                  | where all of it was saved                                         |

Intervals are 95 % and cover training seeds and test seeds (`statistics.summarise_grid`).
`episodes.parquet` has a row for each trial and seed: `workload`, `policy`, `train_seed`, `split`,
`seed`, and one column a metric.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cloudsched import plots
from cloudsched.bundle import load_bundle, save_bundle
from cloudsched.metrics import METRICS
from cloudsched.results import evaluation_document, provenance, to_json, write_files
from cloudsched.statistics import summarise_grid
from cloudsched.sweeps.specs import BUNDLE, Outcome

SCHEMA = "cloudsched.benchmark.v1"
COLUMNS = (
    *("trainings", "return", "difference", "power W", "SLA violations %"),
    *("wait p95", "work served %", "illegal"),
)

Document = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Contest:
    """All trials on one workload."""

    workload: str
    baseline: str
    outcomes: Mapping[str, list[Outcome]]
    """By policy, the best return on test seeds first; one outcome a training."""

    def grid(self, policy: str) -> dict[str, NDArray[np.float64]]:
        """(T, S) each metric of a policy over trainings and test seeds."""
        rows = [outcome.test.metrics for outcome in self.outcomes[policy]]
        return {name: np.stack([row[name] for row in rows]) for name in METRICS}

    @property
    def best(self) -> Outcome | None:
        """The training with the best return on train seeds; None if nothing was trained."""
        learned = [o for group in self.outcomes.values() for o in group if o.spec.is_learned]
        return max(learned, key=train_return, default=None)

    @property
    def lead(self) -> float:
        """How far the best is ahead of the baseline on train seeds, as a share of its return."""
        assert self.best is not None
        reference = train_return(self.outcomes[self.baseline][0])
        return (train_return(self.best) - reference) / abs(reference)


def train_return(outcome: Outcome) -> float:
    """Return the mean episode return on train seeds: what winners are chosen by."""
    return float(outcome.train.metrics["episode_return"].mean())


def contests(outcomes: Sequence[Outcome], baselines: Mapping[str, str]) -> list[Contest]:
    """Group outcomes by workload and policy.

    Args:
        baselines: the policy that others are compared with, by workload.
    """
    found = []
    for workload, baseline in baselines.items():
        groups: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            if outcome.spec.scenario.workload == workload:
                groups.setdefault(outcome.spec.policy, []).append(outcome)
        ranked = sorted(groups.items(), key=lambda item: -_test_return(item[1]))
        found.append(Contest(workload=workload, baseline=baseline, outcomes=dict(ranked)))
    return found


def benchmark_document(found: Sequence[Contest]) -> Document:
    """Return the JSON document."""
    trained = [contest for contest in found if contest.best is not None]
    winner = max(trained, key=lambda contest: contest.lead).best if trained else None
    return {
        "schema": SCHEMA,
        "workloads": {contest.workload: _entry(contest) for contest in found},
        "winner": None if winner is None else winner.spec.key,
        **provenance(),
        "files": {},
    }


def _entry(contest: Contest) -> Document:
    reference = contest.outcomes[contest.baseline][0]
    policies, differences = {}, {}
    for name, group in contest.outcomes.items():
        grid = contest.grid(name)
        estimates = {metric: asdict(e) for metric, e in summarise_grid(grid).items()}
        cut_short = [outcome.spec.key for outcome in group if outcome.is_cut_short]
        trainings = [
            {"trial": o.spec.key, "train_return": train_return(o), **o.training}
            for o in group
            if o.spec.is_learned
        ]
        policies[name] = {"trainings": trainings, "cut_short": cut_short, **estimates}
        if name != contest.baseline:
            gaps = {metric: grid[metric] - reference.test.metrics[metric] for metric in METRICS}
            differences[name] = {metric: asdict(e) for metric, e in summarise_grid(gaps).items()}
    return {
        "scenario": reference.spec.scenario.to_dict(),
        "cluster": reference.spec.scenario.config.to_dict(),
        "num_seeds": reference.spec.num_seeds,
        "baseline": contest.baseline,
        "policies": policies,
        "differences": differences,
        "winner": None if contest.best is None else contest.best.spec.key,
    }


def save(found: Sequence[Contest], folder: Path, trials: Path) -> Document:
    """Write all files of a benchmark, and return its document.

    Args:
        trials: holds the trials' folders by key, with the bundles of those that learned.
    """
    document = benchmark_document(found)
    paths = {
        "json": folder / "benchmark.json",
        "parquet": folder / "episodes.parquet",
        "plot": folder / "pareto.png",
    }
    bundles = {}
    for contest in found:
        if contest.best is not None:
            bundles[f"winner_{contest.workload}"] = (
                contest.best,
                folder / "winners" / contest.workload,
            )
            if contest.best.spec.key == document["winner"]:
                bundles["winner"] = (contest.best, folder / "winner")
    for outcome, target in bundles.values():
        bundle = load_bundle(trials / outcome.spec.key / BUNDLE)
        evaluation = evaluation_document(outcome.test, split="test")
        save_bundle(replace(bundle, evaluation=evaluation), target)
    files = {**paths, **{name: target for name, (_, target) in bundles.items()}}
    document["files"] = {name: str(path) for name, path in files.items()}
    everything = [o for c in found for group in c.outcomes.values() for o in group]
    write_files(
        {
            paths["plot"]: picture(found),
            paths["parquet"]: parquet(everything),
            paths["json"]: to_json(document).encode(),
        }
    )
    return document


def parquet(outcomes: Sequence[Outcome]) -> bytes:
    """Return the table of all episodes."""
    import pyarrow
    import pyarrow.parquet

    parts = [
        (outcome, split, evaluation)
        for outcome in outcomes
        for split, evaluation in (("train", outcome.train), ("test", outcome.test))
    ]
    columns: dict[str, Any] = {
        "workload": [o.spec.scenario.workload for o, _, e in parts for _ in e.seeds],
        "policy": [o.spec.policy for o, _, e in parts for _ in e.seeds],
        "train_seed": pyarrow.array(
            [o.spec.train_seed for o, _, e in parts for _ in e.seeds], pyarrow.int64()
        ),
        "split": [split for _, split, e in parts for _ in e.seeds],
        "seed": [seed for _, _, e in parts for seed in e.seeds],
    }
    for metric in METRICS:
        columns[metric] = np.concatenate([e.metrics[metric] for _, _, e in parts])
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


def picture(found: Sequence[Contest]) -> bytes:
    """Return power against SLA violations as PNG, one part a workload and a point a training."""
    parts = []
    for contest in found:
        shown = {}
        for outcome in (o for group in contest.outcomes.values() for o in group):
            seed = f"+seed{outcome.spec.train_seed}" if outcome.spec.is_learned else ""
            name = outcome.spec.policy + seed
            shown[name] = replace(outcome.test, policy=name)
        figure = plots.power_against_sla(shown)
        parts.append(Image.open(io.BytesIO(plots.png(figure))))
    sheet = Image.new(
        "RGB", (max(part.width for part in parts), sum(part.height for part in parts)), "white"
    )
    top = 0
    for part in parts:
        sheet.paste(part, (0, top))
        top += part.height
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG")
    return buffer.getvalue()


def table(document: Document) -> Table:
    """Return the one table of a benchmark."""
    first = next(iter(document["workloads"].values()))
    shown = Table(
        title=f"{first['num_seeds']} test seeds, preset {first['scenario']['preset']}: means with "
        "95 % intervals over training seeds and test seeds (both resampled, crossed); differences "
        "are paired by test seed, to the tuned heuristic of each workload",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    shown.add_column("workload", no_wrap=True)
    shown.add_column("policy", no_wrap=True)
    for column in COLUMNS:
        shown.add_column(column, justify="right")
    for workload, entry in document["workloads"].items():
        for name, row in entry["policies"].items():
            difference = entry["differences"].get(name, {}).get("episode_return")
            shown.add_row(
                workload,
                name,
                _trainings(row),
                _interval(row["episode_return"], 0),
                "baseline" if difference is None else _interval(difference, 0, sign="+"),
                _interval(row["mean_power_w"], 0),
                _interval(row["sla_violation_rate"], 2, scale=100.0),
                f"{row['wait_p95_ticks']['mean']:.1f}",
                f"{100.0 * row['work_served']['mean']:.1f}",
                f"{row['illegal']['mean']:.0f}",
                style="bold" if difference is None else None,
            )
        shown.add_section()
    return shown


def notes(document: Document) -> list[str]:
    """Return what a reader of the table must know beside it."""
    lines = []
    cut = [
        key
        for entry in document["workloads"].values()
        for row in entry["policies"].values()
        for key in row["cut_short"]
    ]
    if cut:
        lines.append(f"* ended by time, before the decisions of the budget: {', '.join(cut)}")
    if document["winner"] is not None:
        lines.append(f"winner (chosen by return on train seeds): {document['winner']}")
    return lines


def _trainings(row: Document) -> str:
    count = len(row["trainings"])
    return f"{count or ''}{'*' if row['cut_short'] else ''}"


def _interval(
    entry: Mapping[str, float], digits: int, *, scale: float = 1.0, sign: str = ""
) -> str:
    mean, low, high = (
        f"{scale * entry[key]:{sign},.{digits}f}" for key in ("mean", "ci_low", "ci_high")
    )
    return f"{mean} [{low}, {high}]"


def _test_return(group: Sequence[Outcome]) -> float:
    return float(np.mean([outcome.test.metrics["episode_return"] for outcome in group]))
