"""Finds a rule's numbers for each kind of site apart, and learns to recognise the kind.

Kinds are those of a `mixture`: what arrives, how much of it, and how long waking takes. A search
that knows the kind needs far fewer candidates than one for all sites at once, and fewer still from
numbers that suit the same arrivals at any load and wake delay, so those are searched for first, or
from a rule that was tuned for some other site and happens to suit this one. At work nobody tells
the kind; the signals do, the better the longer the episode has run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax

from cloudsched.envs.cluster import FRESH_SEEDS, ClusterVectorEnv
from cloudsched.envs.observation import columns
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.heuristics.adapting import SearchConfig, best_of, search_numbers
from cloudsched.heuristics.adaptive import terms_of
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.heuristics.parameters import HeuristicConfig
from cloudsched.heuristics.tuning import Scorer, TuningProgress, free_parameters, plain_policy
from cloudsched.sim.engine import wake_delay_of
from cloudsched.workload.mixture import MixtureWorkload

POOL_SIZE = 20_000
NUM_LEVELS = 3  # of load, for each workload; an episode has the nearest one
WORKLOAD_SHARE = 1.0 / 3.0  # of the candidates, for numbers that suit one workload
TRIAL_EPISODES = 64  # on which rules are compared before and after a search
LESSON_EPISODES = 1024
LESSON_EVERY = 20  # ticks
DECAY = 1e-4  # of the recogniser's weights; without it rare terms grow without bound

Kind = tuple[str, int, bool]
"""Workload, level of its load, and whether waking is slow: in the upper half of its range."""


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
        start: a headroom controller, tuned on the same scenario.
        teachers: further ones; each search begins with the best of them all. One with numbers by
            site, as an earlier search found them, teaches the searches for single kinds.
        config: its candidates are shared out evenly among workloads, then among kinds.
        report: may raise KeyboardInterrupt; kinds that had no turn yet then keep what they have.
    """
    pools = _pools(scenario, config.seed)
    if any(len(rule.recogniser) not in (0, len(pools)) for rule in teachers):
        raise ConfigError(
            f"A teacher has numbers for other sites than the {len(pools)} of this mixture."
        )
    names = free_parameters(start, is_whole=True)
    score = Scorer([scenario], [0], plain_policy)
    found = dict.fromkeys(pools, start)
    workloads = sorted({workload for workload, _, _ in pools})
    is_taught = any(rule.sites for rule in teachers)  # then workloads as a whole had their turn
    shared = 0 if is_taught else round(WORKLOAD_SHARE * config.evaluations)
    searches: list[tuple[str, list[Kind], int]] = []
    for name in () if is_taught else workloads:
        alike = [kind for kind in pools if kind[0] == name]
        searches.append((name, alike, shared // len(workloads)))
    share = (config.evaluations - shared) // len(pools)
    searches += [(_name(kind), [kind], share) for kind in pools]
    done = 0

    def tell(site: str, number: int, state: TuningProgress) -> None:
        nonlocal done
        done += config.population
        report(SiteProgress(site, number, len(searches), replace(state, evaluations=done)))

    generator = np.random.default_rng(config.seed)
    for number, (site, kinds, evaluations) in enumerate(searches, start=1):
        own = replace(config, evaluations=evaluations, seed=config.seed + 1000 * number)
        pool = np.concatenate([pools[kind] for kind in kinds])
        watch = partial(tell, site, number)
        taught = [_at_site(rule, kinds, list(pools)) for rule in teachers]
        rules = [found[kinds[0]], *(rule for rule in taught if rule is not None)]
        begin = best_of(rules, score, generator.choice(pool, TRIAL_EPISODES))
        rule, is_over = search_numbers(begin, names, score, pool, own, watch)
        # A search of few generations may end beside what it came from.
        rule = best_of([begin, rule], score, generator.choice(pool, TRIAL_EPISODES))
        found.update(dict.fromkeys(kinds, rule))
        if is_over:
            break
    return start.replace(
        sites={name: tuple(getattr(rule, name) for rule in found.values()) for name in names},
        recogniser=_learn_to_recognise(start, scenario, pools, config.seed),
    )


def _at_site(
    rule: HeuristicConfig, kinds: Sequence[Kind], all_kinds: Sequence[Kind]
) -> HeuristicConfig | None:
    """Return a plain rule with the numbers for some kinds of site; None if they have no common."""
    if not rule.sites:
        return rule
    if len(kinds) > 1:
        return None
    own = all_kinds.index(kinds[0])
    numbers = {name: values[own] for name, values in rule.sites.items()}
    return rule.replace(sites={}, recogniser=(), **numbers)


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
    is_slow = 2 * delays >= delays.min() + delays.max()
    pools: dict[Kind, list[int]] = {}
    for s, (name, load), slow in zip(seeds, sites, is_slow, strict=True):
        kind = (name, int(np.abs(levels - load).argmin()), bool(slow))
        pools.setdefault(kind, []).append(int(s))
    return {kind: np.array(pools[kind]) for kind in sorted(pools)}


def _learn_to_recognise(
    rule: HeuristicConfig, scenario: Scenario, pools: dict[Kind, NDArray[np.int64]], seed: int
) -> tuple[tuple[float, ...], ...]:
    """Return the weights of a logistic regression from what is seen under the rule to the kind."""
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
    return _regression(np.concatenate(terms), np.concatenate(kinds), len(pools))


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
