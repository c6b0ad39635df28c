"""Learns to recognise kinds of site, and finds a rule's numbers for each kind.

Kinds are those of a `mixture`: what arrives, how much of it, and how long waking takes. At work
nobody tells the kind; the signals do, the better the longer the episode has run, and until then the
numbers of all kinds that it may be are mixed. So the numbers of a kind are searched for while those
of the others take their part, in episodes of all kinds that are taken for it, as often as they are:
numbers found for a kind that is known for certain do worse when they are mixed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax

from cloudsched.envs.cluster import FRESH_SEEDS, ClusterVectorEnv
from cloudsched.envs.observation import columns
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.heuristics.adapting import Report, SearchConfig, evolve, start_search
from cloudsched.heuristics.adaptive import terms_of
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.heuristics.parameters import RANGES, HeuristicConfig
from cloudsched.heuristics.tuning import Scorer, TuningProgress, free_parameters, plain_policy
from cloudsched.sim.engine import wake_delay_of
from cloudsched.workload.mixture import MixtureWorkload

POOL_SIZE = 20_000
NUM_LEVELS = 3  # of load, for each workload; an episode has the nearest one
LESSON_EPISODES = 1024
LESSON_EVERY = 20  # ticks
ROUNDS = 2  # in the second one the others' numbers are no longer the start's
DECAY = 1e-4  # of the recogniser's weights; without it rare terms grow without bound

Kind = tuple[str, int, bool]
"""Workload, level of its load, and whether waking takes longer than in the middle of its range."""


@dataclass(frozen=True)
class SiteProgress:
    """Where the search stands."""

    site: str
    number: int
    num_sites: int
    search: TuningProgress  # its candidates are those of all sites so far

    def __str__(self) -> str:
        return f"site {self.number + 1} of {self.num_sites} ({self.site}),"


def adapt_by_site(
    start: HeuristicConfig,
    scenario: Scenario,
    config: SearchConfig,
    report: Callable[[SiteProgress], None],
) -> HeuristicConfig:
    """Return a rule with its own numbers at every kind of site, and a recogniser for them.

    Args:
        start: a headroom controller, tuned on the same scenario.
        config: its candidates are shared out evenly.
        report: may raise KeyboardInterrupt to end the search with what was found so far.
    """
    pools = _pools(scenario, config.seed)
    recogniser, taken_for = _learn_to_recognise(start, scenario, pools, config.seed)
    names = free_parameters(start, is_whole=True)
    same = {name: (getattr(start, name),) * len(pools) for name in names}
    origin = found = start.replace(sites=same, recogniser=recogniser)
    score = Scorer([scenario], [0], plain_policy)
    done = 0

    def tell(state: TuningProgress) -> None:
        nonlocal done
        done += config.population
        report(SiteProgress(_name(kind), number, len(pools), replace(state, evaluations=done)))

    share = -(-config.evaluations // (ROUNDS * len(pools)))
    with suppress(KeyboardInterrupt):
        for turn in range(ROUNDS * len(pools)):
            number = turn % len(pools)
            kind = list(pools)[number]
            own = replace(config, evaluations=share, seed=config.seed + 1000 * turn)
            draw = _Draw(list(pools.values()), taken_for[number], own)
            found = _search(found, origin, number, score, draw, own, tell)
    return found


def _pools(scenario: Scenario, seed: int) -> dict[Kind, NDArray[np.int64]]:
    """Return seeds below the test seeds, by kind."""
    env = ClusterVectorEnv(1, **scenario.to_dict())
    workload = env.workload
    if not isinstance(workload, MixtureWorkload):
        raise ConfigError(
            f"--by-site: workload {scenario.workload!r} has one kind of site; expected 'mixture'."
        )
    seeds = np.random.default_rng(seed).integers(FRESH_SEEDS, size=POOL_SIZE)
    sites = [workload.site(int(s)) for s in seeds]
    loads = np.array([load for _, load in sites])
    delays = np.array([wake_delay_of(env.config, int(s)) for s in seeds])
    levels = np.linspace(loads.min(), loads.max(), NUM_LEVELS)
    is_slow = delays > (delays.min() + delays.max()) // 2
    pools: dict[Kind, list[int]] = {}
    for s, (name, load), slow in zip(seeds, sites, is_slow, strict=True):
        kind = (name, int(np.abs(levels - load).argmin()), bool(slow))
        pools.setdefault(kind, []).append(int(s))
    return {kind: np.array(pools[kind]) for kind in sorted(pools)}


class _Draw:
    """Draws the seeds of a generation: kinds by their shares, then any of the kind's."""

    def __init__(
        self, pools: list[NDArray[np.int64]], shares: NDArray[np.float64], config: SearchConfig
    ) -> None:
        self._pools, self._shares, self._size = pools, shares, config.num_seeds
        self._generator = np.random.default_rng(config.seed)

    def __call__(self) -> list[int]:
        kinds = self._generator.choice(len(self._pools), self._size, p=self._shares)
        return [int(self._generator.choice(self._pools[kind])) for kind in kinds]


def _search(
    found: HeuristicConfig,
    origin: HeuristicConfig,
    number: int,
    score: Scorer,
    draw: _Draw,
    config: SearchConfig,
    report: Report,
) -> HeuristicConfig:
    """Return the rule with better numbers at one kind of site.

    Args:
        origin: the rule to be better than.
        number: of the kind.
    """
    names = list(found.sites)
    low, high = np.array([RANGES[name] for name in names]).T

    def config_of(point: NDArray[np.float64]) -> HeuristicConfig:
        values = (low + (high - low) * np.clip(point, 0.0, 1.0)).round(4).tolist()
        sites = {name: list(found.sites[name]) for name in names}
        for name, value in zip(names, values, strict=True):
            sites[name][number] = value
        return found.replace(sites=sites)

    start = (np.array([found.sites[name][number] for name in names]) - low) / (high - low)
    search = start_search(np.clip(start, 0.02, 0.98), config, is_diagonal=False)
    evolve(search, score, origin, config_of, draw, config.evaluations, report)
    return config_of(np.asarray(search.result.xfavorite))


def _learn_to_recognise(
    rule: HeuristicConfig, scenario: Scenario, pools: dict[Kind, NDArray[np.int64]], seed: int
) -> tuple[tuple[tuple[float, ...], ...], NDArray[np.float64]]:
    """Learn from what is seen under the rule.

    Returns:
        the weights of a logistic regression of kinds, and (kinds, kinds) how often what is taken
        for the first kind is of the second.
    """
    share = -(-LESSON_EPISODES // len(pools))
    generator = np.random.default_rng(seed)
    chosen = [generator.choice(pool, share) for pool in pools.values()]
    seeds = np.concatenate(chosen).tolist()
    env = ClusterVectorEnv(len(seeds), copy=False, autoreset_mode="Disabled", **scenario.to_dict())
    observation = env.reset_to(
        [env.workload.jobs(s, env.config.episode_ticks) for s in seeds],
        wake_delays=[wake_delay_of(env.config, s) for s in seeds],
    )
    policy = HeuristicPolicy(env.config, rule)
    tick, due = np.zeros(len(seeds), np.int64), np.zeros(len(seeds), np.int64)
    terms, kinds = [], []
    at, is_over = columns(env.config.num_resources), False
    while not is_over:
        (now,) = np.nonzero((tick >= due) & (tick < env.config.episode_ticks))
        if len(now):
            due[now] = tick[now] + LESSON_EVERY
            terms.append(terms_of(observation["context"][now], at, env.config.num_servers))
            kinds.append(now // share)
        step = env.advance(policy.act(observation))
        tick += step.elapsed_ticks
        is_over = bool(step.is_truncated.all())
    all_terms, all_kinds = np.concatenate(terms), np.concatenate(kinds)
    weights = _regression(all_terms, all_kinds, len(pools))
    odds = softmax(all_terms @ np.array(weights).T, axis=1)
    chance = [len(pool) for pool in pools.values()]
    rows = [c * odds[all_kinds == k].mean(axis=0) for k, c in enumerate(chance)]
    taken_for = np.stack(rows, axis=1)
    return weights, taken_for / taken_for.sum(axis=1, keepdims=True)


def _regression(
    terms: NDArray[np.float64], kinds: NDArray[np.int64], num_kinds: int
) -> tuple[tuple[float, ...], ...]:
    shape = (num_kinds, terms.shape[1])
    is_kind = np.equal.outer(kinds, np.arange(num_kinds))

    def loss(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weights = flat.reshape(shape)
        log_odds = log_softmax(terms @ weights.T, axis=1)
        gradient = (np.exp(log_odds) - is_kind).T @ terms / len(terms) + 2.0 * DECAY * weights
        value = DECAY * np.square(weights).sum() - log_odds[is_kind].mean()
        return float(value), gradient.ravel()

    found = minimize(loss, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B")
    return tuple(tuple(row) for row in found.x.reshape(shape).round(5).tolist())


def _name(kind: Kind) -> str:
    workload, level, is_slow = kind
    return f"{workload}, load level {level + 1}, {'slow' if is_slow else 'fast'} to wake"
