"""The engine keeps its promises at sizes and inputs that the naive twin is too slow for."""

from __future__ import annotations

import numpy as np
import pytest

from cloudsched.config import ClusterConfig, FleetConfig, RewardConfig
from cloudsched.errors import ConfigError, InvalidJobsError
from cloudsched.metrics import episode_metrics
from cloudsched.sim.engine import ClusterEngine
from cloudsched.sim.fleet import Fleet, build_fleet
from cloudsched.sim.jobs import JobTable
from cloudsched.sim.state import ACTIVE


def random_table(config: ClusterConfig, rate: float, seed: int = 0) -> JobTable:
    rng = np.random.default_rng(seed)
    arrival = np.repeat(np.arange(config.episode_ticks), rng.poisson(rate, config.episode_ticks))
    return JobTable(
        arrival_tick=arrival,
        demand=rng.uniform(0.05, 0.5, (len(arrival), config.num_resources)),
        duration_ticks=rng.integers(1, 20, len(arrival)),
    )


def check_invariants(engine: ClusterEngine) -> None:
    state, fleet = engine.state, engine.fleet
    clusters = state.clusters
    assert (
        clusters["arrived"]
        == clusters["queue_length"]
        + clusters["num_running"]
        + clusters["completed"]
        + clusters["rejected"]
        + clusters["dropped"]
    ).all()
    assert (state.free >= 0).all()
    assert (state.free <= fleet.capacity).all()
    assert (clusters["num_running"] == state.servers["num_running"].sum(axis=1)).all()
    assert (clusters["power_w"] == state.servers["power_w"].sum(axis=1)).all()
    busy = state.servers["num_running"] > 0
    assert (state.servers["mode"][busy] == ACTIVE).all()
    for e in range(engine.num_clusters):
        head, length = clusters["queue_head"][e], clusters["queue_length"][e]
        queued = state.queue[e, head : head + length]
        np.testing.assert_array_equal(state.demand[e, queued].sum(axis=0), state.queued[e])


@pytest.mark.parametrize(
    ("num_servers", "visible_jobs", "num_resources", "num_clusters"),
    [
        (1, 1, 1, 3),
        (15, 5, 2, 8),
        (40, 32, 4, 2),
        pytest.param(5000, 32, 4, 1, marks=pytest.mark.slow),  # without the compiler, that is
    ],
)
def test_jobs_are_conserved_and_capacity_holds_at_every_size(
    num_servers: int, visible_jobs: int, num_resources: int, num_clusters: int
) -> None:
    config = ClusterConfig(
        fleet=FleetConfig(
            num_servers=num_servers, resources=("cpu", "memory", "gpu", "disk")[:num_resources]
        ),
        visible_jobs=visible_jobs,
        episode_ticks=8,
        wake_delay_ticks=2,
        max_decisions_per_tick=60,
    )
    engine = ClusterEngine(config, num_clusters)
    engine.reset([random_table(config, 0.3 * num_servers + 1, e) for e in range(num_clusters)])
    rng = np.random.default_rng(0)
    while not engine.result.is_truncated.all():
        engine.step(np.array([rng.choice(np.flatnonzero(row)) for row in engine.mask]))
        check_invariants(engine)
        for array in engine.observation:
            assert np.abs(array).max() <= 1.0
    assert engine.state.clusters["completed"].sum() > 0


def power_from_curves(engine: ClusterEngine) -> float:
    """Add up what the measured curves say that each server draws now."""
    watts = 0.0
    for n in range(engine.fleet.num_servers):
        idle_w = engine.fleet.idle_w[n]
        use = 1.0 - engine.state.free[0, n, 0] / engine.fleet.capacity[n, 0]
        curve_w = np.interp(use, np.linspace(0.0, 1.0, 11), engine.fleet.curve_w[n])
        watts += (curve_w, idle_w, 0.05 * idle_w)[engine.state.servers["mode"][0, n]]
    return watts


def test_energy_is_the_sum_of_the_servers_curves() -> None:
    config = ClusterConfig(
        fleet=FleetConfig(kind="measured", num_servers=5),
        episode_ticks=30,
        max_decisions_per_tick=10_000,  # so that only waiting ends a tick
    )
    engine = ClusterEngine(config)
    engine.reset([random_table(config, 1.0)])
    rng = np.random.default_rng(2)
    expected_j = 0.0
    while engine.state.clusters["tick"][0] < 30:
        action = rng.choice(np.flatnonzero(engine.mask[0]))
        if action == engine.wait_action:
            expected_j += 60.0 * power_from_curves(engine)
        engine.step(np.array([action]))
    assert engine.state.clusters["energy_j"][0] == pytest.approx(expected_j, abs=1e-2)


def test_a_job_larger_than_any_server_is_rejected_and_counted() -> None:
    config = ClusterConfig(episode_ticks=5)
    engine = ClusterEngine(config)
    engine.reset(
        [JobTable(arrival_tick=[0, 0], demand=[[1.5, 0.1], [0.5, 0.5]], duration_ticks=[2, 2])]
    )
    cluster = engine.state.clusters[0]
    assert (cluster["rejected"], cluster["unplaceable"], cluster["violations"]) == (1, 1, 1)
    assert cluster["queue_length"] == 1
    result = engine.step(np.array([engine.wait_action]))
    assert result.cost[0] == 1.0


def test_nothing_arriving_is_a_valid_episode() -> None:
    config = ClusterConfig(episode_ticks=5)
    engine = ClusterEngine(config)
    engine.reset(
        [
            JobTable(
                arrival_tick=np.zeros(0, int),
                demand=np.zeros((0, 2)),
                duration_ticks=np.zeros(0, int),
            )
        ]
    )
    for _ in range(5):
        engine.step(np.array([engine.wait_action]))
    metrics = episode_metrics(engine)
    assert metrics["arrived"][0] == 0
    assert metrics["sla_violation_rate"][0] == 0
    assert metrics["jobs_served"][0] == 1
    assert metrics["mean_power_w"][0] == engine.fleet.idle_w.sum()


def run_with(engine: ClusterEngine, refuse_above: float) -> float:
    """Place every visible job that fits, but never one whose CPU demand is above a limit."""
    total = 0.0
    while not engine.result.is_truncated[0]:
        action = engine.wait_action
        cluster = engine.state.clusters[0]
        for k in range(min(5, cluster["queue_length"])):
            job = engine.state.queue[0, cluster["queue_head"] + k]
            row = engine.mask[0, k * 15 : (k + 1) * 15]
            if engine.state.demand[0, job, 0] <= refuse_above and row.any():
                action = k * 15 + int(np.argmax(row))
                break
        total += float(engine.step(np.array([action])).reward[0])
    return total


def test_starving_big_jobs_does_not_pay_because_of_the_late_term() -> None:
    returns = {}
    for late_penalty in (0.0, 6.0):
        config = ClusterConfig(
            reward=RewardConfig(late_penalty=late_penalty, beta=5.0),
            episode_ticks=400,
            visible_jobs=5,
            window_order="fifo",
        )
        rng = np.random.default_rng(0)
        # Two big, long jobs (CPU 1.4: only the hungriest servers take them) among many small ones.
        arrival = np.sort(np.concatenate([[5, 20], rng.integers(0, 400, 300)]))
        demand = rng.uniform(0.05, 0.3, (302, 2))
        duration = rng.integers(2, 20, 302)
        big = np.searchsorted(arrival, [5, 20])
        demand[big] = 1.39
        duration[big] = 350
        table = JobTable(arrival_tick=arrival, demand=demand, duration_ticks=duration)
        engine = ClusterEngine(config)
        for refuse_above in (1.0, 10.0):
            engine.reset([table])
            returns[late_penalty, refuse_above] = run_with(engine, refuse_above)
    # With only the single charge for a violation, starving wins; the late term turns it around.
    assert returns[0.0, 1.0] > returns[0.0, 10.0]
    assert returns[6.0, 1.0] < returns[6.0, 10.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"demand": [[np.nan, 0.1]]}, "Job 0: demand"),
        ({"demand": [[-0.1, 0.1]]}, "Job 0: demand"),
        ({"demand": [[np.inf, 0.1]]}, "finite"),
        ({"demand": [0.1]}, "shapes do not fit"),
        ({"demand": np.zeros((1, 0))}, "no resource"),
        ({"duration_ticks": [0]}, "duration_ticks=0"),
        ({"duration_ticks": [1.5]}, "whole ticks"),
        ({"arrival_tick": [-1]}, "arrival_tick=-1"),
        ({"arrival_tick": [2**40]}, "arrival_tick"),
        ({"arrival_tick": [1, 2]}, "shapes do not fit"),
        ({"time_of_day_s": np.nan}, "time_of_day_s"),
        ({"day_s_per_tick": np.inf}, "day_s_per_tick"),
        ({"day_s_per_tick": -1.0}, "day_s_per_tick"),
    ],
)
def test_jobs_that_no_cluster_can_run_are_refused(changes: dict, message: str) -> None:
    good = {"arrival_tick": [0], "demand": [[0.1, 0.1]], "duration_ticks": [1]}
    with pytest.raises(InvalidJobsError, match=message):
        JobTable(**{**good, **changes})


def test_jobs_must_be_sorted_by_arrival() -> None:
    with pytest.raises(InvalidJobsError, match="Job 1: arrival_tick=2 is before"):
        JobTable(arrival_tick=[3, 2], demand=np.ones((2, 1)), duration_ticks=[1, 1])


def test_jobs_must_match_the_fleets_resources_and_clusters() -> None:
    engine = ClusterEngine(ClusterConfig())
    table = JobTable(arrival_tick=[0], demand=[[0.1]], duration_ticks=[1])
    with pytest.raises(InvalidJobsError, match="1 resources, but the fleet has 2"):
        engine.reset([table])
    with pytest.raises(InvalidJobsError, match="2 job tables for 1 clusters"):
        engine.reset([table, table])


@pytest.mark.parametrize("wake_delays", [[1], [1, -1], [1, 2, 3]])
def test_wake_delays_must_match_the_clusters(wake_delays: list[int]) -> None:
    config = ClusterConfig()
    with pytest.raises(ConfigError, match="wake_delays="):
        ClusterEngine(config, 2).reset([random_table(config, 1.0)] * 2, wake_delays=wake_delays)


def test_each_cluster_wakes_its_servers_after_its_own_delay() -> None:
    config = ClusterConfig(fleet=FleetConfig(num_servers=2), visible_jobs=1, episode_ticks=20)
    engine = ClusterEngine(config, 4)
    engine.reset([random_table(config, 0.1)] * 4, wake_delays=[0, 1, 3, 5])
    for _ in range(2):  # to sleep, and awake again
        engine.step(np.full(4, engine.wait_action - 2))
    ready_at = np.full(4, -1)
    for tick in range(8):
        is_ready = (engine.state.servers["mode"][:, 0] == ACTIVE) & (ready_at < 0)
        ready_at[is_ready] = tick
        engine.step(np.full(4, engine.wait_action))
    assert ready_at.tolist() == [0, 1, 3, 5]


def test_jobs_that_just_fill_a_server_fit() -> None:
    config = ClusterConfig(fleet=FleetConfig(num_servers=3), episode_ticks=5)
    engine = ClusterEngine(config)
    n = engine.fleet.models.index("efficient")
    engine.reset([JobTable(arrival_tick=[0, 0], demand=[[0.35, 0.35]] * 2, duration_ticks=[3, 3])])
    engine.step(np.array([n]))
    engine.step(np.array([n]))
    assert engine.state.servers["num_running"][0, n] == 2


def test_the_default_fleet_has_five_servers_of_each_tier() -> None:
    fleet = build_fleet(FleetConfig())
    assert sorted(fleet.models) == ["efficient"] * 5 + ["power_hungry"] * 5 + ["standard"] * 5
    assert fleet.models != tuple(sorted(fleet.models))
    assert fleet.models == build_fleet(FleetConfig()).models


def test_a_fleet_that_draws_less_under_load_is_refused() -> None:
    fleet = build_fleet(FleetConfig(num_servers=3))
    fields = {name: getattr(fleet, name) for name in fleet.__dataclass_fields__}
    with pytest.raises(ConfigError, match="Server 1: max_w"):
        Fleet(**{**fields, "max_w": fleet.idle_w * np.array([2.0, 1.0, 2.0])})
    with pytest.raises(ConfigError, match="capacity"):
        Fleet(**{**fields, "capacity": fleet.capacity * 0})
    with pytest.raises(ConfigError, match="shape"):
        Fleet(**{**fields, "idle_w": fleet.idle_w[:2]})
    with pytest.raises(ConfigError, match="negative or non-finite"):
        Fleet(**{**fields, "exponent": fleet.exponent * np.nan})
    with pytest.raises(ConfigError, match="models"):
        Fleet(**{**fields, "models": ("a",)})


def test_a_branch_goes_on_as_the_cluster_that_it_was_copied_from() -> None:
    config = ClusterConfig(episode_ticks=60, fleet=FleetConfig(num_servers=5))
    source, target = ClusterEngine(config, 3), ClusterEngine(config, 4)
    source.reset([random_table(config, 1.5, seed) for seed in range(3)], wake_delays=[1, 3, 2])
    rng = np.random.default_rng(0)

    def legal(mask: np.ndarray) -> np.ndarray:
        return np.array([rng.choice(np.flatnonzero(row)) for row in mask])

    for _ in range(100):
        source.step(legal(source.mask))
    rows, of = np.array([3, 0]), np.array([1, 1])
    target.branch(source, rows, of)
    num_jobs = len(random_table(config, 1.5, 1))
    assert list(target.state.clusters["num_jobs"]) == [num_jobs, 0, 0, num_jobs]
    for _ in range(150):
        actions = legal(source.mask)
        target.step(np.repeat(actions[1], 4))
        source.step(actions)
        for name in ("reward", "cost", "is_truncated"):
            own, others = getattr(target.result, name), getattr(source.result, name)
            assert (own[rows] == others[of]).all()
        for own, others in zip(target.observation, source.observation, strict=True):
            assert (own[rows] == others[of]).all()
    assert (target.state.clusters[rows] == source.state.clusters[of]).all()
    assert target.state.clusters["completed"][0] > 10


def test_a_branch_does_not_touch_where_it_came_from() -> None:
    config = ClusterConfig(episode_ticks=60, fleet=FleetConfig(num_servers=5))
    engine = ClusterEngine(config, 2)
    engine.reset([random_table(config, 1.5, seed) for seed in range(2)])
    engine.branch(engine, np.array([1]), np.array([0]))
    before = engine.state.clusters[0].copy()
    engine.end(np.array([0]))
    for _ in range(50):
        engine.step(np.full(2, engine.wait_action))
    before["tick"] = config.episode_ticks
    assert engine.state.clusters[0] == before
    assert engine.state.clusters["tick"][1] == 50
    assert list(engine.result.is_truncated) == [True, False]


def test_branches_of_other_rules_are_refused() -> None:
    engine = ClusterEngine(ClusterConfig(), 1)
    other = ClusterEngine(ClusterConfig(wake_delay_ticks=4), 1)
    with pytest.raises(ConfigError, match="same config"):
        engine.branch(other, np.array([0]), np.array([0]))
