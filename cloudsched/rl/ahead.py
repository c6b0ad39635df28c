"""Runs an iterator in a thread of its own, some items ahead of whoever takes them."""

from __future__ import annotations

import threading
from collections.abc import Generator
from queue import Empty, Full, Queue
from typing import NamedTuple, TypeVar

T = TypeVar("T")

PATIENCE_S = 0.1  # between looks at whether somebody still wants what is waiting


class _End(NamedTuple):
    error: BaseException | None


def ahead(source: Generator[T], count: int) -> Generator[T]:
    """Yield what the source yields; up to `count` items are made before they are asked for.

    What the source raises is raised here. Closing this closes the source, in the thread that runs
    it.
    """
    made: Queue[T | _End] = Queue(maxsize=count)
    is_closed = threading.Event()

    def put(item: T | _End) -> None:
        while not is_closed.is_set():
            try:
                made.put(item, timeout=PATIENCE_S)
                return
            except Full:
                continue

    def run() -> None:
        error: BaseException | None = None
        try:
            for item in source:
                put(item)
                if is_closed.is_set():
                    break
        except BaseException as found:
            error = found
        finally:
            source.close()
        put(_End(error))

    thread = threading.Thread(target=run, name="ahead", daemon=True)
    thread.start()
    try:
        while True:
            try:
                item = made.get(timeout=PATIENCE_S)
            except Empty:
                if thread.is_alive() or not made.empty():
                    continue
                raise RuntimeError("The thread that reads ahead is gone.") from None
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        is_closed.set()
        thread.join()
