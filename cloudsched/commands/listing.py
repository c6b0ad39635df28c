"""`cloudsched workloads | policies | presets`: what exists, one line each."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any

from cloudsched.commands.output import print_json
from cloudsched.config import ClusterConfig, Settings

WIDTH = 100  # columns
NAME_COLUMNS = 20  # of a name before what it means
SETTING_COLUMNS = 33  # of `name=default` before what it means


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What the listings share."""

    json: bool = False
    """Print one JSON document, name -> what is known of it."""

    def run(self) -> None:
        """Print the names and what they mean."""
        if self.json:
            print_json(self.document())
        else:
            print("\n".join(self.lines()))

    def document(self) -> Mapping[str, Any]:
        """Return what is known of each thing, by name."""
        raise NotImplementedError

    def lines(self) -> Iterator[str]:
        """Yield the lines for people."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Workloads(Listing):
    """List the workloads, and the options of each that `--workload-option` takes.

    Examples:
      cloudsched workloads
      cloudsched evaluate --policy rr --workload diurnal --workload-option amplitude=0.8
    """

    def document(self) -> Mapping[str, Any]:
        """Return description and options of each workload."""
        from cloudsched.workload.catalog import WORKLOADS

        return {
            name: {
                "description": entry.description,
                "needs_file": entry.needs_file,
                "options": {
                    key: {"default": default, "meaning": meaning}
                    for key, default, meaning in described_settings(entry.options)
                },
            }
            for name, entry in WORKLOADS.items()
        }

    def lines(self) -> Iterator[str]:
        """Yield each workload with its options below it."""
        yield "Options are given as --workload-option KEY=VALUE; here with their defaults."
        yield "Replays are divided: test seeds see the last third of the jobs, others the rest."
        for name, entry in self.document().items():
            yield ""
            need = " Needs path=FILE." if entry["needs_file"] else ""
            yield from _entry(name, entry["description"] + need)
            for key, option in entry["options"].items():
                yield from _setting(key, option["default"], option["meaning"])


@dataclass(frozen=True, kw_only=True)
class Policies(Listing):
    """List the policies that every `--policy` takes by name.

    Example:
      cloudsched policies | grep headroom
    """

    def document(self) -> Mapping[str, Any]:
        """Return one line on each policy."""
        from cloudsched.heuristics.catalog import policy_descriptions

        return policy_descriptions()

    def lines(self) -> Iterator[str]:
        """Yield a line for each policy."""
        described = self.document()
        width = max(len(name) for name in described) + 2
        for name, description in described.items():
            yield f"{name:<{width}}{description}"


@dataclass(frozen=True, kw_only=True)
class Presets(Listing):
    """List the presets, what each changes, and every setting that `--set` takes.

    Examples:
      cloudsched presets
      cloudsched evaluate --policy rr --preset slow_wake --set fleet.num_servers=30
    """

    def document(self) -> Mapping[str, Any]:
        """Return description and changes of each preset."""
        from cloudsched.envs.catalog import PRESETS

        defaults = _flat(ClusterConfig().to_dict())
        return {
            name: {
                "description": preset.description,
                "changes": {
                    key: value
                    for key, value in _flat(preset.config.to_dict()).items()
                    if value != defaults[key]
                },
            }
            for name, preset in PRESETS.items()
        }

    def lines(self) -> Iterator[str]:
        """Yield each preset with its changes, then all settings."""
        for name, preset in self.document().items():
            yield from _entry(name, preset["description"])
            if preset["changes"]:
                words = [_assignment(key, value) for key, value in preset["changes"].items()]
                yield from _beside("", NAME_COLUMNS, "changes " + "  ".join(words))
        yield ""
        yield "Settings are given as --set KEY=VALUE; here with the values of the default preset."
        for key, default, meaning in described_settings(ClusterConfig):
            yield from _setting(key, default, meaning)


def described_settings(kind: type[Settings], path: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield name, default and meaning of each setting; those of nested ones with their path."""
    meanings = _meanings(kind)
    for f in fields(kind):  # type: ignore[arg-type]
        default = _default(f)
        if is_dataclass(default):
            yield from described_settings(type(default), f"{path}{f.name}.")  # type: ignore[arg-type]
        else:
            yield path + f.name, default, meanings[f.name]


def _meanings(kind: type[Settings]) -> dict[str, str]:
    """Return what the source says below each field; a class may leave that to its base."""
    import ast
    import inspect

    meanings = {}
    for owner in reversed(kind.__mro__[: kind.__mro__.index(Settings)]):
        (body,) = (
            node.body
            for node in ast.parse(textwrap.dedent(inspect.getsource(owner))).body
            if isinstance(node, ast.ClassDef)
        )
        for statement, below in zip(body, [*body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                if is_text:
                    meanings[statement.target.id] = " ".join(str(below.value.value).split())  # type: ignore[union-attr]
    return meanings


def _default(f: Field[Any]) -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()


def _entry(name: str, meaning: str) -> Iterator[str]:
    return _beside(name, NAME_COLUMNS, meaning)


def _setting(key: str, default: Any, meaning: str) -> Iterator[str]:
    return _beside(f"  {_assignment(key, default)}", SETTING_COLUMNS, meaning)


def _beside(head: str, columns: int, text: str) -> Iterator[str]:
    """Yield a head and the text right of it, or below it where the head is too wide."""
    if len(head) >= columns:
        yield head
        head = ""
    for line in textwrap.wrap(text, WIDTH - columns, break_on_hyphens=False):
        yield f"{head:<{columns}}{line}"
        head = ""


def _assignment(key: str, value: Any) -> str:
    """Return `key=value` as `--set` reads it."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    return f"{key}={text}"


def _flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{path}{key}."))
        else:
            flat[path + key] = value
    return flat
