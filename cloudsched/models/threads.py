"""Threads that each compute alone, instead of together on each operation.

Torch shares out every operation, and its threads wait for each other by spinning: many small
operations gain little from it, and lose much where other programs want the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

FEWEST_ROWS = 128
"""Rows of a share; with fewer, handing it to a thread costs more than it spares."""


class Threads:
    """As many threads as torch would use for an operation; the calling one is the first.

    Shares follow from their number alone, so that one machine always gives the same bits.
    """

    def __init__(self) -> None:
        self.count = torch.get_num_threads()
        others = max(1, self.count - 1)
        self._pool = ThreadPoolExecutor(others, "share", initializer=_compute_alone)

    def shares(self, rows_B: Tensor, *, most: int | None = None) -> Sequence[Tensor]:
        """Cut rows into nearly equal shares.

        Args:
            most: shares to cut them into, if not one for each thread.
        """
        most = self.count if most is None else most
        return rows_B.tensor_split(max(1, min(most, len(rows_B) // FEWEST_ROWS)))

    def run(self, do: Callable[[int], T], num_shares: int) -> list[T]:
        """Return what is done with each share, by its number; to be called in `one_thread`."""
        if self.count == 1:
            return [do(number) for number in range(num_shares)]
        others = [self._pool.submit(do, number) for number in range(1, num_shares)]
        try:
            first = do(0)
        finally:
            wait(others)  # nobody works on with what the caller may change
        return [first, *(other.result() for other in others)]


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
