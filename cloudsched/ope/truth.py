"""The true value of a policy, where a simulator exists: what the estimates should have said."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gymnasium.vector import AutoresetMode

from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.scenario import Scenario
from cloudsched.policy import Policy
from cloudsched.statistics import Estimate, summarise


def true_value(
    scenario: Scenario,
    policy: Policy,
    seeds: Sequence[int],
    *,
    gamma: float,
    arrivals_per_tick: float,
    max_ticks: int,
) -> dict[str, Estimate]:
    """Run a policy and return `reward` and `cost` as `cloudsched.ope.estimators` defines them.

    Args:
        arrivals_per_tick: of the dataset, so that costs have the same unit.
        max_ticks: later ticks do not count.
    """
    env = ClusterVectorEnv(
        len(seeds), **scenario.to_dict(), copy=False, autoreset_mode=AutoresetMode.DISABLED
    )
    observation, _ = env.reset(seed=list(seeds))
    policy.reset(len(seeds))
    config, clusters = env.config, env.engine.state.clusters
    full_power_w = float(env.engine.fleet.max_w.sum())
    toggle = config.reward.toggle_penalty * 15.0 / config.num_servers
    toggle /= max(config.reward.alpha, 1e-12)
    energy_j, sleeps = np.zeros(len(seeds)), np.zeros(len(seeds))
    tick = np.zeros(len(seeds), np.int64)
    sums = np.zeros((2, len(seeds)))
    while (tick < min(max_ticks, config.episode_ticks)).any():
        result = env.advance(policy.act(observation))
        drawn = (clusters["energy_j"] - energy_j) / config.tick_s / full_power_w
        requests = clusters["sleep_requests"] - sleeps
        energy_j, sleeps = clusters["energy_j"].copy(), clusters["sleep_requests"].copy()
        weight = (1.0 - gamma) * gamma**tick * (tick < max_ticks)
        sums[0] -= weight * (drawn + toggle * requests)
        sums[1] += weight * result.cost / arrivals_per_tick
        tick += result.elapsed_ticks
        tick[result.is_truncated] = config.episode_ticks
    return summarise({"reward": sums[0], "cost": sums[1]})
