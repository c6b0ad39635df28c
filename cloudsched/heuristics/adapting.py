"""Learns how a rule's numbers follow the site, by evolution on whole episodes.

Every generation faces new arrivals from the training range, the same for all its candidates, and a
candidate counts by how much better it does than the rule it started from, episode by episode and in
proportion: sites with a hundred times the cost of others count no more than those. Gradients of
single decisions are of little use here, because a server too few shows only many decisions later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cma
import numpy as np
from numpy.typing import NDArray

from cloudsched.envs.cluster import FRESH_SEEDS
from cloudsched.envs.scenario import Scenario
from cloudsched.heuristics.adaptive import answers_table
from cloudsched.heuristics.parameters import RANGES, SIGNALS, HeuristicConfig
from cloudsched.heuristics.tuning import Scorer, TuningProgress, free_parameters, plain_policy

ANSWERING = (
    *("headroom_constant", "headroom_root", "headroom_queued", "headroom_urgent", "headroom_rate"),
    *("headroom_release", "hysteresis", "min_idle_ticks", "idle_bias", "hold_laxity"),
)
"""What may follow the site: how much stays awake, for how long, and how long jobs are held."""
MOST = 0.5
"""Share of its range that a number may move for one signal."""


def adapt_heuristic(
    start: HeuristicConfig,
    scenario: Scenario,
    *,
    evaluations: int,
    population: int,
    num_seeds: int,
    step: float,
    seed: int,
    report: Callable[[TuningProgress], None],
) -> HeuristicConfig:
    """Search for numbers and answers that beat the rule they start from, and return them.

    Args:
        start: a headroom controller, tuned on the same scenario.
        evaluations: candidates to try.
        num_seeds: episodes of each candidate, other ones in each generation.
        step: how far the first candidates lie from the start, as a share of each range.
        report: called after each generation with the gain in proportion, of the best and of the
            median candidate; may raise KeyboardInterrupt to end the search.
    """
    names = free_parameters(start, is_whole=True)
    generator = np.random.default_rng(seed)
    score = Scorer([scenario], [0], plain_policy)
    search = cma.CMAEvolutionStrategy(
        _point(start, names),
        step,
        {
            "bounds": [0.0, 1.0],
            "popsize": population,
            "seed": seed + 1,
            "verbose": -9,
            "CMA_diagonal": True,  # too many numbers for a full covariance in so few candidates
        },
    )
    done = 0
    try:
        while done < evaluations:
            score.face(generator.integers(FRESH_SEEDS, size=num_seeds).tolist())
            points = search.ask()
            returns = score([start, *(_config(start, names, np.asarray(p)) for p in points)])[0]
            gains = ((returns[1:] - returns[0]) / np.abs(returns[0])).mean(axis=1)
            search.tell(points, (-gains).tolist())
            done += len(points)
            report(
                TuningProgress(
                    evaluations=done,
                    best_return=float(gains.max()),
                    generation_return=float(np.median(gains)),
                )
            )
    except KeyboardInterrupt:
        pass
    # With new arrivals in every generation the mean of the search is the best guess.
    return _config(start, names, np.asarray(search.result.xfavorite))


def _point(config: HeuristicConfig, names: Sequence[str]) -> NDArray[np.float64]:
    low, high = np.array([RANGES[name] for name in names]).T
    own = (np.array([getattr(config, name) for name in names]) - low) / (high - low)
    rows = [list(RANGES).index(name) for name in ANSWERING]
    answers = answers_table(config)[rows] / (2.0 * _most()) + 0.5
    return np.asarray(np.clip(np.concatenate([own, answers.ravel()]), 0.02, 0.98))


def _config(
    start: HeuristicConfig, names: Sequence[str], point: NDArray[np.float64]
) -> HeuristicConfig:
    point = np.clip(point, 0.0, 1.0)
    low, high = np.array([RANGES[name] for name in names]).T
    own = low + (high - low) * point[: len(names)]
    answers = (point[len(names) :].reshape(-1, len(SIGNALS)) - 0.5) * 2.0 * _most()
    changes: dict[str, Any] = dict(zip(names, own.round(4).tolist(), strict=True))
    changes["answers"] = {
        name: tuple(row.round(4).tolist()) for name, row in zip(ANSWERING, answers, strict=True)
    }
    return start.replace(**changes)


def _most() -> NDArray[np.float64]:
    """Return (answering numbers, 1) how far each may move for one signal."""
    low, high = np.array([RANGES[name] for name in ANSWERING]).T
    return np.asarray(MOST * (high - low)[:, None])
