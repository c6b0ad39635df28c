"""`cloudsched tune-heuristic`: CMA-ES over the numbers of a heuristic, on train seeds."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from cloudsched import __version__
from cloudsched.commands.options import ClusterOptions
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.evaluation import first_seeds
from cloudsched.heuristics.adapting import SearchConfig, tune_on_fresh_arrivals
from cloudsched.heuristics.catalog import load_heuristic
from cloudsched.heuristics.parameters import HeuristicConfig
from cloudsched.heuristics.tuning import (
    TunedHeuristic,
    TuningProgress,
    free_parameters,
    tune_heuristic,
)
from cloudsched.results import check_folder, write_files

REPORT_SECONDS = 10.0
"""Time between two lines of progress where there is no terminal for a bar."""


@dataclass(frozen=True, kw_only=True)
class TuneHeuristic(ClusterOptions):
    """Tune a heuristic's numbers for one workload, or for several at once.

    The search is CMA-ES on common random numbers over the train seeds; the test seeds are never
    touched. Every episode counts in proportion to the start's return in it. The outcome is a file
    that every `--policy` accepts. Ctrl-C keeps the best so far.

    Examples:
      cloudsched tune-heuristic --policy power_aware+headroom --whole --workloads poisson
      cloudsched tune-heuristic --workloads poisson diurnal --set wake_delay_ticks=5
    """

    policy: str = "power_aware+headroom"
    """Where the search starts: a name (`cloudsched policies`), or a file of `tune-heuristic`."""
    workloads: tuple[str, ...] = ("poisson",)
    """Workloads to be good at."""
    whole: bool = False
    """Tune order and placement too; otherwise only the sleep controller, scan depth and holding."""
    evaluations: int = 2000
    """Candidates to try, in whole generations; each runs on all the train seeds."""
    population: int = 16
    """Candidates in a generation."""
    step: float = 0.2
    """How far the first candidates lie from the start, as a share of each number's range."""
    num_seeds: int = 50
    """How many of the 50 train seeds to use."""
    fresh: int | None = None
    """Try each generation on so many new episodes, drawn below the test seeds, instead of the train
    seeds; those then only measure the outcome. For workloads whose episodes differ much, such as
    `mixture`: fifty of them are soon known by heart."""
    seed: int = 0
    """Seed of the search."""
    out: Path = field(default_factory=lambda: Path("runs/tuned.json"))
    """File to write, ending in .json."""
    json: bool = False
    """Also print what is in that file on stdout, and nothing else there."""

    def run(self) -> None:
        """Tune, and write the outcome."""
        if self.out.suffix != ".json":
            raise ConfigError(f"--out {str(self.out)!r}: expected a file ending in .json.")
        for name, low in (("evaluations", 1), ("population", 4), ("num_seeds", 1), ("fresh", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} {value}: expected at least {low}.")
        if not self.workloads:
            raise ConfigError("--workloads is empty: expected at least one name.")
        check_folder(self.out.parent)
        if not 0.0 < self.step <= 1.0:
            raise ConfigError(f"--step {self.step}: expected a number above 0 and at most 1.")
        seeds = list(first_seeds("train", self.num_seeds))
        start = load_heuristic(self.policy)
        scenarios = [self.scenario_with(workload) for workload in self.workloads]
        console = Console(file=sys.stderr)
        place = [f"preset {self.preset}", f"load {self.load:g}"]
        place += [word for group in (*self.changes, *self.workload_options) for word in group]
        console.print(
            f"tuning {self.policy} on {', '.join(self.workloads)} ({', '.join(place)}), "
            f"{len(seeds)} train seeds, search seed {self.seed}",
            markup=False,
            highlight=False,
        )
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not sys.stderr.isatty(),
        ) as progress:
            task = progress.add_task("compiling", total=self.evaluations)

            reported = time.monotonic()

            def report(state: TuningProgress) -> None:
                nonlocal reported
                text = (
                    f"best {100 * state.best_gain:+.2f} %, "
                    f"generation {100 * state.generation_gain:+.2f} % over the start"
                )
                progress.update(task, completed=state.evaluations, description=text)
                if progress.disable and time.monotonic() - reported > REPORT_SECONDS:
                    reported = time.monotonic()
                    print(f"{state.evaluations} candidates: {text}", file=sys.stderr, flush=True)

            tuned = self._search(start, scenarios, seeds, report)
        document = self._document(tuned, scenarios[0], seeds)
        write_files({self.out: f"{json.dumps(document, indent=1)}\n".encode()})
        if self.json:
            print(json.dumps(document, indent=1))
        else:
            print(
                f"train return {tuned.train_return:.1f} (start {tuned.start_return:.1f}, "
                f"{100 * tuned.gain:+.2f} % an episode) after {tuned.evaluations} candidates"
            )
            print(self.out)

    def _search(
        self,
        start: HeuristicConfig,
        scenarios: list[Scenario],
        seeds: list[int],
        report: Callable[[TuningProgress], None],
    ) -> TunedHeuristic:
        names = free_parameters(start, is_whole=self.whole)
        if self.fresh is None:
            return tune_heuristic(
                start,
                scenarios,
                seeds,
                names=names,
                evaluations=self.evaluations,
                population=self.population,
                step=self.step,
                seed=self.seed,
                report=report,
            )
        config = SearchConfig(
            evaluations=self.evaluations,
            population=self.population,
            num_seeds=self.fresh,
            step=self.step,
            seed=self.seed,
        )
        return tune_on_fresh_arrivals(start, scenarios, seeds, names, config, report)

    def _document(
        self, tuned: TunedHeuristic, scenario: Scenario, seeds: list[int]
    ) -> dict[str, object]:
        return {
            "schema": "cloudsched.heuristic.v1",
            "parameters": tuned.config.to_dict(),
            "gain": tuned.gain,
            "train_return": tuned.train_return,
            "start_return": tuned.start_return,
            "evaluations": tuned.evaluations,
            "start": self.policy,
            "workloads": list(self.workloads),
            "preset": self.preset,
            "load": self.load,
            "settings": dict(scenario.settings),
            "workload_options": dict(scenario.workload_options),
            "seeds": seeds,
            "fresh": self.fresh,
            "search_seed": self.seed,
            "cloudsched": __version__,
        }
