"""Keeps freed memory in the process, for loops that take and free the same blocks for ever."""

from __future__ import annotations

import ctypes
import sys

import torch

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's numbers of the settings
KEPT_BYTES = 512 * 2**20


def keep_freed_memory() -> None:
    """Tell the C library not to give freed blocks back to the kernel at once.

    By default glibc does so with large ones, and a training step takes and frees dozens: thousands
    of page faults an iteration, which then fall to a few dozen. Nor does torch fill new blocks with
    NaN, as it does once RLlib has asked for deterministic algorithms: nothing here reads a block
    before it has written it. Holds for the whole process; the C library is only told on Linux with
    glibc.
    """
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(TRIM_THRESHOLD, KEPT_BYTES)
