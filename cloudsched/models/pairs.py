"""What a job on a server would change: the features of a placement, from the observation alone."""

from __future__ import annotations

import torch
from torch import Tensor

TIME_SCALE = 30.0  # ticks; as in the observation, whose squashed times are undone here
NUM_PAIR_FEATURES = 8


def pair_features(server_MF: Tensor, job_MF: Tensor, num_resources: int) -> Tensor:
    """Return (M, 8) features of jobs on the servers that they fit on.

    They are: least and mean capacity left over, load before and after, added power, added energy,
    the idle energy for which the job keeps its server up longer, and whether the server is idle.
    """
    free, capacity = server_MF[:, :num_resources], server_MF[:, num_resources : 2 * num_resources]
    leftover = free - job_MF[:, :num_resources]
    watts = 2 * num_resources
    idle_w, max_w, half_w = (server_MF[:, watts + i] for i in range(3))
    load = (1.0 - free[:, 0] / capacity[:, 0]).clamp(0.0, 1.0)
    load_after = (load + job_MF[:, 0] / capacity[:, 0]).clamp(0.0, 1.0)
    # A power curve idle + (max - idle) * load ** exponent has this exponent, given its middle.
    span_w = (max_w - idle_w).clamp(min=1e-6)
    exponent = torch.log2(span_w / (half_w - idle_w).clamp(min=1e-6)).clamp(0.1, 8.0)
    added_w = span_w * (load_after**exponent - load**exponent)
    duration = _unsquash(job_MF[:, num_resources])
    last_end = _unsquash(server_MF[:, watts + 9])
    extension = idle_w * (duration - last_end).clamp(min=0.0)
    return torch.stack(
        [
            leftover.amin(dim=1),
            leftover.mean(dim=1),
            load,
            load_after,
            added_w,
            added_w * duration,
            extension,
            (server_MF[:, watts + 7] == 0.0).to(server_MF.dtype),
        ],
        dim=1,
    )


def _unsquash(value_M: Tensor) -> Tensor:
    """Return the time behind x / (x + 30), in units of 30 ticks and at most 10 of them."""
    return (value_M / (1.0 - value_M).clamp(min=1.0 / 11.0)).clamp(max=10.0)
