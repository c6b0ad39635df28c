"""Teaches a network how much better each decision is than another, from branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cloudsched.config import Settings
from cloudsched.lookahead.branches import Branches

LARGEST_GAIN = 20.0
"""In units of their spread. Rare disasters are what servers in reserve are for: a loss that made
little of them, or a cut much below this, would teach to put those to sleep."""
WARM_UP = 200  # steps
LARGEST_GRADIENT = 50.0


@dataclass(frozen=True, kw_only=True)
class FittingConfig(Settings):
    """How a network learns from branches."""

    num_epochs: int = 3
    """Passes over the branches."""
    minibatch_size: int = 128
    """States of one gradient step."""
    first_rate: float = 2e-3
    """AdamW's learning rate at first; it falls to zero in each round."""
    later_rate: float = 1e-3
    """The same for a network that begins with what an earlier command taught it."""
    weight_decay: float = 1e-4
    """AdamW's."""
    held_out: float = 0.05
    """Share of the states that only tell how well it is known."""

    def __post_init__(self) -> None:
        for name in ("num_epochs", "minibatch_size"):
            self._integer(name, low=1)
        for name in ("first_rate", "later_rate", "weight_decay"):
            self._number(name, low=0.0)
        self._number("held_out", low=0.001, high=0.5)


class Lessons(NamedTuple):
    """Branches of one or more rounds, as the network learns them."""

    observation: dict[str, Tensor]  # (S, ...) each
    decided: Tensor  # (S,)
    others: Tensor  # (S, A)
    gain: Tensor  # (S, A)

    @classmethod
    def of(cls, batches: Sequence[Branches], gains: Sequence[NDArray[np.float32]]) -> Lessons:
        """Join batches and what their other decisions gained."""

        def joined(parts: Sequence[NDArray]) -> Tensor:  # type: ignore[type-arg]
            return torch.from_numpy(np.concatenate(parts))

        names = batches[0].observation
        return cls(
            observation={n: joined([batch.observation[n] for batch in batches]) for n in names},
            decided=joined([batch.decided for batch in batches]),
            others=joined([batch.others for batch in batches]),
            gain=joined(gains).clamp(-LARGEST_GAIN, LARGEST_GAIN),
        )

    def rows(self, index: Tensor) -> Lessons:
        """Return some of the states."""
        observation = {name: part[index] for name, part in self.observation.items()}
        return Lessons(observation, self.decided[index], self.others[index], self.gain[index])


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How well a network knows what other decisions gain, on states that it did not learn from."""

    explained: float
    """Share of the gains' square that it foresees; chance is the rest."""
    share_better: float
    """Share of other decisions that it holds better than the policy's own."""
    gain_foreseen: float
    """What it takes those to gain, on average, in units of the spread."""
    gain_found: float
    """What they did gain."""


def fit(
    network: nn.Module,
    lessons: Lessons,
    config: FittingConfig,
    *,
    rate: float,
    seed: int,
    report: Callable[[float], None],
) -> Fit:
    """Train a network so that differences of its scores are gains.

    Args:
        network: from observations to masked scores (B, A), and values that are not used.
        rate: learning rate at the start.
        report: called now and then with the share that is done.
    """
    draws = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(lessons.decided), generator=draws)
    num_held = max(1, round(config.held_out * len(order)))
    held, learned = lessons.rows(order[:num_held]), order[num_held:]
    num_steps = config.num_epochs * max(1, len(learned) // config.minibatch_size)
    optimizer = torch.optim.AdamW(network.parameters(), rate, weight_decay=config.weight_decay)
    warm_up = min(WARM_UP, num_steps / 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm_up) * (1.0 - step / num_steps)
    )
    done = 0
    for _ in range(config.num_epochs):
        shuffled = learned[torch.randperm(len(learned), generator=draws)]
        for rows in torch.split(shuffled, config.minibatch_size):
            if len(rows) < config.minibatch_size and done > 0:
                continue  # a small last batch counts as much as a whole one
            part = lessons.rows(rows)
            loss = 0.5 * (foreseen(network, part) - part.gain).square().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network.parameters(), LARGEST_GRADIENT)
            optimizer.step()
            schedule.step()
            done += 1
            if done % 100 == 0:
                report(done / num_steps)
    return _judged(network, held)


def foreseen(network: nn.Module, lessons: Lessons) -> Tensor:
    """Return (S, A) how much better than the policy's own the network takes others to be."""
    scores_SA, _ = network(lessons.observation)
    own_S1 = scores_SA.gather(1, lessons.decided[:, None])
    difference: Tensor = scores_SA.gather(1, lessons.others) - own_S1
    return difference


@torch.no_grad()
def _judged(network: nn.Module, held: Lessons) -> Fit:
    parts = torch.split(torch.arange(len(held.decided)), 4096)
    guess_SA = torch.cat([foreseen(network, held.rows(rows)) for rows in parts])
    is_better = guess_SA > 0.0
    count = is_better.sum().clamp(min=1)
    missed = (guess_SA - held.gain).square().sum() / held.gain.square().sum().clamp(min=1e-9)
    return Fit(
        explained=1.0 - float(missed),
        share_better=float(is_better.float().mean()),
        gain_foreseen=float((guess_SA * is_better).sum() / count),
        gain_found=float((held.gain * is_better).sum() / count),
    )
