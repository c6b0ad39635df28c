"""`cloudsched bench train`: how fast PPO trains here, beside three other ways to train it."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rich.table import Table

from cloudsched.bench.train import TrainBenchConfig, run
from cloudsched.commands.output import console, print_json
from cloudsched.results import provenance


@dataclass(frozen=True, kw_only=True)
class BenchTrain(TrainBenchConfig):
    """Measure env steps a second of PPO end to end: sampling, learning and weight sync.

    Ours inside RLlib, a bare torch loop on the same simulator, SB3's MaskablePPO (extra `bench`)
    and stock RLlib with its own masking module, all with the same network and hyper-parameters, in
    turns. Ours takes its matrix
    products in bfloat16 where that is fast; `cloudsched_float32` is ours without. Close other
    programs first.

    Examples:
      cloudsched bench train
      cloudsched bench train --seconds 2 --rounds 1 --env-counts 64 --json
    """

    json: bool = False
    """Print one JSON document on stdout; all else goes to stderr."""

    def run(self) -> None:
        """Measure and print."""
        settings = {name: getattr(self, name) for name in TrainBenchConfig.__dataclass_fields__}
        document = run(
            TrainBenchConfig(**settings),
            lambda line: print(line, file=sys.stderr, flush=True),
        )
        document = {"schema": "cloudsched.bench_train.v1", **document, **provenance()}
        if self.json:
            print_json(document)
            return
        table = Table("contender", "precision")
        table.add_column("steps/s", justify="right")
        table.add_column("ours / it", justify="right")
        for name, speed in document["steps_per_s"].items():
            ratio = document["ratios"].get(name)
            table.add_row(
                name,
                document["precision"][name],
                document["absent"].get(name, "") if speed is None else f"{speed:,.0f}",
                "" if ratio is None else f"{ratio:.2f}",
            )
        console().print(table)
