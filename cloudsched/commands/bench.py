"""`cloudsched bench env`: how fast the environment is, beside two yardsticks."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cloudsched.bench.env import FULL, MEMORY_SIZE, QUICK, SIZES, bench_env
from cloudsched.commands.output import console, print_json
from cloudsched.errors import ConfigError
from cloudsched.results import provenance

YARDSTICKS = {
    "naive_python": "one cluster in plain Python (sim/reference.py), observation and mask included",
    "cartpole": "Gymnasium's CartPole-v1, a single environment",
}


@dataclass(frozen=True, kw_only=True)
class BenchEnv:
    """Measure steps a second on one core, with random legal actions drawn inside the loop.

    Ours at several sizes (nX_eY: X servers, Y clusters; nX_eY_dZ: a tick ends after Z decisions at
    the latest, so that steps of small and large fleets end ticks alike), a plain-Python version of
    the same simulator, and CartPole. Close other programs first: the spread shows how quiet it was.

    Examples:
      cloudsched bench env
      cloudsched bench env --quick --json
    """

    repeats: int = 3
    """Measurements of each; the median counts."""
    quick: bool = False
    """Measure for a twentieth of a second each instead of one or more."""
    json: bool = False
    """Print one JSON document on stdout; all else goes to stderr."""

    def run(self) -> None:
        """Measure and print."""
        if self.repeats < 1:
            raise ConfigError(f"--repeats {self.repeats}: expected at least 1.")
        duration = QUICK if self.quick else FULL
        print(
            f"bench env: {self.repeats} repeats of at least {duration.least_s:g} s, "
            "preset default, workload poisson, load 0.5, seed 0",
            file=sys.stderr if self.json else sys.stdout,
            flush=True,
        )
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        ) as progress:
            total = self.repeats * (len(SIZES) + len(YARDSTICKS))
            task = progress.add_task("preparing", total=total)
            document = bench_env(
                repeats=self.repeats,
                duration=duration,
                sizes=SIZES,
                memory_size=MEMORY_SIZE,
                report=lambda name, done: progress.update(task, description=name, completed=done),
            )
        document.update(provenance())
        if self.json:
            print_json(document)
            return
        console().print(_table(document))
        ratios, memory = document["ratios"], document["memory_mb"]
        print(f"{ratios['naive_python']:,.0f} x naive Python, {ratios['cartpole']:,.1f} x CartPole")
        for name, growth in document["cost_growth"].items():
            ticks = document["ticks_per_step"][name]
            print(
                f"{name}: time a step grew {growth:.2f} x as much as the number of servers "
                f"(at {ticks:.3f} ticks a step)"
            )
        print(", ".join(f"{name}: {megabytes:,.0f} MB" for name, megabytes in memory.items()))


def _table(document: dict[str, Any]) -> Table:
    table = Table("case")
    for column in ("steps/s", "lowest", "highest", "ns a step", "ticks a step"):
        table.add_column(column, justify="right")
    table.add_column("what", style="dim")
    for name, rate in document["steps_per_s"].items():
        low, high = document["spread"][name]
        ticks = document["ticks_per_step"].get(name)
        table.add_row(
            name,
            f"{rate:,.0f}",
            f"{low:,.0f}",
            f"{high:,.0f}",
            f"{1e9 / rate:,.0f}",
            "" if ticks is None else f"{ticks:.3f}",
            YARDSTICKS.get(name, "cloudsched"),
        )
    return table
