"""What a job on a server would change, for kernels: `pairs.pair_features` of one pair.

Numba's cache does not notice changes in another file: after one here, remove what it keeps of the
kernels that call these.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array = NDArray[np.float32]


@njit(cache=True, nogil=True, error_model="numpy")
def write_added_power(
    servers: Array,
    jobs: Array,
    mask: NDArray[np.int8],
    num_resources: int,
    first_pair: NDArray[np.int64],
    out_added_w: Array,
) -> None:
    """Write the watts that the legal placements of B rows would add, server by server.

    Args:
        first_pair: (B,) where those of a row begin.
        out_added_w: overwritten.
    """
    num_rows, num_servers, _ = servers.shape
    for b in range(num_rows):
        at = first_pair[b]
        for n in range(num_servers):
            is_first = True
            exponent = load = curve = np.float32(0.0)
            for k in range(jobs.shape[1]):
                if mask[b, k * num_servers + n] == 0:
                    continue
                server = servers[b, n]
                if is_first:
                    exponent = power_exponent(server, num_resources)
                    load = cpu_load(server, num_resources)
                    curve = load**exponent
                    is_first = False
                out_added_w[at] = added_power(
                    server, jobs[b, k], num_resources, exponent, load, curve
                )
                at += 1


@njit(inline="always")
def power_exponent(server, num_resources):  # type: ignore[no-untyped-def]
    """Return the exponent of a server's power curve."""
    watts = 2 * num_resources
    idle_w, max_w, half_w = server[watts], server[watts + 1], server[watts + 2]
    ratio = max(max_w - idle_w, np.float32(1e-6)) / max(half_w - idle_w, np.float32(1e-6))
    return min(max(np.float32(math.log2(ratio)), np.float32(0.1)), np.float32(8.0))


@njit(inline="always")
def cpu_load(server, num_resources):  # type: ignore[no-untyped-def]
    """Return the share of a server's CPU that is in use."""
    one, zero = np.float32(1.0), np.float32(0.0)
    return min(max(one - server[0] / server[num_resources], zero), one)


@njit(inline="always")
def added_power(server, job, num_resources, exponent, load, curve):  # type: ignore[no-untyped-def]
    """Return the watts that a job would add; nearly all that the features of a pair cost.

    Args:
        curve: the load to the power of the exponent.
    """
    watts = 2 * num_resources
    load_after = _load_after(server, job, num_resources, load)
    span_w = max(server[watts + 1] - server[watts], np.float32(1e-6))
    return span_w * (load_after**exponent - curve)


@njit(inline="always")
def write_pair_features(server, job, num_resources, load, added_w, out):  # type: ignore[no-untyped-def]
    """Write the eight features."""
    one, zero = np.float32(1.0), np.float32(0.0)
    least = np.float32(np.inf)
    total = zero
    for r in range(num_resources):
        leftover = server[r] - job[r]
        least = min(least, leftover)
        total += leftover
    watts = 2 * num_resources
    duration = _unsquash(job[num_resources])
    last_end = _unsquash(server[watts + 9])
    out[0] = least
    out[1] = total / np.float32(num_resources)
    out[2] = load
    out[3] = _load_after(server, job, num_resources, load)
    out[4] = added_w
    out[5] = added_w * duration
    out[6] = server[watts] * max(duration - last_end, zero)
    out[7] = one if server[watts + 7] == zero else zero


@njit(inline="always")
def _load_after(server, job, num_resources, load):  # type: ignore[no-untyped-def]
    one, zero = np.float32(1.0), np.float32(0.0)
    return min(max(load + job[0] / server[num_resources], zero), one)


@njit(inline="always")
def _unsquash(value):  # type: ignore[no-untyped-def]
    one = np.float32(1.0)
    return min(value / max(one - value, np.float32(1.0 / 11.0)), np.float32(10.0))
