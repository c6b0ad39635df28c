"""Numbers that follow the site: what arrives, how unevenly, and how long waking takes.

The numbers that suit a calm site waste power at another or miss its deadlines. Where a rule has
`answers`, each of its numbers moves with a few signals that every observation holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cloudsched.envs.observation import Columns
from cloudsched.heuristics.parameters import (
    PARAMETER_DTYPE,
    RANGES,
    SIGNALS,
    HeuristicConfig,
    parameter_records,
)

FloatArray = NDArray[np.float64]

NUMBERS = tuple(RANGES)
_FIELDS = np.array([(PARAMETER_DTYPE.names or ()).index(name) for name in NUMBERS])
_LOW, _HIGH = np.array(list(RANGES.values())).T.copy()


class RuleNumbers:
    """The records that the kernel reads: fixed, or moved by what each cluster observes.

    Args:
        configs: one for all clusters, or one for each.
    """

    def __init__(self, configs: Sequence[HeuristicConfig], columns: Columns) -> None:
        self.fixed = parameter_records(configs)
        self._columns = columns
        self._answers = None
        if any(config.answers for config in configs):
            self._answers = np.stack([answers_table(config) for config in configs])
            self._moved = self.fixed.copy()
            self._signals = np.zeros(len(SIGNALS))

    def __call__(self, observation: Mapping[str, NDArray[Any]]) -> NDArray[np.void]:
        """Return one record for all clusters or one for each; overwritten by the next call."""
        if self._answers is None:
            return self.fixed
        context, num_clusters = observation["context"], len(observation["context"])
        if len(self._moved) != num_clusters:
            self._moved = np.resize(self.fixed, num_clusters)
        move_numbers(
            self._columns,
            _as_matrix(self.fixed),
            self._answers,
            context,
            observation["servers"].shape[1],
            _FIELDS,
            _LOW,
            _HIGH,
            self._signals,
            _as_matrix(self._moved),
        )
        return self._moved


def answers_table(config: HeuristicConfig) -> FloatArray:
    """Return (numbers, signals) the weights, zero where a number stays."""
    none = (0.0,) * len(SIGNALS)
    return np.array([config.answers.get(name, none) for name in NUMBERS])


def _as_matrix(records: NDArray[np.void]) -> FloatArray:
    """Return the records' numbers as (records, fields); every field has eight bytes."""
    return records.view(np.float64).reshape(len(records), -1)


@njit(cache=True, nogil=True, error_model="numpy")
def move_numbers(
    at: Columns,
    fixed: FloatArray,
    answers: FloatArray,
    context: NDArray[np.float32],
    num_servers: int,
    fields: NDArray[np.int64],
    low: FloatArray,
    high: FloatArray,
    signals: FloatArray,
    out_numbers: FloatArray,
) -> None:
    """Write the numbers that each cluster's signals ask for.

    Args:
        fixed: (1 or E, fields) the rule's own.
        answers: (1 or E, numbers, signals).
        fields: (numbers,) where each number stands among the fields.
        low: (numbers,) least value, if the rule's own is not lower; `high` alike.
        signals: (signals,) overwritten.
        out_numbers: (E, fields) those numbers are overwritten.
    """
    for e in range(context.shape[0]):
        own = e if fixed.shape[0] > 1 else 0
        row = context[e]
        load = _unsquash(row[at.work_rate + 2])
        spread = _unsquash(row[at.work_rms])
        jobs = num_servers * _unsquash(row[at.work_rate - 1])
        work = max(load, 1e-3) * num_servers
        signals[0] = (load - 0.5) / 0.3
        signals[1] = math.log(max(spread, 1e-3) / max(load, 1e-3)) - 1.0
        signals[2] = math.log(work / max(jobs, 1e-3)) - 1.0
        signals[3] = (5.0 * _unsquash(row[at.wake_delay]) - 3.0) / 2.0
        signals[4] = (_unsquash(row[at.work_rate]) - load) / 0.3
        signals[5] = row[at.late]
        for s in range(signals.shape[0]):
            signals[s] = min(max(signals[s], -2.0), 2.0)
        for i in range(fields.shape[0]):
            move = 0.0
            for s in range(signals.shape[0]):
                move += answers[own, i, s] * signals[s]
            value = fixed[own, fields[i]]
            least, most = min(low[i], value), max(high[i], value)
            out_numbers[e, fields[i]] = min(max(value + move, least), most)


@njit(inline="always")
def _unsquash(value):  # type: ignore[no-untyped-def]
    return value / (1.0 - min(value, 0.999999))
