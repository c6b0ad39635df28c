"""The README tells the truth where a program can check it."""

from __future__ import annotations

import re
from pathlib import Path

from cloudsched.cli import VERBS

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text("utf-8")


def test_the_python_example_runs_and_prints_a_power(capsys: object) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(code.strip().splitlines()) <= 12
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out  # type: ignore[attr-defined]
    powers = [float(line.split(":")[1]) for line in printed.splitlines()]
    assert powers
    assert all(1000 < power < 4800 for power in powers)


def test_every_file_and_verb_that_is_named_exists() -> None:
    for path in re.findall(r"`((?:cloudsched|tests|notebooks|docs)/[\w/.]+)`", TEXT):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\(([\w/.]+)\)", TEXT):
        assert (ROOT / path).exists(), path
    verbs = re.findall(r"\bcloudsched ([a-z-]+)", TEXT)
    assert len(verbs) > 10
    for verb in verbs:
        assert any(verb == name.split()[0] for name in VERBS), verb


def test_the_readme_is_short() -> None:
    assert len(TEXT.splitlines()) < 200
