"""Numbers that follow the site: what arrives, how unevenly, and how long waking takes.

The numbers that suit a calm site waste power at another or miss its deadlines. Where a rule has
`sites`, it recognises from a few signals that every observation holds which kind of site it is at,
and takes the numbers found for that kind; where it has `answers`, each of its numbers moves with
those signals. Where it has a `jam`, other numbers hold while jobs queue and no server sleeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cloudsched.envs.observation import Columns
from cloudsched.errors import ConfigError
from cloudsched.heuristics.parameters import (
    NUM_TERMS,
    PARAMETER_DTYPE,
    RANGES,
    SIGNALS,
    HeuristicConfig,
    parameter_records,
)

FloatArray = NDArray[np.float64]

NUM_SIGNALS = len(SIGNALS)
DELAY_SIGNAL = (3.0, 2.0)  # wake delay in ticks that is zero, and ticks that are one
NUMBERS = tuple(RANGES)
_FIELDS = np.array([(PARAMETER_DTYPE.names or ()).index(name) for name in NUMBERS])
ROUNDING = 1e-4  # of what is seen, which is float32
_JAM_QUEUE = (PARAMETER_DTYPE.names or ()).index("jam_queue")
_LOW, _HIGH = np.array(list(RANGES.values())).T.copy()


class RuleNumbers:
    """The records that the kernel reads: fixed, or moved by what each cluster observes.

    Args:
        configs: one for all clusters, or one for each; all recognise equally many kinds of site.
    """

    def __init__(self, configs: Sequence[HeuristicConfig], columns: Columns) -> None:
        self.fixed = parameter_records(configs)
        self._columns = columns
        self._is_moving = any(config.answers or config.sites for config in configs)
        self._has_jam = any(config.jam for config in configs)
        self._jam = np.stack([_jam_table(config) for config in configs])
        self._in_jam = self.fixed[:0]
        if len({len(config.recogniser) for config in configs}) > 1:
            raise ConfigError("Heuristics that run together must recognise equally many sites.")
        if self._is_moving:
            self._answers = np.stack([answers_table(config) for config in configs])
            sites = np.stack([_sites_table(config) for config in configs])
            own = _as_matrix(self.fixed)[:, _FIELDS]
            self._apart = sites - own[:, None]
            recognisers = [np.array(c.recogniser).reshape(-1, NUM_TERMS) for c in configs]
            self._recognisers = np.stack(recognisers).transpose(0, 2, 1).copy()
            self._limits = _limits(own, sites)
            num_sites = self._recognisers.shape[2]
            self._scratch = np.zeros(NUM_TERMS), np.zeros(num_sites), np.zeros(len(NUMBERS))
            self._forget(len(configs))

    def __call__(self, observation: Mapping[str, NDArray[Any]]) -> NDArray[np.void]:
        """Return one record for all clusters or one for each; overwritten by the next call."""
        numbers = self._move(observation) if self._is_moving else self.fixed
        if not self._has_jam:
            return numbers
        if len(self._in_jam) != len(observation["context"]):
            self._in_jam = np.broadcast_to(self.fixed, len(observation["context"])).copy()
        change_in_jams(
            self._columns,
            observation["context"],
            _as_matrix(numbers),
            self._jam,
            _FIELDS,
            _JAM_QUEUE,
            _as_matrix(self._in_jam),
        )
        return self._in_jam

    def _move(self, observation: Mapping[str, NDArray[Any]]) -> NDArray[np.void]:
        """Return the numbers at each cluster's site."""
        context, num_clusters = observation["context"], len(observation["context"])
        if len(self._moved) != num_clusters:
            self._forget(num_clusters)
        move_numbers(
            self._columns,
            _as_matrix(self.fixed),
            self._answers,
            self._apart,
            self._recognisers,
            context,
            observation["servers"].shape[1],
            _FIELDS,
            *self._limits,
            *self._scratch,
            self._seen,
            _as_matrix(self._moved),
        )
        return self._moved

    def _forget(self, num_clusters: int) -> None:
        self._moved = np.broadcast_to(self.fixed, num_clusters).copy()
        self._seen = np.full((num_clusters, NUM_SIGNALS), np.nan)


def answers_table(config: HeuristicConfig) -> FloatArray:
    """Return (numbers, signals) the weights, zero where a number stays."""
    none = (0.0,) * len(SIGNALS)
    return np.array([config.answers.get(name, none) for name in NUMBERS])


def _jam_table(config: HeuristicConfig) -> FloatArray:
    """Return (numbers,) what they are in a jam, not a number where they stay."""
    return np.array([config.jam.get(name, np.nan) for name in NUMBERS])


def terms_of(context: NDArray[np.float32], at: Columns, num_servers: int) -> FloatArray:
    """Return (B, terms) what sites are recognised by in each observation."""
    terms = np.zeros((len(context), NUM_TERMS))
    read_terms(at, context, num_servers, terms)
    return terms


def _sites_table(config: HeuristicConfig) -> FloatArray:
    """Return (sites, numbers) what each number is at each kind of site."""
    values = [
        config.sites.get(name, (getattr(config, name),) * len(config.recogniser))
        for name in NUMBERS
    ]
    return np.array(values).T.copy()


def _limits(own: FloatArray, sites: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return (1 or E, numbers) least and most: the range, and all that the rule has by itself.

    Args:
        own: (1 or E, numbers) the rule's, and `sites` (1 or E, sites, numbers) those by site.
    """
    given = np.concatenate([own[:, None], sites], axis=1)
    return np.minimum(_LOW, given.min(axis=1)), np.maximum(_HIGH, given.max(axis=1))


def _as_matrix(records: NDArray[np.void]) -> FloatArray:
    """Return the records' numbers as (records, fields); every field has eight bytes."""
    return records.view(np.float64).reshape(len(records), -1)


@njit(cache=True, nogil=True, error_model="numpy")
def move_numbers(
    at: Columns,
    fixed: FloatArray,
    answers: FloatArray,
    apart: FloatArray,
    recognisers: FloatArray,
    context: NDArray[np.float32],
    num_servers: int,
    fields: NDArray[np.int64],
    low: FloatArray,
    high: FloatArray,
    terms: FloatArray,
    odds: FloatArray,
    values: FloatArray,
    seen: FloatArray,
    out_numbers: FloatArray,
) -> None:
    """Write the numbers that each cluster's signals ask for.

    Most decisions of a tick see the same signals, and the numbers found before are left as they
    are. Inner loops go over what lies side by side, so that they are vectorised without a change in
    the order of any sum.

    Args:
        fixed: (1 or E, fields) the rule's own.
        answers: (1 or E, numbers, signals).
        apart: (1 or E, sites, numbers) what each site's are beyond the rule's own; no sites where
            those hold everywhere.
        recognisers: (1 or E, terms, sites).
        fields: (numbers,) where each number stands among the fields.
        low: (1 or E, numbers) least values; `high` alike.
        terms: (terms,) overwritten; `odds` (sites,) and `values` (numbers,) alike.
        seen: (E, signals) those that `out_numbers` stand for; updated.
        out_numbers: (E, fields) those numbers are overwritten.
    """
    num_numbers, num_signals = answers.shape[1], answers.shape[2]
    for e in range(context.shape[0]):
        own = e if fixed.shape[0] > 1 else 0
        read_signals(at, context[e], num_servers, terms[1 : 1 + NUM_SIGNALS])
        is_new = False
        for s in range(num_signals):
            is_new = is_new or seen[e, s] != terms[1 + s]
            seen[e, s] = terms[1 + s]
        if not is_new:
            continue
        multiply_signals(terms)
        recognise(recognisers[own], terms, odds)
        for i in range(num_numbers):
            values[i] = fixed[own, fields[i]]
        for c in range(odds.shape[0]):
            for i in range(num_numbers):
                values[i] += odds[c] * apart[own, c, i]
        for i in range(num_numbers):
            for s in range(num_signals):
                values[i] += answers[own, i, s] * terms[1 + s]
            out_numbers[e, fields[i]] = min(max(values[i], low[own, i]), high[own, i])


@njit(cache=True, nogil=True, error_model="numpy")
def change_in_jams(at, context, numbers, jam, fields, jam_queue, out_numbers):  # type: ignore[no-untyped-def]
    """Write the numbers of each cluster, with those of the jam where there is one.

    A queue alone is none: with servers asleep, waking them helps more than another order does.

    Args:
        context: (E, context features).
        numbers: (1 or E, fields) without a jam; `jam` (1 or E, numbers) in one.
        fields: (numbers,) where each number stands among the fields.
        jam_queue: the field with the jobs for each server from which on there is a jam.
        out_numbers: (E, fields) overwritten.
    """
    for e in range(context.shape[0]):
        own = e if numbers.shape[0] > 1 else 0
        out_numbers[e] = numbers[own]
        is_long = _unsquash(context[e, 0]) >= numbers[own, jam_queue] - ROUNDING
        if is_long and context[e, at.awake] >= 1.0 - ROUNDING:
            row = jam[e if jam.shape[0] > 1 else 0]
            for i in range(fields.shape[0]):
                if not math.isnan(row[i]):
                    out_numbers[e, fields[i]] = row[i]


@njit(cache=True, nogil=True, error_model="numpy")
def read_signals(at, row, num_servers, out_signals):  # type: ignore[no-untyped-def]
    """Write the signals of one cluster.

    Args:
        row: (context features,).
        out_signals: (signals,) overwritten.
    """
    load = _unsquash(row[at.work_rate + 2])
    spread = _unsquash(row[at.work_rms])
    jobs = num_servers * _unsquash(row[at.work_rate - 1])
    lately = num_servers * _unsquash(row[at.work_rate - 2])
    work = max(load, 1e-3) * num_servers
    out_signals[0] = (load - 0.5) / 0.3
    out_signals[1] = math.log(max(spread, 1e-3) / max(load, 1e-3)) - 1.0
    out_signals[2] = math.log(work / max(jobs, 1e-3)) - 1.0
    out_signals[3] = (5.0 * _unsquash(row[at.wake_delay]) - DELAY_SIGNAL[0]) / DELAY_SIGNAL[1]
    out_signals[4] = (_unsquash(row[at.work_rate]) - load) / 0.3
    out_signals[5] = row[at.late]
    out_signals[6] = (_unsquash(row[at.work_rate + 1]) - load) / 0.3
    out_signals[7] = math.log(max(lately, 1e-3) / max(jobs, 1e-3))
    out_signals[8] = row[at.work_rate + 3]
    out_signals[9] = row[at.work_rate + 4]
    for s in range(out_signals.shape[0]):
        out_signals[s] = min(max(out_signals[s], -2.0), 2.0)


@njit(cache=True, nogil=True, error_model="numpy")
def read_terms(at, context, num_servers, out_terms):  # type: ignore[no-untyped-def]
    """Write the terms of many clusters.

    Args:
        context: (B, context features).
        out_terms: (B, terms) overwritten.
    """
    for i in range(context.shape[0]):
        read_signals(at, context[i], num_servers, out_terms[i, 1 : 1 + NUM_SIGNALS])
        multiply_signals(out_terms[i])


@njit(cache=True, nogil=True, error_model="numpy")
def multiply_signals(out_terms):  # type: ignore[no-untyped-def]
    """Write one before the signals, and their products two by two behind them.

    Args:
        out_terms: (terms,) with the signals in their places; the rest is overwritten.
    """
    out_terms[0] = 1.0
    place = 1 + NUM_SIGNALS
    for s in range(NUM_SIGNALS):
        for r in range(s + 1):
            out_terms[place] = out_terms[1 + s] * out_terms[1 + r]
            place += 1


@njit(cache=True, nogil=True, error_model="numpy")
def recognise(weights, terms, out_odds):  # type: ignore[no-untyped-def]
    """Write how likely each kind of site is.

    Args:
        weights: (terms, sites).
        out_odds: (sites,) overwritten.
    """
    out_odds[:] = 0.0
    for t in range(terms.shape[0]):
        for c in range(out_odds.shape[0]):
            out_odds[c] += weights[t, c] * terms[t]
    highest = -np.inf
    for c in range(out_odds.shape[0]):
        highest = max(highest, out_odds[c])
    total = 0.0
    for c in range(out_odds.shape[0]):
        out_odds[c] = math.exp(out_odds[c] - highest)
        total += out_odds[c]
    for c in range(out_odds.shape[0]):
        out_odds[c] /= total


@njit(inline="always")
def _unsquash(value):  # type: ignore[no-untyped-def]
    return value / (1.0 - min(value, 0.999999))
