"""Threads that each compute alone, instead of together on each operation.

Torch shares out every operation, and its threads wait for each other by spinning: many small
operations gain little from it, and lose much where other programs want the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

FEWEST_ROWS = 128
"""Rows of a share; with fewer, handing it to a thread costs more than it spares."""


class Threads:
    """As many threads as torch would use for an operation.

    Shares follow from their number alone, so that one machine always gives the same bits.
    """

    def __init__(self) -> None:
        self.count = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self.count, "share", initializer=_compute_alone)

    def shares(self, rows_B: Tensor) -> Sequence[Tensor]:
        """Cut rows into nearly equal shares."""
        return rows_B.tensor_split(max(1, min(self.count, len(rows_B) // FEWEST_ROWS)))

    def run(self, do: Callable[[int], T], num_shares: int) -> list[T]:
        """Return what is done with each share, by its number; to be called in `one_thread`."""
        if num_shares == 1:
            return [do(0)]
        return list(self._pool.map(do, range(num_shares)))


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch's operations be done by the calling thread alone."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _compute_alone() -> None:
    torch.set_num_threads(1)
    torch.zeros(1).add_(1.0)  # a thread's first operation takes over the number that holds then
