"""Each named heuristic does what its name says, on observations alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloudsched.config import ClusterConfig, FleetConfig
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.errors import ConfigError, UnknownNameError
from cloudsched.heuristics.catalog import BASES, HEURISTICS, compose, load_heuristic, make_heuristic
from cloudsched.heuristics.composed import HeuristicPolicy
from cloudsched.heuristics.ordering import ORDERS
from cloudsched.heuristics.parameters import HeuristicConfig
from cloudsched.heuristics.placement import PLACEMENTS
from cloudsched.metrics import episode_metrics
from cloudsched.sim.jobs import JobTable
from cloudsched.sim.state import ACTIVE, ASLEEP, WAKING


def cluster(**settings: Any) -> ClusterVectorEnv:
    return ClusterVectorEnv(
        1, copy=False, autoreset_mode="Disabled", settings={"episode_ticks": 60, **settings}
    )


def jobs(*rows: tuple[int, int, float, float]) -> JobTable:
    """Build a table of (arrival, duration, cpu, memory)."""
    return JobTable(
        arrival_tick=[row[0] for row in rows],
        duration_ticks=[row[1] for row in rows],
        demand=[row[2:] for row in rows],
    )


FOUR = ((0, 40, 0.30, 0.30), (0, 5, 0.20, 0.20), (1, 20, 0.10, 0.10), (1, 8, 0.40, 0.40))


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        # start_by: 0 + 24, 0 + 3, 1 + 12, 1 + 5; latest end: 64, 8, 33, 14
        ("fifo", [1, 0, 3, 2]),  # ties go to the window's order, which is by laxity
        ("sjf", [1, 3, 2, 0]),
        ("llf", [1, 3, 2, 0]),
        ("edf", [1, 3, 2, 0]),
    ],
)
def test_jobs_start_in_the_order_of_the_rule(order: str, expected: list[int]) -> None:
    env = cluster(visible_jobs=4)
    policy = HeuristicPolicy(env.config, compose(order, "first_fit", "never"))
    observation = env.reset_to([jobs(*FOUR)])
    env.advance(np.array([env.engine.wait_action]))  # so that jobs 2 and 3 have arrived
    started = []
    while len(started) < 4:
        env.advance(policy.act(observation))
        start = env.engine.state.jobs["start"][0, :4]
        started += [j for j in range(4) if start[j] >= 0 and j not in started]
    assert started == expected


def test_sjf_and_llf_differ_when_short_jobs_are_in_no_hurry() -> None:
    """An old long job can be more urgent than a new short one."""
    table = jobs((0, 30, 0.1, 0.1), (17, 10, 0.1, 0.1))  # due at 18 and at 23
    first = {}
    for order in ("sjf", "llf", "edf", "fifo"):
        env = cluster()
        policy = HeuristicPolicy(env.config, compose(order, "first_fit", "never"))
        observation = env.reset_to([table])
        for _ in range(17):
            env.advance(np.array([env.engine.wait_action]))
        env.advance(policy.act(observation))
        first[order] = int(np.argmax(env.engine.state.jobs["start"][0, :2] >= 0))
    assert first == {"sjf": 1, "llf": 0, "edf": 1, "fifo": 0}


def best_server(env: ClusterVectorEnv, score: Any) -> int:
    """Return the legal server for the first visible job with the lowest naive score."""
    engine = env.engine
    legal = np.flatnonzero(engine.mask[0, : engine.fleet.num_servers])
    job = engine.state.queue[0, engine.state.clusters["queue_head"][0]]
    demand = engine.state.demand[0, job]
    return int(min(legal, key=lambda n: (round(float(score(n, demand)), 9), n)))


def naive_scores(env: ClusterVectorEnv, last: int) -> dict[str, Any]:
    engine = env.engine
    free, capacity = engine.state.free[0], engine.fleet.capacity
    largest = capacity.max(axis=0)
    num_servers = len(capacity)

    def added_power(n: int, demand: np.ndarray) -> float:
        use = 1.0 - free[n, 0] / capacity[n, 0]
        low, high, exponent = (
            engine.fleet.idle_w[n],
            engine.fleet.max_w[n],
            engine.fleet.exponent[n],
        )
        return (high - low) * ((use + demand[0] / capacity[n, 0]) ** exponent - use**exponent)

    return {
        "round_robin": lambda n, d: (n - last - 1) % num_servers,
        "first_fit": lambda n, d: n,
        "best_fit": lambda n, d: ((free[n] - d) / largest).sum(),
        "worst_fit": lambda n, d: -((free[n] - d) / largest).sum(),
        "tetris": lambda n, d: -(free[n] / largest * (d / largest)).sum(),
        "least_power": added_power,
    }


@pytest.mark.parametrize(
    "placement", [name for name in PLACEMENTS if name != "first_fit_decreasing"]
)
def test_the_server_is_the_one_a_naive_scan_finds(placement: str) -> None:
    env = cluster(visible_jobs=3)
    rng = np.random.default_rng(5)
    arrival = np.sort(rng.integers(0, 60, 150))
    table = JobTable(
        arrival_tick=arrival,
        demand=rng.uniform(0.05, 0.4, (150, 2)),
        duration_ticks=rng.integers(3, 40, 150),
    )
    policy = HeuristicPolicy(env.config, compose("llf", placement, "never", scan_depth=1.0))
    observation = env.reset_to([table])
    last, compared, choices = -1, 0, 0
    while not env.engine.result.is_truncated[0]:
        row = env.engine.mask[0, :15]
        action = int(policy.act(observation)[0])
        if row.any():
            choices += row.sum() > 1
            expected = best_server(env, naive_scores(env, last)[placement])
            assert action == expected
            last = action
            compared += 1
        else:
            assert action == env.engine.wait_action
        env.advance(np.array([action]))
    assert compared > 80
    assert choices > 60


def test_first_fit_decreasing_takes_the_largest_job_first() -> None:
    env = cluster(visible_jobs=4)
    policy = make_heuristic("ffd", env.config)
    observation = env.reset_to([jobs(*((0, *row[1:]) for row in FOUR))])
    order = []
    for _ in range(4):
        env.advance(policy.act(observation))
        start = env.engine.state.jobs["start"][0, :4]
        order += [j for j in range(4) if start[j] >= 0 and j not in order]
    assert order == [3, 0, 1, 2]


def test_a_job_that_fits_nowhere_blocks_only_with_a_scan_depth_of_one() -> None:
    table = jobs((0, 5, 1.4, 1.4), (0, 5, 1.4, 1.4), (0, 9, 0.2, 0.2))
    started = {}
    for depth in (1.0, 5.0):
        env = cluster(fleet={"num_servers": 3})  # one server of each tier: one big job fits
        policy = HeuristicPolicy(env.config, compose("sjf", "best_fit", "never", scan_depth=depth))
        observation = env.reset_to([table])
        for _ in range(3):
            env.advance(policy.act(observation))
        started[depth] = env.engine.state.jobs["start"][0, :3].tolist()
    assert started == {1.0: [0, -1, -1], 5.0: [0, -1, 0]}


def test_a_held_job_waits_for_a_busy_server_until_it_becomes_urgent() -> None:
    env = cluster()
    policy = HeuristicPolicy(env.config, compose("llf", "best_fit", "never", hold_laxity=3.0))
    observation = env.reset_to([jobs((0, 20, 0.2, 0.2))])  # due at 12
    while env.engine.state.jobs["start"][0, 0] < 0:
        env.advance(policy.act(observation))
    assert env.engine.state.jobs["start"][0, 0] == 9


def one_server(**numbers: float) -> tuple[ClusterVectorEnv, HeuristicPolicy]:
    """Build a server of capacity one (efficient ones have 0.7 of the base) and a rule for it."""
    env = cluster(fleet={"num_servers": 1, "base_capacity": 1.0001 / 0.7})
    return env, HeuristicPolicy(env.config, compose("llf", "best_fit", "never", **numbers))


def test_a_job_that_can_wait_leaves_the_reserve_to_jobs_that_cannot() -> None:
    env, policy = one_server(reserve=0.6, reserve_laxity=5.0)
    table = jobs((0, 5, 0.5, 0.5), (0, 50, 0.2, 0.2), (1, 3, 0.4, 0.4))  # due at 3, 30 and 3
    observation = env.reset_to([table])
    until_tick(env, policy, observation, 10)
    # Half is free at first, less than the reserve; all of it when the short jobs have ended.
    assert env.engine.state.jobs["start"][0, :3].tolist() == [0, 5, 1]


def test_a_job_comes_to_use_the_reserve_as_its_deadline_nears() -> None:
    env, policy = one_server(reserve=0.8, reserve_laxity=5.0)
    observation = env.reset_to([jobs((0, 40, 0.5, 0.5), (0, 50, 0.3, 0.3))])  # due at 24 and 30
    until_tick(env, policy, observation, 40)
    # The first starts beside a whole free server; half of it is free for the other one, which may
    # cut into the reserve that far when it has 5 + 10 * 0.5 / 0.8 = 11.25 ticks left.
    assert env.engine.state.jobs["start"][0, :2].tolist() == [0, 19]


def test_dear_servers_stay_empty_where_a_cheap_one_has_room() -> None:
    env = cluster()
    rule = compose("fifo", "worst_fit", "never", place_dear=100.0)
    policy = HeuristicPolicy(env.config, rule)
    observation = env.reset_to([jobs(*((0, 50, 0.3, 0.3) for _ in range(10)))])
    until_tick(env, policy, observation, 1)
    busy = env.engine.state.servers["num_running"][0] > 0
    # Two fit on a server of 0.7: the five efficient ones take all ten.
    assert {env.engine.fleet.models[n] for n in np.flatnonzero(busy)} == {"efficient"}
    assert busy.sum() == 5


def idle_cluster(**settings: Any) -> tuple[ClusterVectorEnv, dict[str, Any]]:
    env = cluster(**settings)
    return env, env.reset_to([jobs((50, 5, 0.1, 0.1))])


def until_tick(env: ClusterVectorEnv, policy: Any, observation: Any, tick: int) -> np.ndarray:
    while env.engine.state.clusters["tick"][0] < tick:
        env.advance(policy.act(observation))
    return env.engine.state.servers["mode"][0]


def test_an_idle_timeout_keeps_the_spare_servers_and_the_most_efficient_ones() -> None:
    env, observation = idle_cluster()
    config = compose("fifo", "first_fit", "idle_timeout", timeout_ticks=4.0, spare_servers=3.0)
    policy = HeuristicPolicy(env.config, config)
    assert (until_tick(env, policy, observation, 4) == ACTIVE).all()
    mode = until_tick(env, policy, observation, 5)
    assert (mode == ASLEEP).sum() == 12
    # Watts at full load a unit of CPU: efficient 257, standard 300, power_hungry 343.
    assert {env.engine.fleet.models[n] for n in np.flatnonzero(mode == ACTIVE)} == {"efficient"}


def test_an_idle_timeout_wakes_servers_for_jobs_that_wait() -> None:
    env = cluster(wake_delay_ticks=3)
    table = jobs(*((20, 10, 0.5, 0.5) for _ in range(4)))
    policy = make_heuristic("llf+sleep", env.config)
    observation = env.reset_to([table])
    assert (until_tick(env, policy, observation, 20) == ASLEEP).sum() == 14
    assert (until_tick(env, policy, observation, 21) == WAKING).sum() >= 1
    until_tick(env, policy, observation, 30)
    assert (env.engine.state.jobs["start"][0, :4] >= 20).all()


def test_a_utilisation_band_sleeps_below_it_and_wakes_above_it() -> None:
    env = cluster(fleet={"num_servers": 6})
    table = jobs((0, 30, 0.35, 0.35), *((20, 10, 0.6, 0.2) for _ in range(6)))
    policy = HeuristicPolicy(
        env.config, compose("fifo", "best_fit", "utilisation_band", band_low=0.5, band_high=0.8)
    )
    observation = env.reset_to([table])
    mode = until_tick(env, policy, observation, 10)
    assert (mode == ACTIVE).sum() == 1  # 0.35 of 0.7 is in the band
    until_tick(env, policy, observation, 35)
    assert env.engine.state.clusters["started"][0] == 7
    assert env.engine.state.clusters["wake_requests"][0] >= 3


def test_headroom_keeps_use_plus_a_constant_awake() -> None:
    for constant, expected in ((0.0, 1), (2.0, 3), (4.0, 5)):
        env = cluster(fleet={"num_servers": 15, "base_capacity": 1.0})
        config = compose(
            "fifo",
            "first_fit",
            "headroom",
            headroom_constant=constant,
            headroom_root=0.0,
            headroom_queued=0.0,
            hysteresis=0.0,
            idle_bias=3.0,
        )
        policy = HeuristicPolicy(env.config, config)
        observation = env.reset_to([jobs((0, 50, 0.1, 0.1))])
        mode = until_tick(env, policy, observation, 20)
        awake = env.engine.fleet.capacity[mode == ACTIVE, 0].sum()
        worth = env.engine.fleet.capacity[:, 0].mean()
        used = 0.1
        assert awake >= used + constant * worth
        # No further idle server could sleep without cutting into the headroom.
        idle = (mode == ACTIVE) & (env.engine.state.servers["num_running"][0] == 0)
        if idle.any():
            smallest = env.engine.fleet.capacity[idle, 0].min()
            assert awake - smallest < used + constant * worth
        assert (mode == ACTIVE).sum() <= expected + 2


def test_no_sleep_controller_starves_a_job_that_fits_only_a_sleeping_server() -> None:
    """Plenty of small gaps, none large enough: a server must wake for the large job."""
    table = jobs(*((0, 55, 0.3, 0.3) for _ in range(6)), (20, 5, 1.3, 1.3))
    for sleep in ("idle_timeout", "utilisation_band", "headroom"):
        env = cluster(fleet={"num_servers": 9})
        policy = HeuristicPolicy(env.config, compose("fifo", "first_fit", sleep))
        observation = env.reset_to([table])
        # Put every idle server to sleep by hand first.
        while env.engine.state.clusters["started"][0] < 6:
            env.advance(policy.act(observation))
        for n in np.flatnonzero(env.engine.mask[0, 45:54]):
            env.advance(np.array([45 + n]))
        until_tick(env, policy, observation, 30)
        assert env.engine.state.jobs["start"][0, 6] >= 20, sleep


@pytest.mark.parametrize("name", HEURISTICS)
@pytest.mark.parametrize("preset", ["default", "columbia", "columbia_sleep"])
def test_no_heuristic_acts_illegally_or_starves(name: str, preset: str) -> None:
    env = ClusterVectorEnv(
        4, preset=preset, copy=False, autoreset_mode="Disabled", settings={"episode_ticks": 150}
    )
    policy = make_heuristic(name, env.config)
    observation, _ = env.reset(seed=0)
    policy.reset(4)
    while not env.advance(policy.act(observation)).is_truncated.all():
        pass
    assert (episode_metrics(env.engine)["illegal"] == 0).all()
    if preset == "default":
        # Deadlines are at most 30 ticks away: 60 ticks before the end, everything has started.
        jobs = env.engine.state.jobs[:, : env.engine.state.clusters["arrived"].min()]
        assert (jobs["start"][jobs["arrival"] < 90] >= 0).all()


def test_a_clusters_decisions_do_not_depend_on_the_batch() -> None:
    def play(seeds: list[int]) -> list[np.ndarray]:
        env = ClusterVectorEnv(len(seeds), copy=False, settings={"episode_ticks": 40})
        policy = make_heuristic("rr+sleep", env.config)
        observation, _ = env.reset(seed=seeds)
        policy.reset(len(seeds))
        actions = []
        for _ in range(60):
            actions.append(policy.act(observation).copy())
            env.advance(actions[-1])
        return actions

    together, alone = play([4, 9]), play([9])
    assert [a[1] for a in together] == [a[0] for a in alone]


def test_orders_and_placements_are_all_known_numbers() -> None:
    for table in (ORDERS, PLACEMENTS):
        for numbers in table.values():
            HeuristicConfig(**numbers)
    assert {base.order for base in BASES.values()} <= set(ORDERS)


def test_a_heuristic_survives_its_file(tmp_path: Path) -> None:
    config = compose("edf", "tetris", "headroom", hysteresis=1.25)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"parameters": config.to_dict()}))
    assert load_heuristic(str(path)) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "JSONDecodeError"),
        ("{}", "KeyError"),
        ("[1]", "TypeError"),
        ('{"parameters": 3}', "not a table"),
        ('{"parameters": {"hysteresys": 1}}', "Did you mean 'hysteresis'"),
        ('{"parameters": {"hysteresis": "big"}}', "hysteresis='big'"),
        ('{"parameters": {"sleep": "often"}}', "sleep='often'"),
    ],
)
def test_a_damaged_heuristic_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_heuristic(str(path))


def test_an_unknown_heuristic_gets_a_suggestion() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'best_fit'"):
        make_heuristic("bestfit", ClusterConfig())
    with pytest.raises(ConfigError, match="FileNotFoundError"):
        make_heuristic("absent.json", ClusterConfig())


def test_heuristics_for_each_cluster_must_match_the_clusters() -> None:
    policy = HeuristicPolicy(ClusterConfig(fleet=FleetConfig()), [HeuristicConfig()] * 3)
    with pytest.raises(ConfigError, match="3 heuristics for 2 clusters"):
        policy.reset(2)
