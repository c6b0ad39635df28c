"""Fitted Q evaluation: the values of a given policy, learned from the decisions of others.

It is the constrained learner (`cloudsched.models.constrained`) with the next action given instead
of chosen, and no pessimism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cloudsched.config import Settings
from cloudsched.datasets.schema import OBSERVATION
from cloudsched.datasets.transitions import COLUMNS, NEXT, TransitionReader
from cloudsched.models.constrained import ConstrainedConfig, ConstrainedModel
from cloudsched.models.constrained_learner import ConstrainedLearner
from cloudsched.models.constrained_loss import loss_means
from cloudsched.models.prepared import NEXT_ACTION
from cloudsched.policy import Policy

MIXED_PIECES = 4  # row groups that are shuffled together


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Settings):
    """How long a policy is evaluated."""

    num_steps: int = 800
    """Gradient steps."""
    report_every: int = 100
    """Gradient steps between two reports."""
    seed: int = 0
    """Seed of weights and order."""

    def __post_init__(self) -> None:
        for name in ("num_steps", "report_every"):
            self._integer(name, low=1)
        self._integer("seed", low=0)


class FittedCritic:
    """Values of a policy; see `cloudsched.ope.trajectories.Critic`."""

    def __init__(self, model: ConstrainedModel, config: ConstrainedConfig) -> None:
        self._model = model
        self._config = config

    @torch.inference_mode()
    def values(
        self, observation: Mapping[str, NDArray[Any]], actions: NDArray[Any]
    ) -> NDArray[np.float64]:
        """Return (B, 2) values of taking the actions and following the policy afterwards."""
        tensors = {name: torch.from_numpy(observation[name].copy()) for name in OBSERVATION}
        taken_B = torch.from_numpy(actions.astype(np.int64))
        return self._model.values(tensors, taken_B, self._config).double().numpy()


def fit_critic(
    model: ConstrainedModel,
    reader: TransitionReader,
    policy: Policy,
    config: ConstrainedConfig,
    run: EvaluationConfig,
    report: Callable[[dict[str, float]], None],
) -> FittedCritic:
    """Fit a model, changed in place, to a policy's values."""
    learner = ConstrainedLearner(model, config, num_steps=run.num_steps)
    losses = []
    while learner.step_count < run.num_steps:
        for batch in _batches(reader, config.batch_size, run.seed + learner.step_count):
            observation = {name: batch[NEXT + name] for name in OBSERVATION}
            policy.reset(len(batch["action"]))
            batch[NEXT_ACTION] = policy.act(observation).copy()
            losses.append(learner.step({k: torch.from_numpy(v) for k, v in batch.items()}))
            if learner.step_count % run.report_every == 0 or learner.step_count == run.num_steps:
                report({"step": float(learner.step_count), **loss_means(losses)})
                losses.clear()
            if learner.step_count == run.num_steps:
                break
    model.eval()
    return FittedCritic(model, config)


def _batches(reader: TransitionReader, size: int, seed: int) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield shuffled batches of one pass over the data, a few row groups in memory at a time."""
    generator = np.random.default_rng(seed)
    pieces = reader.pieces()
    for first in range(0, len(pieces), MIXED_PIECES):
        parts = [reader.read(p["file"], p["group"]) for p in pieces[first : first + MIXED_PIECES]]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
        order = generator.permutation(len(columns["action"]))
        for start in range(0, max(1, len(order) - size + 1), size):
            rows = order[start : start + size]
            if len(rows):
                yield {name: values[rows] for name, values in columns.items()}
