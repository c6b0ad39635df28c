"""`cloudsched bench serve`: how fast decisions are served here, beside two yardsticks."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rich.table import Table

from cloudsched.bench.serve import ServeBenchConfig, run
from cloudsched.commands.output import console, print_json
from cloudsched.results import provenance


@dataclass(frozen=True, kw_only=True)
class BenchServe(ServeBenchConfig):
    """Measure requests a second and latencies of the service on loopback.

    On Serve behind HAProxy with one and with two replicas, the same application on bare uvicorn,
    and behind Serve's own proxy, in turns; over gRPC, too. Close other programs first. Uses `wrk`
    and `h2load` where they are installed.

    Examples:
      cloudsched bench serve
      cloudsched bench serve --policy best_fit+sleep --seconds 2 --rounds 1 --json
    """

    json: bool = False
    """Print one JSON document on stdout; all else goes to stderr."""

    def run(self) -> None:
        """Measure and print."""
        settings = {name: getattr(self, name) for name in ServeBenchConfig.__dataclass_fields__}
        document = run(
            ServeBenchConfig(**settings), lambda line: print(line, file=sys.stderr, flush=True)
        )
        document = {"schema": "cloudsched.bench_serve.v1", **document, **provenance()}
        if self.json:
            print_json(document)
            return
        table = Table("case")
        for column in ("p50, ms", "p90, ms", "p99, ms"):
            table.add_column(column, justify="right")
        for name, entry in document["latency_ms"].items():
            table.add_row(name, *(f"{entry[key]:.2f}" for key in ("p50", "p90", "p99")))
        console().print(table)
        figures = Table("figure")
        figures.add_column("value", justify="right")
        for name, value in document["requests_per_s"].items():
            figures.add_row(f"{name}, requests/s at 16 connections", _text(value, ",.0f"))
        for name, value in document["ratios"].items():
            figures.add_row(name, _text(value, ".2f"))
        figures.add_row("batch, decisions/s", _text(document["batch_decisions_per_s"], ",.0f"))
        console().print(figures)


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
