"""The memory of a process and of all that it started, at its peak."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

PROC = Path("/proc")
INTERVAL_S = 0.25


class PeakMemory:
    """Watches, while it is open, how much memory this process and its descendants hold.

    A page that several of them share counts once (proportional set size). Linux alone tells this;
    elsewhere the peak stays zero.
    """

    def __init__(self) -> None:
        self.peak_mb = 0.0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, tree_mb(os.getpid()))
            if self._has_ended.wait(INTERVAL_S):
                return


def tree_mb(root: int) -> float:
    """Return the memory of a process and of its descendants, in megabytes."""
    children: dict[int, list[int]] = {}
    for entry in PROC.glob("[0-9]*/stat") if PROC.exists() else ():
        try:
            # The name, in parentheses, may hold anything; the parent comes two fields after it.
            parent = int(entry.read_text("utf-8", "replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue  # it has ended
        children.setdefault(parent, []).append(int(entry.parent.name))
    waiting, total_kb = [root], 0
    while waiting:
        process = waiting.pop()
        waiting += children.get(process, [])
        total_kb += _proportional_kb(process)
    return total_kb * 1024 / 1e6


def _proportional_kb(process: int) -> int:
    try:
        lines = (PROC / str(process) / "smaps_rollup").read_text("ascii").splitlines()
    except OSError:
        return 0  # it has ended, or tells nothing here
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
