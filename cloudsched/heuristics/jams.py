"""Finds in which order a rule should place jobs while a cluster is jammed.

With room to spare, a rule places jobs in the order that takes least energy. In a jam, where jobs
queue though no server sleeps, those that come late make those behind them late, and only how fast
the queue gets shorter counts: large jobs first where they fit, short ones before long ones. A few
episodes with jams have most of all violations, so they have half of the search's episodes; the
others keep the rest as good as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from cloudsched.envs.cluster import FRESH_SEEDS, ClusterVectorEnv
from cloudsched.envs.scenario import Scenario
from cloudsched.heuristics.adapting import Report, SearchConfig, best_of, evolve, start_search
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.heuristics.parameters import RANGES, HeuristicConfig
from cloudsched.heuristics.tuning import Scorer, plain_policy
from cloudsched.metrics import online_metrics
from cloudsched.sim.engine import wake_delay_of

POOL_SIZE = 1024  # episodes that are looked through for jams
JAMMED_RATE = 0.01  # violations / jobs from which on an episode had a jam
TRIAL_EPISODES = 256  # on which what was found is compared with what it came from
ORDER = tuple(name for name in RANGES if name.startswith(("order_", "scan_")))
NAMES = ("jam_queue", *ORDER)
BEGIN = {name: 0.0 for name in ORDER} | {
    "jam_queue": 0.15,
    "order_size": -50.0,
    "order_duration": 0.15,
    "scan_depth": 5.0,
}
"""Where the search begins: the largest job that fits, a shorter one before a longer one."""


def learn_jam(
    start: HeuristicConfig, scenario: Scenario, config: SearchConfig, report: Report
) -> HeuristicConfig:
    """Return the rule with an order of its own for a jam, or as it is where none are better.

    Args:
        start: any headroom controller; its numbers without a jam stay.
        report: may raise KeyboardInterrupt to end the search.
    """
    generator = np.random.default_rng(config.seed)
    seeds = generator.integers(FRESH_SEEDS, size=POOL_SIZE)
    is_jammed = _violation_rates(start, scenario, seeds.tolist()) >= JAMMED_RATE
    jammed, others = seeds[is_jammed], seeds[~is_jammed]
    if len(jammed) == 0:
        return start
    half = config.num_seeds // 2

    def draw_seeds() -> list[int]:
        drawn = [generator.choice(jammed, config.num_seeds - half)]
        drawn.append(generator.choice(others if len(others) else jammed, half))
        return [int(seed) for part in drawn for seed in part]

    score = Scorer([scenario], [0], plain_policy, config.rate_price)
    begin = np.array([start.jam.get(name, BEGIN[name]) for name in NAMES])
    begin[0] = start.jam_queue if start.jam else BEGIN["jam_queue"]
    low, high = _bounds()
    search = start_search(
        np.clip((begin - low) / (high - low), 0.02, 0.98), config, is_diagonal=False
    )
    with suppress(KeyboardInterrupt):
        evolve(
            search,
            score,
            start,
            lambda point: _with_jam(start, point),
            draw_seeds,
            config.evaluations,
            report,
        )
    found = _with_jam(start, np.asarray(search.result.xfavorite))
    return best_of([start, found], score, generator.integers(FRESH_SEEDS, size=TRIAL_EPISODES))


def _with_jam(start: HeuristicConfig, point: NDArray[np.float64]) -> HeuristicConfig:
    low, high = _bounds()
    values = (low + (high - low) * np.clip(point, 0.0, 1.0)).round(4).tolist()
    numbers = dict(zip(NAMES, values, strict=True))
    return start.replace(jam_queue=numbers.pop("jam_queue"), jam=numbers)


def _bounds() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    low, high = np.array([RANGES[name] for name in NAMES]).T
    return low, high


def _violation_rates(
    rule: HeuristicConfig, scenario: Scenario, seeds: Sequence[int]
) -> NDArray[np.float64]:
    """Return (episodes,) the share of jobs that start late under a rule."""
    env = ClusterVectorEnv(len(seeds), copy=False, autoreset_mode="Disabled", **scenario.to_dict())
    observation = env.reset_to(
        [env.workload.jobs(seed, env.config.episode_ticks) for seed in seeds],
        wake_delays=[wake_delay_of(env.config, seed) for seed in seeds],
    )
    policy = HeuristicPolicy(env.config, rule)
    policy.reset(len(seeds))
    while not env.advance(policy.act(observation)).is_truncated.all():
        pass
    return online_metrics(env.engine, np.arange(len(seeds)))["sla_violation_rate"]
