"""The command line: verbs over dataclasses.

A verb is a frozen dataclass with a `run` method; its fields are the options. A user's mistake costs
one line on stderr and exit code 2, Ctrl-C exit code 130. Modules are imported once their verb is
called, so that none pays for the others.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from cloudsched import __version__
from cloudsched.errors import CloudschedError
from cloudsched.registry import Registry

OK, MISTAKE, INTERRUPTED, BROKEN_PIPE = 0, 2, 130, 141


class Command(Protocol):
    """What a verb's dataclass offers."""

    def run(self) -> None:
        """Do it."""


class Verb(NamedTuple):
    """Where a verb is defined, and one line on it."""

    module: str
    class_name: str
    description: str


VERBS: Registry[Verb] = Registry(
    "verb",
    {
        "evaluate": Verb(
            "cloudsched.commands.evaluate", "Evaluate", "one policy on the train or test seeds"
        ),
        "compare": Verb(
            "cloudsched.commands.compare", "Compare", "several policies: table, files and picture"
        ),
        "simulate": Verb(
            "cloudsched.commands.simulate",
            "Simulate",
            "watch one episode, or save it as GIF or PNG",
        ),
        "clone": Verb(
            "cloudsched.commands.clone", "Clone", "teach a network to decide as a heuristic does"
        ),
        "train": Verb("cloudsched.commands.train", "Train", "train a policy with an RLlib config"),
        "tune-heuristic": Verb(
            "cloudsched.commands.tune", "TuneHeuristic", "search for a heuristic's best numbers"
        ),
        "evolve": Verb(
            "cloudsched.commands.evolve", "Evolve", "learn a rule whose numbers follow the site"
        ),
        "improve": Verb(
            "cloudsched.commands.improve",
            "Improve",
            "try other decisions on the same arrivals, and learn from them",
        ),
        "serve": Verb("cloudsched.commands.serve", "Serve", "the policy over HTTP and gRPC"),
        "bench env": Verb(
            "cloudsched.commands.bench",
            "BenchEnv",
            "the simulator's steps a second, beside CartPole's",
        ),
        "bench train": Verb(
            "cloudsched.commands.bench_train",
            "BenchTrain",
            "PPO's steps a second, beside other trainers'",
        ),
        "bench offline": Verb(
            "cloudsched.commands.bench_offline",
            "BenchOffline",
            "recording and offline learning, beside two yardsticks",
        ),
        "bench serve": Verb(
            "cloudsched.commands.bench_serve", "BenchServe", "the service's speed, beside its peers"
        ),
        "workloads": Verb(
            "cloudsched.commands.listing", "Workloads", "what may arrive, and its options"
        ),
        "policies": Verb("cloudsched.commands.listing", "Policies", "what may decide, by name"),
        "presets": Verb(
            "cloudsched.commands.listing", "Presets", "the rules of a cluster, and all settings"
        ),
    },
)

EXAMPLES = """\
examples:
  cloudsched compare --workload diurnal --preset slow_wake
  cloudsched evaluate --policy power_aware+headroom --workload poisson --json
  cloudsched simulate --policy best_fit+sleep --ticks 200 --out episode.gif"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return _guarded(lambda: _dispatch(words))


def run_script(command_class: type[Any], program: str, argv: Sequence[str] | None = None) -> int:
    """Run a script whose options are a dataclass, as if it were a verb; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return _guarded(lambda: _run(command_class, program, words))


def _guarded(call: Callable[[], int]) -> int:
    """Turn mistakes and interrupts into exit codes and a line on stderr."""
    try:
        code = call()
        sys.stdout.flush()
        return code
    except CloudschedError as error:
        return _fail(str(error))
    except MemoryError as error:
        return _fail(f"Not enough memory: {error}. Use fewer servers, visible jobs or seeds.")
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        return _fail(f"Cannot use {error.filename!r}: {error.strerror}.")
    except BrokenPipeError:
        # The reader, such as `head`, has enough; Python would complain once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return OK if words else MISTAKE
    if words == ["--version"]:
        print(f"cloudsched {__version__}")
        return OK
    length = 2 if any(name.startswith(f"{words[0]} ") for name in VERBS) else 1
    if length == 2 and words[1:] in (["-h"], ["--help"]):
        print(_help())
        return OK
    name, rest = " ".join(words[:length]), words[length:]
    verb = VERBS[name]
    return _run(getattr(import_module(verb.module), verb.class_name), f"cloudsched {name}", rest)


def _run(command_class: type[Any], program: str, words: list[str]) -> int:
    try:
        command = _parse(command_class, program, words)
    except SystemExit as stop:  # after --help
        return int(stop.code or OK)
    command.run()
    return OK


def _parse(command_class: type[Any], program: str, words: list[str]) -> Command:
    """Build a command from its options; a mistake in them becomes one line."""
    import tyro

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            command: Command = tyro.cli(
                command_class,
                prog=program,
                description=inspect.cleandoc(command_class.__doc__ or ""),
                args=words,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if stop.code != MISTAKE:
            raise
        raise CloudschedError(
            f"{_one_line(complaint.getvalue())} See `{program} --help`."
        ) from None
    sys.stderr.write(complaint.getvalue())
    return command


def _one_line(box: str) -> str:
    """Return the words of the box that tyro draws around a mistake."""
    words = []
    for line in box.splitlines():
        text = re.sub(r"\x1b\[[0-9;]*m", "", line).strip("│ ")
        if text.startswith(("For full helptext", "Argument helptext")):
            break
        if text and text[0] not in "╭╰─":
            words.append(text)
    sentence = " ".join(words).strip()
    return sentence if sentence.endswith(".") else f"{sentence}."


def _help() -> str:
    width = max(len(name) for name in VERBS)
    verbs = [f"  {name:<{width}}  {verb.description}" for name, verb in VERBS.items()]
    return "\n".join(
        [
            "usage: cloudsched VERB [OPTIONS]     (cloudsched VERB --help explains the options)",
            "",
            "Scheduling for cloud clusters: which job runs where, and which servers sleep.",
            "",
            "verbs:",
            *verbs,
            "",
            EXAMPLES,
        ]
    )


def _fail(sentence: str) -> int:
    print(" ".join(sentence.split()), file=sys.stderr)
    return MISTAKE


if __name__ == "__main__":
    sys.exit(main())
