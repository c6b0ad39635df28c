"""`cloudsched bench offline`: how fast data is recorded and learned from, beside two yardsticks."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rich.table import Table

from cloudsched.bench.offline import OfflineBenchConfig, run
from cloudsched.commands.output import console, print_json
from cloudsched.commands.policies import make_policy
from cloudsched.results import provenance
from cloudsched.sweeps.cluster import connected


@dataclass(frozen=True, kw_only=True)
class BenchOffline(OfflineBenchConfig):
    """Measure recording (transitions a second) and offline learning (gradient steps a second).

    Our learner reads from disk through Ray Data; beside it the same learner fed from memory, and
    d3rlpy's DiscreteCQL with a perceptron and batch of the same size. Close other programs first.

    Examples:
      cloudsched bench offline
      cloudsched bench offline --num-episodes 40 --seconds 2 --rounds 1 --json
    """

    json: bool = False
    """Print one JSON document on stdout; all else goes to stderr."""

    def run(self) -> None:
        """Measure and print."""
        settings = {name: getattr(self, name) for name in OfflineBenchConfig.__dataclass_fields__}
        with connected(None):
            document = run(
                OfflineBenchConfig(**settings),
                make_policy,
                lambda line: print(line, file=sys.stderr, flush=True),
            )
        document = {"schema": "cloudsched.bench_offline.v1", **document, **provenance()}
        if self.json:
            print_json(document)
            return
        table = Table("measure")
        table.add_column("value", justify="right")
        table.add_row("recorded transitions/s", f"{document['recorded_transitions_per_s']:,.0f}")
        for name, speed in document["steps_per_s"].items():
            table.add_row(f"{name}, gradient steps/s", f"{speed:,.1f}")
        for name, ratio in document["ratios"].items():
            text = document["absent"].get(name, "") if ratio is None else f"{ratio:.2f}"
            table.add_row(f"ours / {name}", text)
        console().print(table)
