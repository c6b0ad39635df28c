"""What a policy sees: the features into which the simulator's kernels encode a cluster's state.

All features are float32 in [-1, 1]; nothing reveals the future. R is the number of resources,
`squash(x, s)` is x / (x + s), and `largest` is the largest value in the fleet.

| `servers` (N, 2R + 12)      |                                                              |
|-----------------------------|--------------------------------------------------------------|
| 0 .. R                      | free capacity / largest capacity                             |
| R .. 2R                     | capacity / largest capacity                                  |
| 2R, 2R+1, 2R+2              | watts idle, at full load, at half load / largest full load   |
| 2R+3, 2R+4, 2R+5            | is active, is waking, is asleep                              |
| 2R+6                        | ticks until awake, squash 5                                  |
| 2R+7                        | running jobs, squash 8                                       |
| 2R+8, 2R+9                  | ticks to the next and to the last completion, squash 30      |
| 2R+10                       | ticks active without a job, squash 30                        |
| 2R+11                       | CPU given back within 5 ticks / largest capacity             |

| `jobs` (K, R + 4)           | all zero where the slot is empty                             |
|-----------------------------|--------------------------------------------------------------|
| 0 .. R                      | demand / largest capacity                                    |
| R, R+1, R+2                 | duration, wait, laxity (signed), squash 30                   |
| R+3                         | 1: there is a job                                            |

| `context` (R + 15,)         |                                                              |
|-----------------------------|--------------------------------------------------------------|
| 0                           | queue length, squash N                                       |
| 1 .. R+1                    | queued demand / fleet capacity, squash 1                     |
| R+1, R+2, R+3               | jobs arriving a tick over 5, 30, 200 ticks, squash N         |
| R+4, R+5, R+6               | CPU work arriving a tick / fleet CPU, same horizons, squash 1|
| R+7, R+8                    | sine and cosine of the time of day                           |
| R+9                         | share of servers awake                                       |
| R+10                        | power / power of the fleet at full load                      |
| R+11                        | decisions taken in this tick / decisions allowed             |
| R+12                        | wake delay of the episode in ticks, squash 5                 |
| R+13                        | late jobs queued, squash N                                   |
| R+14                        | root mean square, over 200 ticks, of the CPU work arriving   |
|                             | a tick / fleet CPU, squash 1                                 |
"""

from __future__ import annotations

from typing import NamedTuple

from cloudsched.sim.state import TIME_SCALE, feature_shapes

__all__ = ["ENCODER_VERSION", "TIME_SCALE", "Columns", "columns", "feature_shapes"]

ENCODER_VERSION = 2


class Columns(NamedTuple):
    """Where some features stand, for those who read them by name."""

    is_active: int
    is_waking: int
    is_asleep: int
    wake_left: int
    last_end: int
    idle_ticks: int
    releasing: int
    duration: int
    wait: int
    laxity: int
    queued: int
    work_rate: int
    awake: int
    wake_delay: int
    late: int
    work_rms: int


def columns(num_resources: int) -> Columns:
    """Return the columns for R resources."""
    servers, context = 2 * num_resources, num_resources + 1
    return Columns(
        is_active=servers + 3,
        is_waking=servers + 4,
        is_asleep=servers + 5,
        wake_left=servers + 6,
        last_end=servers + 9,
        idle_ticks=servers + 10,
        releasing=servers + 11,
        duration=num_resources,
        wait=num_resources + 1,
        laxity=num_resources + 2,
        queued=1,
        work_rate=context + 3,
        awake=context + 8,
        wake_delay=context + 11,
        late=context + 12,
        work_rms=context + 13,
    )
