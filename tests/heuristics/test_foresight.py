"""The yardstick sees what will arrive, and nothing else changes."""

from __future__ import annotations

import numpy as np

from cloudsched.envs.observation import columns
from cloudsched.envs.scenario import Scenario
from cloudsched.evaluation import Episodes
from cloudsched.heuristics.catalog import load_heuristic
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.heuristics.foresight import ForesightPolicy

SCENARIO = Scenario(
    preset="slow_wake", workload="google_v2_bursty", settings={"episode_ticks": 120}
)


def test_it_sees_the_demand_of_the_next_ticks() -> None:
    episodes = Episodes(SCENARIO, range(3))
    config = load_heuristic("power_aware+headroom")
    policy = ForesightPolicy(episodes.env, config, num_ticks=6)
    seen: list[np.ndarray] = []
    plain = policy._heuristic.act
    column = columns(episodes.env.config.num_resources).work_rate
    policy._heuristic.act = lambda observation: (  # type: ignore[method-assign]
        seen.append(
            np.stack(
                [
                    episodes.env.engine.state.clusters["tick"].copy(),
                    observation["context"][:, column],
                ]
            )
        )
        or plain(observation)
    )
    episodes.run(policy)
    capacity = episodes.env.engine.fleet.total_capacity[0]
    tables = [episodes.env.workload.jobs(seed, 120) for seed in range(3)]
    for ticks, squashed in seen[::50]:
        for e, table in enumerate(tables):
            is_next = (table.arrival_tick > ticks[e]) & (table.arrival_tick <= ticks[e] + 6)
            share = table.demand[is_next, 0].sum() / capacity
            assert (
                squashed[e] == np.float32(share / (1.0 + share))
                or abs(squashed[e] - share / (1.0 + share)) < 1e-6
            )


def test_without_weight_foresight_changes_nothing() -> None:
    episodes = Episodes(SCENARIO, range(4))
    config = load_heuristic("power_aware+headroom").replace(headroom_trend=0.0)
    blind = episodes.run(HeuristicPolicy(episodes.env.config, config))
    seeing = episodes.run(ForesightPolicy(episodes.env, config))
    assert np.array_equal(blind.metrics["episode_return"], seeing.metrics["episode_return"])
