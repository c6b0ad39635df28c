"""Learns how a rule's numbers follow the site, by evolution on whole episodes.

Every generation faces new arrivals from the training range, the same for all its candidates, and a
candidate counts by how much better it does than the rule it started from, episode by episode and in
proportion: sites with a hundred times the cost of others count no more than those. Gradients of
single decisions are of little use here, because a server too few shows only many decisions later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import cma
import numpy as np
from numpy.typing import NDArray

from cloudsched.envs.cluster import FRESH_SEEDS
from cloudsched.envs.scenario import Scenario
from cloudsched.heuristics.adaptive import answers_table
from cloudsched.heuristics.parameters import RANGES, SIGNALS, HeuristicConfig
from cloudsched.heuristics.tuning import (
    MakePolicy,
    Scorer,
    TunedHeuristic,
    TuningProgress,
    free_parameters,
    gains_over,
    plain_policy,
)

ANSWERING = (
    *("headroom_constant", "headroom_root", "headroom_queued", "headroom_urgent", "headroom_rate"),
    *("headroom_release", "hysteresis", "min_idle_ticks", "idle_bias", "hold_laxity"),
)
"""What may follow the site: how much stays awake, for how long, and how long jobs are held."""
NUMBERS_SHARE = 2.0 / 3.0  # of the candidates, for numbers without answers
TRIAL_EPISODES = 128  # on which what was found is compared with what it came from
MOST = 0.5
"""Share of its range that a number may move for one signal."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How long and how widely evolution searches."""

    evaluations: int
    """Candidates to try."""
    population: int
    """Candidates in a generation."""
    num_seeds: int
    """Episodes of each candidate, other ones in each generation."""
    step: float
    """How far the first candidates lie from the start, as a share of each range."""
    seed: int
    """Of the search and of its arrivals."""
    rate_price: float = 0.0
    """What the SLA violation rate costs besides the reward, a tick. The reward counts violations,
    so that one in a hundred jobs weighs little where few jobs arrive."""


Report = Callable[[TuningProgress], None]
"""Called after each generation with the gain in proportion, of the best and of the median
candidate; may raise KeyboardInterrupt to end the search."""


def adapt_heuristic(
    start: HeuristicConfig, scenario: Scenario, config: SearchConfig, report: Report
) -> HeuristicConfig:
    """Search for numbers and answers that beat the rule they start from, and return them.

    Numbers that stay as they are come first: they are few, so that the search also learns which of
    them go together. Answers, of which there are a hundred, are searched for from there.
    Args:
        start: a headroom controller, tuned on the same scenario.
    """
    names = free_parameters(start, is_whole=True)
    score = Scorer([scenario], [0], plain_policy, config.rate_price)
    first = replace(config, evaluations=round(NUMBERS_SHARE * config.evaluations))
    done = 0

    def tell(state: TuningProgress) -> None:
        nonlocal done
        done += config.population
        report(replace(state, evaluations=done))

    pool = np.arange(FRESH_SEEDS)
    found, is_over = search_numbers(start, names, score, pool, first, tell)
    if is_over:
        return found
    generator = np.random.default_rng([config.seed, 1])
    search = start_search(_point(found, names), config, is_diagonal=True)
    with suppress(KeyboardInterrupt):
        evolve(
            search,
            score,
            found,
            lambda point: _config(found, names, point),
            lambda: generator.integers(FRESH_SEEDS, size=config.num_seeds).tolist(),
            config.evaluations - done,
            tell,
        )
    answering = _config(found, names, np.asarray(search.result.xfavorite))
    return best_of([found, answering], score, generator.choice(pool, TRIAL_EPISODES))


def best_of(
    rules: Sequence[HeuristicConfig], score: Scorer, seeds: NDArray[np.int64]
) -> HeuristicConfig:
    """Return the rule that does best in some episodes, in proportion to what the first one does."""
    score.face(seeds.tolist())
    returns = score(rules)
    return rules[int(gains_over(returns[:, :1], returns).argmax())]


def tune_on_fresh_arrivals(
    start: HeuristicConfig,
    scenarios: Sequence[Scenario],
    seeds: Sequence[int],
    names: Sequence[str],
    config: SearchConfig,
    report: Report,
    make_policy: MakePolicy = plain_policy,
) -> TunedHeuristic:
    """Search for better numbers as `tune_heuristic` does, but on new arrivals in each generation.

    Fifty episodes of a workload whose episodes differ much are soon known by heart.

    Args:
        seeds: train seeds, on which the outcome is measured in the end.
        names: the numbers to search.
        report: may raise KeyboardInterrupt to end the search.
        make_policy: what runs the candidates, one for each cluster.
    """
    score = Scorer(scenarios, seeds, make_policy, config.rate_price)
    done = 0

    def tell(state: TuningProgress) -> None:
        nonlocal done
        done = state.evaluations
        report(state)

    found, _ = search_numbers(start, names, score, np.arange(FRESH_SEEDS), config, tell)
    score.face(seeds)
    returns = score([start, found])
    return TunedHeuristic(
        config=found,
        gain=float(gains_over(returns[:, :1], returns[:, 1:])[0]),
        train_return=float(returns[:, 1].mean()),
        start_return=float(returns[:, 0].mean()),
        evaluations=done,
    )


def search_numbers(
    start: HeuristicConfig,
    names: Sequence[str],
    score: Scorer,
    pool: NDArray[np.int64],
    config: SearchConfig,
    report: Report,
) -> tuple[HeuristicConfig, bool]:
    """Search for numbers that beat the start's on arrivals drawn from a pool of seeds.

    Returns:
        The numbers found, and whether a KeyboardInterrupt of `report` ended the search early.
    """
    low, high = np.array([RANGES[name] for name in names]).T

    def config_of(point: NDArray[np.float64]) -> HeuristicConfig:
        values = (low + (high - low) * np.clip(point, 0.0, 1.0)).round(4).tolist()
        return start.replace(**dict(zip(names, values, strict=True)))

    generator = np.random.default_rng(config.seed)
    origin = (np.array([getattr(start, name) for name in names]) - low) / (high - low)
    search = start_search(np.clip(origin, 0.02, 0.98), config, is_diagonal=False)
    is_interrupted = False
    try:
        evolve(
            search,
            score,
            start,
            config_of,
            lambda: generator.choice(pool, config.num_seeds).tolist(),
            config.evaluations,
            report,
        )
    except KeyboardInterrupt:
        is_interrupted = True
    return config_of(np.asarray(search.result.xfavorite)), is_interrupted


def start_search(
    point: NDArray[np.float64], config: SearchConfig, *, is_diagonal: bool
) -> cma.CMAEvolutionStrategy:
    """Return a search within the unit cube.

    Args:
        is_diagonal: for too many numbers to learn a full covariance of in so few candidates.
    """
    options = {"bounds": [0.0, 1.0], "popsize": config.population, "verbose": -9}
    options |= {"seed": config.seed + 1, "CMA_diagonal": is_diagonal}
    return cma.CMAEvolutionStrategy(point, config.step, options)


def evolve(
    search: cma.CMAEvolutionStrategy,
    score: Scorer,
    start: HeuristicConfig,
    config_of: Callable[[NDArray[np.float64]], HeuristicConfig],
    draw_seeds: Callable[[], list[int]],
    evaluations: int,
    report: Report,
) -> None:
    """Run a search for what does better than a rule, on new arrivals in every generation.

    With those, the mean of the search (`result.xfavorite`) is the best guess, not its best sample.
    """
    done = 0
    while done < evaluations:
        score.face(draw_seeds())
        points = search.ask()
        returns = score([start, *(config_of(np.asarray(point)) for point in points)])
        gains = gains_over(returns[:, :1], returns[:, 1:])
        search.tell(points, (-gains).tolist())
        done += len(points)
        report(
            TuningProgress(
                evaluations=done,
                best_gain=float(gains.max()),
                generation_gain=float(np.median(gains)),
            )
        )


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
