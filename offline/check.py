"""Step 2 of 4: check a dataset, decision by decision.

Run: `python -m offline.check runs/offline/diurnal`
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from cloudsched.cli import run_script
from cloudsched.commands.output import print_json
from cloudsched.datasets.check import check_dataset
from cloudsched.errors import DatasetError


@dataclass(frozen=True, kw_only=True)
class Check:
    """Say everything that is wrong with a dataset, and where; exit code 2 if anything is.

    Checks schema and encoder version, checksums, columns, that every action was legal by its own
    mask, that episodes have no gaps, that each kind of action occurs, and the range of costs,
    powers and probabilities.

    Examples:
      python -m offline.check runs/offline/diurnal
    """

    dataset: tyro.conf.Positional[Path]
    """Folder that offline.record wrote."""
    json: bool = False
    """Print one JSON document on stdout; all else goes to stderr."""

    def run(self) -> None:
        """Check, with progress on stderr."""

        def progress(name: str, rows: int) -> None:
            print(f"{name}: {rows:,} decisions", file=sys.stderr, flush=True)

        report = check_dataset(self.dataset, progress)
        if self.json:
            print_json(
                {
                    "dataset": str(self.dataset),
                    "num_checked": report.num_checked,
                    "findings": list(report.findings),
                    "warnings": list(report.warnings),
                    "action_counts": dict(report.manifest.action_counts),
                }
            )
        else:
            for line in report.findings:
                print(line)
            for line in report.warnings:
                print(f"warning: {line}")
        if report.findings:
            raise DatasetError(f"{self.dataset}: {len(report.findings)} findings; see above.")
        if not self.json:
            print(f"{report.num_checked:,} decisions are sound: {self.dataset}")


if __name__ == "__main__":
    sys.exit(run_script(Check, "python -m offline.check"))
