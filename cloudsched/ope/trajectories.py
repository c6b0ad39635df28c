"""Logged episodes as a policy under evaluation sees them: what it would have done, and the odds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numba import njit
from numpy.typing import NDArray

from cloudsched.datasets.manifest import Manifest, open_part
from cloudsched.datasets.schema import OBSERVATION, Arrays, to_arrays
from cloudsched.datasets.transitions import power_reward
from cloudsched.policy import Policy

Floats = NDArray[np.float64]


class Critic(Protocol):
    """Values of a policy, for reward and cost."""

    def values(self, observation: Mapping[str, NDArray[Any]], actions: NDArray[Any]) -> Floats:
        """Return (B, 2) values of taking the actions and following the policy afterwards."""


@dataclass(frozen=True)
class Ticks:
    """Ticks of whole episodes; G episodes of T ticks each, padded with zeros at the end.

    Rewards and costs are on the scale of values: times `1 - gamma`.
    """

    outcome_GT2: Floats
    """Reward and cost of a tick."""
    ratio_GT: Floats
    """How much likelier the policy was to decide as it was done, over the decisions of a tick."""
    residual_GT2: Floats
    """What a tick brought beyond the critic's expectation, weighted within the tick."""
    value_GT2: Floats
    """The critic's values of the first observation of a tick."""
    is_tick_GT: NDArray[np.bool_]
    """Where there is a tick."""
    episode_G: NDArray[np.int64]


def read_ticks(
    folder: Path,
    manifest: Manifest,
    policy: Policy,
    critic: Critic,
    *,
    gamma: float,
    max_ticks: int,
) -> Ticks:
    """Read a dataset, tick by tick, up to `max_ticks` of each episode.

    The policy decides from the observation alone; one that remembers is evaluated as if each
    observation were its first.
    """
    num_ticks = min(max_ticks, manifest.scenario.config.episode_ticks)
    shape = (manifest.num_episodes, num_ticks)
    outcome, residual, value = (np.zeros((*shape, 2)) for _ in range(3))
    ratio, is_tick = np.ones(shape), np.zeros(shape, np.bool_)
    tick = np.zeros(manifest.num_episodes, np.int64)  # of each episode, so far
    running = np.ones(manifest.num_episodes)  # product of ratios within its tick
    for rows in _row_groups(folder, manifest):
        is_early = tick[rows["episode"]] < num_ticks
        if not is_early.any():
            continue
        rows = {name: values[is_early] for name, values in rows.items()}
        view = _View(rows, manifest, policy, critic, gamma)
        gather_ticks(
            view.episode,
            view.elapsed,
            view.ratio,
            view.outcome,
            view.residual,
            view.own_values,
            tick,
            running,
            outcome,
            ratio,
            residual,
            value,
            is_tick,
        )
    return Ticks(outcome, ratio, residual, value, is_tick, np.arange(manifest.num_episodes))


class _View:
    """The rows of a row group with the policy's answers beside them."""

    def __init__(
        self, rows: Arrays, manifest: Manifest, policy: Policy, critic: Critic, gamma: float
    ) -> None:
        observation = {name: np.ascontiguousarray(rows[name]) for name in OBSERVATION}
        count = len(rows["action"])
        policy.reset(count)
        answer = policy.act(observation).copy()
        is_same = answer == rows["action"]
        self.episode, self.step = rows["episode"], rows["step"]
        self.elapsed = rows["elapsed_ticks"]
        self.ratio = is_same / rows["behaviour_probability"].astype(np.float64)
        config = manifest.scenario.config
        scale = 1.0 - gamma
        reward = power_reward(rows, config, is_excess=False).astype(np.float64)
        cost = rows["cost"] / manifest.arrivals_per_tick
        self.outcome = scale * np.stack([reward, cost], axis=1)
        self.own_values = critic.values(observation, answer)
        taken = critic.values(observation, rows["action"].astype(np.int64))
        following = np.concatenate([self.own_values[1:], self.own_values[-1:]])
        discount = gamma ** self.elapsed.astype(np.float64)
        discount[np.asarray(rows["terminated"], np.bool_)] = 0.0
        self.residual = self.outcome + discount[:, None] * following - taken
        has_next = np.asarray(rows["terminated"], np.bool_).copy()
        has_next[:-1] |= (self.episode[1:] == self.episode[:-1]) & (np.diff(self.step) == 1)
        self.residual[~has_next] = 0.0  # unknown: the next observation is not in this row group


def _row_groups(folder: Path, manifest: Manifest) -> Iterator[Arrays]:
    for name in manifest.files:
        with open_part(folder, name, manifest) as file:
            for group in range(file.num_row_groups):
                yield to_arrays(file.read_row_group(group))


@njit(cache=True, nogil=True, error_model="numpy")
def gather_ticks(
    episode: NDArray[np.int64],
    elapsed: NDArray[np.int32],
    row_ratio: Floats,
    row_outcome: Floats,
    row_residual: Floats,
    row_value: Floats,
    tick: NDArray[np.int64],
    running: Floats,
    out_outcome: Floats,
    out_ratio: Floats,
    out_residual: Floats,
    out_value: Floats,
    out_is_tick: NDArray[np.bool_],
) -> None:
    """Add rows, in the order of the contract, to the ticks of their episodes.

    Args:
        tick: (G,) where each episode is; updated.
        running: (G,) product of the ratios of its tick so far; updated.
    """
    num_ticks = out_ratio.shape[1]
    for i in range(len(episode)):
        e = episode[i]
        t = tick[e]
        if t < num_ticks:
            running[e] *= row_ratio[i]
            out_ratio[e, t] = running[e]
            if not out_is_tick[e, t]:
                out_is_tick[e, t] = True
                out_value[e, t] = row_value[i]
            for k in range(2):
                out_outcome[e, t, k] += row_outcome[i, k]
                out_residual[e, t, k] += running[e] * row_residual[i, k]
        if elapsed[i] > 0:
            tick[e] += elapsed[i]
            running[e] = 1.0
