"""What verbs print: settings first, results, and paths last."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:  # listings need none of the machinery behind these, and no rich
    from rich.console import Console

    from cloudsched.envs.scenario import Scenario
    from cloudsched.evaluation import Progress as ReportProgress

PIPED_WIDTH = 160  # columns of tables that go to a file or another program


def console() -> Console:
    """Return where results are printed: stdout, with room for tables when it is no terminal."""
    from rich.console import Console

    class PipeConsole(Console):
        """One that leaves a reader who has gone to `cloudsched.cli.main`."""

        def on_broken_pipe(self) -> NoReturn:
            raise BrokenPipeError

    return PipeConsole(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def print_settings(
    scenario: Scenario, seeds: Sequence[int], *, is_json: bool, **others: object
) -> None:
    """Print what is about to run; to stderr where stdout is for a program."""
    file = sys.stderr if is_json else sys.stdout
    rows = {
        **others,
        "scenario": _flat(scenario.to_dict()),
        "cluster": _flat(scenario.config.to_dict()),
        "seeds": _span(seeds),
    }
    for name, value in rows.items():
        print(f"{name}: {value}", file=file)
    file.flush()


def has_interval(document: Mapping[str, Any]) -> bool:
    """Return whether a document's results have intervals: one seed has none."""
    return len(document["seeds"]) > 1


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document, and nothing else, on stdout."""
    print(json.dumps(document, indent=2, allow_nan=False))


@contextmanager
def progress_bar(names: Sequence[str]) -> Iterator[ReportProgress]:
    """Show on stderr how far the evaluation of some policies is; quiet when it is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    position = {name: i for i, name in enumerate(names)}
    with bar:
        task = bar.add_task("compiling", total=len(names))

        def report(name: str, share: float) -> None:
            bar.update(task, description=name, completed=position[name] + share)

        yield report


def _flat(values: Mapping[str, Any], prefix: str = "") -> str:
    words = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            if value:
                words.append(_flat(value, f"{prefix}{key}."))
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
            words.append(f"{prefix}{key}={text}")
    return " ".join(words)


def _span(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return str(seeds[0])
    return f"{seeds[0]}..{seeds[-1]} ({len(seeds)})"
