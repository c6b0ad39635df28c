"""Finds a rule's numbers for each kind of site apart, and learns to recognise the kind.

Kinds are those of a `mixture`: what arrives, how much of it, and how long waking takes. A search
that knows the kind needs far fewer candidates than one for all sites at once, and fewer still if it
begins with numbers that suit a neighbour, with a little more load or a longer delay, or a rule that
was tuned for some other site and happens to suit this one. At work nobody tells the kind; the
signals do, the better the longer the episode has run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax

from cloudsched.envs.cluster import FRESH_SEEDS, ClusterVectorEnv
from cloudsched.envs.observation import columns
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.heuristics.adapting import SearchConfig, best_of, search_numbers
from cloudsched.heuristics.adaptive import DELAY_SIGNAL, terms_of
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.heuristics.parameters import NUM_TERMS, SIGNALS, HeuristicConfig
from cloudsched.heuristics.tuning import Scorer, TuningProgress, free_parameters, plain_policy
from cloudsched.sim.engine import wake_delay_of
from cloudsched.workload.mixture import MixtureWorkload

POOL_SIZE = 20_000
NUM_LOADS = 5  # levels of load, for each workload; an episode has the nearest one
NUM_DELAYS = 3  # levels of the wake delay, likewise
TRIAL_EPISODES = 64  # on which rules are compared before and after a search
LESSON_EPISODES = 1024
LESSON_EVERY = 40  # ticks
DELAY_WIDTH = 0.35  # of the distance between two levels of the delay: numbers change over softly
DECAY = 1e-4  # of the recogniser's weights; without it rare terms grow without bound


class Kind(NamedTuple):
    """A kind of site."""

    workload: str
    load: float
    wake_delay: float

    def __str__(self) -> str:
        return f"{self.workload}, load {self.load:.2f}, waking in {self.wake_delay:g} ticks"


@dataclass(frozen=True)
class SiteProgress:
    """Where the search stands."""

    site: str
    number: int  # from one
    num_searches: int
    search: TuningProgress  # its candidates are those of all searches so far

    def __str__(self) -> str:
        return f"search {self.number} of {self.num_searches} ({self.site}),"


def adapt_by_site(
    start: HeuristicConfig,
    scenario: Scenario,
    config: SearchConfig,
    report: Callable[[SiteProgress], None],
    teachers: Sequence[HeuristicConfig] = (),
) -> HeuristicConfig:
    """Return a rule with its own numbers at every kind of site, and a recogniser for them.

    Args:
        start: a headroom controller, tuned on the same scenario; what it does in a jam stays.
        teachers: further ones; each search begins with the best of them all. One with numbers by
            site, as an earlier search found them, teaches each kind its own.
        config: its candidates are shared out evenly among kinds.
        report: may raise KeyboardInterrupt; kinds that had no turn yet then have the start's.
    """
    pools = pools_by_kind(scenario, config.seed)
    if any(len(rule.recogniser) not in (0, len(pools)) for rule in teachers):
        raise ConfigError(
            f"A teacher has numbers for other sites than the {len(pools)} of this mixture."
        )
    names = free_parameters(start, is_whole=True)
    score = Scorer([scenario], [0], plain_policy, config.rate_price)
    order = _from_the_middle(list(pools))
    found: dict[Kind, HeuristicConfig] = {}
    share, done = config.evaluations // len(pools), 0

    def tell(number: int, state: TuningProgress) -> None:
        nonlocal done
        done += config.population
        site = str(order[number - 1])
        report(SiteProgress(site, number, len(order), replace(state, evaluations=done)))

    generator = np.random.default_rng(config.seed)
    for number, kind in enumerate(order, start=1):
        own = replace(config, evaluations=share, seed=config.seed + 1000 * number)
        pool = pools[kind]
        taught = [_at_site(rule, list(pools).index(kind), start) for rule in teachers]
        nearby = [found[other] for other in _neighbours(kind, order) if other in found]
        rules = [start, *taught, *nearby]
        begin = best_of(rules, score, generator.choice(pool, TRIAL_EPISODES))
        rule, is_over = search_numbers(begin, names, score, pool, own, partial(tell, number))
        # A search of few generations may end beside what it came from.
        found[kind] = best_of([begin, rule], score, generator.choice(pool, TRIAL_EPISODES))
        if is_over:
            break
    rules = [found.get(kind, start) for kind in pools]
    return start.replace(
        sites={name: tuple(getattr(rule, name) for rule in rules) for name in names},
        recogniser=_learn_to_recognise(start, scenario, pools, config.seed),
    )


def _from_the_middle(kinds: Sequence[Kind]) -> list[Kind]:
    """Return kinds so that each but the first of a workload has a neighbour before it."""
    loads = sorted({kind.load for kind in kinds})
    middle = loads[len(loads) // 2]
    return sorted(kinds, key=lambda kind: (abs(kind.load - middle), kind))


def _neighbours(kind: Kind, kinds: Sequence[Kind]) -> list[Kind]:
    """Return the kinds with the same arrivals and the next load or wake delay."""
    loads = sorted({other.load for other in kinds})
    delays = sorted({other.wake_delay for other in kinds})

    def distance(other: Kind) -> int:
        apart = abs(loads.index(other.load) - loads.index(kind.load))
        return apart + abs(delays.index(other.wake_delay) - delays.index(kind.wake_delay))

    return [k for k in kinds if k.workload == kind.workload and distance(k) == 1]


def _at_site(rule: HeuristicConfig, number: int, start: HeuristicConfig) -> HeuristicConfig:
    """Return a plain rule with the numbers for one kind of site, and with the start's jam."""
    numbers: dict[str, Any] = {name: values[number] for name, values in rule.sites.items()}
    jam = {"jam": start.jam, "jam_queue": start.jam_queue}
    return rule.replace(sites={}, recogniser=(), **numbers, **jam)


def pools_by_kind(scenario: Scenario, seed: int) -> dict[Kind, NDArray[np.int64]]:
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
    delays = np.array([float(wake_delay_of(env.config, int(s))) for s in seeds])
    loads, delays = _levels(loads, NUM_LOADS), _levels(delays, NUM_DELAYS)
    pools: dict[Kind, list[int]] = {}
    for s, (name, _), load, delay in zip(seeds, sites, loads, delays, strict=True):
        pools.setdefault(Kind(name, float(load), float(delay)), []).append(int(s))
    return {kind: np.array(pools[kind]) for kind in sorted(pools)}


def _levels(values: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Return the nearest of some evenly spaced levels for each value."""
    levels = np.linspace(values.min(), values.max(), count).round(6)
    return np.asarray(levels[np.abs(np.subtract.outer(values, levels)).argmin(axis=1)])


def _learn_to_recognise(
    rule: HeuristicConfig, scenario: Scenario, pools: dict[Kind, NDArray[np.int64]], seed: int
) -> tuple[tuple[float, ...], ...]:
    """Return, for each kind, the weights of its log-odds.

    What arrives, and how much, is told by a logistic regression from what is seen under the rule;
    the wake delay is seen as it is.
    """
    arrivals = sorted({kind[:2] for kind in pools})
    share = -(-LESSON_EPISODES // len(arrivals))
    generator = np.random.default_rng(seed)
    chosen = [
        generator.choice(np.concatenate([pools[k] for k in pools if k[:2] == one]), share)
        for one in arrivals
    ]
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
    weights = _regression(np.concatenate(terms), np.concatenate(kinds), len(arrivals))
    delays = sorted({kind.wake_delay for kind in pools})
    rows = [
        weights[arrivals.index(kind[:2])] + _delay_weights(kind.wake_delay, delays)
        for kind in pools
    ]
    return tuple(tuple(row.round(5).tolist()) for row in rows)


def _delay_weights(level: float, levels: Sequence[float]) -> NDArray[np.float64]:
    """Return weights with which the log-odds of a level fall with the square of the distance."""
    weights = np.zeros(NUM_TERMS)
    if len(levels) > 1:
        signal = SIGNALS.index("wake_delay")
        # The signal is (delay - middle) / unit.
        middle, unit = DELAY_SIGNAL
        own = (level - middle) / unit
        width = DELAY_WIDTH * (levels[1] - levels[0]) / unit
        square = 1 + len(SIGNALS) + signal * (signal + 1) // 2 + signal
        weights[0] = -0.5 * (own / width) ** 2
        weights[1 + signal] = own / width**2
        weights[square] = -0.5 / width**2
    return weights


def _regression(
    terms: NDArray[np.float64], kinds: NDArray[np.int64], num_kinds: int
) -> NDArray[np.float64]:
    """Return (kinds, terms) the weights of a logistic regression."""
    shape = (num_kinds, terms.shape[1])
    is_kind = np.equal.outer(kinds, np.arange(num_kinds))

    def loss(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weights = flat.reshape(shape)
        log_odds = log_softmax(terms @ weights.T, axis=1)
        gradient = (np.exp(log_odds) - is_kind).T @ terms / len(terms) + 2.0 * DECAY * weights
        value = DECAY * np.square(weights).sum() - log_odds[is_kind].mean()
        return float(value), gradient.ravel()

    found = minimize(loss, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B")
    return np.asarray(found.x.reshape(shape))
