"""Explicit tables from name to thing, with errors that suggest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from cloudsched.errors import UnknownNameError, suggestion

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A read-only table of named things of one kind.

    Args:
        kind: what the entries are, for error messages ("workload", "policy", ...).
        entries: the whole table; a registry never grows afterwards.
    """

    def __init__(self, kind: str, entries: Mapping[str, T]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise UnknownNameError(
                f"No {self.kind} named {name!r}. {suggestion(name, self._entries)}"
            )
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
