"""Tunes a heuristic's numbers with CMA-ES, on train seeds and common random numbers.

Every candidate faces the same arrivals, so differences between candidates are theirs. It counts by
how much better it does than the start, episode by episode and in proportion: one great burst costs
more than all else in fifty episodes, and should not decide alone.

A batch is some seeds with all candidates, at cluster `c * S + s` candidate c on seed s; its seeds
have about as many jobs, because a batch runs until its last episode is over. Threads share the
batches out: the kernels release the interpreter's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import cma
import numpy as np
from numpy.typing import NDArray

from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.heuristics.parameters import RANGES, HeuristicConfig
from cloudsched.metrics import episode_return, online_metrics
from cloudsched.policy import Policy
from cloudsched.sim.engine import wake_delay_of
from cloudsched.sim.jobs import JobTable

_ORDER_AND_PLACEMENT = tuple(
    name for name in RANGES if name.startswith(("order_", "place_", "scan_", "hold_", "reserve"))
)
_SLEEP = {
    "never": (),
    "idle_timeout": ("timeout_ticks", "spare_servers", "idle_bias"),
    "utilisation_band": ("band_low", "band_high", "idle_bias"),
    "headroom": (
        *(name for name in RANGES if name.startswith("headroom_")),
        *("urgent_ticks", "hysteresis", "min_idle_ticks", "idle_bias"),
    ),
}

BATCH_CLUSTERS = 128
"""Fits a processor's cache, and is enough to make calls of the kernels pay."""

MakePolicy = Callable[[ClusterVectorEnv, Sequence[HeuristicConfig]], Policy]


@dataclass(frozen=True, kw_only=True)
class TuningProgress:
    """Where the search stands after a generation."""

    evaluations: int
    best_gain: float
    """How much better than the start the best candidate so far is, in proportion."""
    generation_gain: float
    """The same of the median candidate of the generation."""


@dataclass(frozen=True, kw_only=True)
class TunedHeuristic:
    """The outcome of a search."""

    config: HeuristicConfig
    gain: float
    """How much better than the start it does, in proportion; mean over scenarios and seeds."""
    train_return: float
    """Mean over scenarios and seeds of the episode return."""
    start_return: float
    """The same of the start."""
    evaluations: int


def free_parameters(config: HeuristicConfig, *, is_whole: bool) -> tuple[str, ...]:
    """Return the numbers to search: those of the sleep controller; of all else if `is_whole`."""
    sleep = _SLEEP[config.sleep]
    return (*_ORDER_AND_PLACEMENT, *sleep) if is_whole else ("scan_depth", "hold_laxity", *sleep)


def tune_heuristic(
    start: HeuristicConfig,
    scenarios: Sequence[Scenario],
    seeds: Sequence[int],
    *,
    names: Sequence[str],
    evaluations: int,
    population: int,
    step: float,
    seed: int,
    report: Callable[[TuningProgress], None],
) -> TunedHeuristic:
    """Search for better numbers.

    Args:
        start: where the search begins.
        scenarios: what to be good at.
        seeds: arrivals of every candidate; train seeds only.
        names: the numbers to search.
        evaluations: candidates to try.
        step: how far the first candidates lie from the start, as a share of each range.
        report: called after each generation; may raise KeyboardInterrupt to end the search, which
            then returns the best so far.
    """
    if not names:
        raise ConfigError(f"A heuristic with sleep={start.sleep!r} has no numbers to tune.")
    score = Scorer(scenarios, seeds, plain_policy)
    start_returns = score([start])
    low, high = np.array([RANGES[name] for name in names]).T
    origin = np.array([getattr(start, name) for name in names])
    search = cma.CMAEvolutionStrategy(
        np.clip((origin - low) / (high - low), 0.02, 0.98),
        step,
        {"bounds": [0.0, 1.0], "popsize": population, "seed": seed + 1, "verbose": -9},
    )
    best, best_gain, best_return, done = start, 0.0, float(start_returns.mean()), 1
    try:
        while done < evaluations and not search.stop():
            points = search.ask()
            configs = [_moved(start, names, low + (high - low) * np.asarray(x)) for x in points]
            # The mean of the search is often better than any sample of it.
            mean = low + (high - low) * np.clip(search.result.xfavorite, 0.0, 1.0)
            configs.append(_moved(start, names, mean))
            returns = score(configs)
            gains = gains_over(start_returns, returns)
            search.tell(points, (-gains[:-1]).tolist())
            done += len(configs)
            leader = int(np.argmax(gains))
            if gains[leader] > best_gain:
                best, best_gain = configs[leader], float(gains[leader])
                best_return = float(returns[:, leader].mean())
            report(
                TuningProgress(
                    evaluations=done,
                    best_gain=best_gain,
                    generation_gain=float(np.median(gains)),
                )
            )
    except KeyboardInterrupt:
        pass
    return TunedHeuristic(
        config=best,
        gain=best_gain,
        train_return=best_return,
        start_return=float(start_returns.mean()),
        evaluations=done,
    )


def gains_over(
    start_returns: NDArray[np.float64], returns: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return (candidates,) the mean gain in proportion to the start's return in each episode.

    Args:
        start_returns: (scenarios, 1, seeds).
        returns: (scenarios, candidates, seeds).
    """
    gains = (returns - start_returns) / np.maximum(np.abs(start_returns), 1e-9)
    return np.asarray(gains.mean(axis=(0, 2)))


def _moved(
    start: HeuristicConfig, names: Sequence[str], values: NDArray[np.float64]
) -> HeuristicConfig:
    changes: dict[str, Any] = {
        name: round(float(v), 4) for name, v in zip(names, values, strict=True)
    }
    return start.replace(**changes)


class Scorer:
    """Runs candidates on all scenarios and seeds; environments are built once.

    Args:
        rate_price: what the SLA violation rate costs besides the reward, a tick.
    """

    def __init__(
        self,
        scenarios: Sequence[Scenario],
        seeds: Sequence[int],
        make_policy: MakePolicy,
        rate_price: float = 0.0,
    ) -> None:
        self._make_policy = make_policy
        self._rate_price = rate_price
        self._threads = max(1, os.cpu_count() or 1)
        self._scenarios = scenarios
        self._single = [_environment(scenario, 1) for scenario in scenarios]
        self._envs: dict[tuple[int, int, int], ClusterVectorEnv] = {}
        self.face(seeds)

    def face(self, seeds: Sequence[int]) -> None:
        """Take these arrivals from now on."""
        self._num_seeds = len(seeds)
        self._tables: list[list[JobTable]] = []
        self._wake_delays: list[list[int]] = []
        for env in self._single:
            ticks = env.config.episode_ticks
            self._tables.append([env.workload.jobs(seed, ticks) for seed in seeds])
            self._wake_delays.append([wake_delay_of(env.config, seed) for seed in seeds])

    def __call__(self, configs: Sequence[HeuristicConfig]) -> NDArray[np.float64]:
        """Return (scenarios, candidates, seeds) episode returns, less the price of the rate."""
        count = -(-len(configs) * self._num_seeds // BATCH_CLUSTERS)
        count = min(self._num_seeds, max(self._threads, count))
        work = [
            (i, j, batch)
            for i, tables in enumerate(self._tables)
            for j, batch in enumerate(np.array_split(np.argsort([*map(len, tables)]), count))
        ]
        result = np.zeros((len(self._scenarios), len(configs), self._num_seeds))
        with ThreadPoolExecutor(self._threads) as pool:
            scores = pool.map(lambda one: self._run(one, configs), work)
            for (i, _, batch), returns in zip(work, scores, strict=True):
                result[i][:, batch] = returns
        return result

    def _run(
        self, part: tuple[int, int, NDArray[np.int64]], configs: Sequence[HeuristicConfig]
    ) -> NDArray[np.float64]:
        """Run all candidates on a scenario and a batch of seeds, in clusters of its own."""
        scenario, number, batch = part
        key = (scenario, number, len(configs) * len(batch))
        if key not in self._envs:
            self._envs[key] = _environment(self._scenarios[scenario], key[2])
        env = self._envs[key]
        observation = env.reset_to(
            [self._tables[scenario][i] for i in batch] * len(configs),
            wake_delays=[self._wake_delays[scenario][i] for i in batch] * len(configs),
        )
        policy = self._make_policy(env, [config for config in configs for _ in batch])
        while not env.advance(policy.act(observation)).is_truncated.all():
            pass
        rates = online_metrics(env.engine, np.arange(key[2]))["sla_violation_rate"]
        price = self._rate_price * env.config.episode_ticks
        return (episode_return(env.engine) - price * rates).reshape(len(configs), len(batch))


def plain_policy(env: ClusterVectorEnv, configs: Sequence[HeuristicConfig]) -> Policy:
    """Run the candidates as they are."""
    return HeuristicPolicy(env.config, configs)


def _environment(scenario: Scenario, num_clusters: int) -> ClusterVectorEnv:
    return ClusterVectorEnv(
        num_clusters, copy=False, autoreset_mode="Disabled", **scenario.to_dict()
    )
