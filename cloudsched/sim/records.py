"""Record arrays that compiled and plain-Python kernels both read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def records(shape: int | tuple[int, ...], dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """Allocate zeroed records whose fields kernels reach as attributes.

    Compiled kernels do that on plain structured arrays, which are cheaper to pass; as plain Python
    (NUMBA_DISABLE_JIT=1) they need `recarray`.
    """
    import numba  # late: half a second that listing names and reading traces need not wait for

    array = np.zeros(shape, dtype)
    return array.view(np.recarray) if numba.config.DISABLE_JIT else array  # type: ignore[attr-defined]
