"""No schedule uses less energy than the bound, and the bound is not far below what can be done."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cloudsched.config import ClusterConfig, FleetConfig
from cloudsched.energy_bound import energy_bound_j, power_envelope, taut_string, work_tube
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.scenario import Scenario
from cloudsched.evaluation import evaluate
from cloudsched.heuristics.catalog import make_heuristic
from cloudsched.sim.engine import ClusterEngine, start_by
from cloudsched.sim.fleet import build_fleet
from cloudsched.sim.jobs import JobTable

POLICIES = ("random", "rr", "ffd", "llf+sleep", "best_fit+band", "power_aware+headroom")
SCENARIOS = (
    Scenario(),
    Scenario(preset="slow_wake", workload="diurnal", load=0.8),
    Scenario(preset="measured", workload="google_v2_bursty"),
    Scenario(preset="columbia", workload="bursty"),  # no sleep, and expired jobs are dropped
    Scenario(preset="columbia_sleep", workload="poisson", load=1.5),
    Scenario(settings={"wake_power_factor": 0.0, "standby_factor": 0.0, "queue_capacity": 3}),
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: f"{s.preset}-{s.workload}-{s.load}")
def test_no_policy_uses_less_energy_than_the_bound(scenario: Scenario) -> None:
    short = scenario.replace(settings={**scenario.settings, "episode_ticks": 200})
    for name in POLICIES:
        metrics = evaluate(make_heuristic(name, short.config), short, range(3)).metrics
        assert (metrics["energy_bound_kwh"] <= metrics["energy_kwh"]).all(), name
        assert (metrics["energy_bound_kwh"] > 0.0).all()


def test_the_bound_holds_at_every_tick_of_an_episode() -> None:
    env = ClusterVectorEnv(1, copy=False, settings={"episode_ticks": 60})
    policy = make_heuristic("random", env.config)
    observation, _ = env.reset(seed=3)
    assert energy_bound_j(env.engine, 0) == 0.0
    for _ in range(150):
        env.advance(policy.act(observation))
        assert energy_bound_j(env.engine, 0) <= env.engine.state.clusters["energy_j"][0]


def test_servers_that_wake_for_ever_may_draw_less_than_asleep() -> None:
    settings = {"wake_power_factor": 0.0, "standby_factor": 0.5, "wake_delay_ticks": 1000}
    env = ClusterVectorEnv(1, copy=False, settings={"episode_ticks": 20, **settings})
    env.reset_to([JobTable(arrival_tick=[], demand=np.zeros((0, 2)), duration_ticks=[])])
    toggles = range(env.engine.wait_action - env.config.num_servers, env.engine.wait_action)
    for action in (*toggles, *toggles):  # all asleep, then all waking
        env.advance(np.array([action]))
    while not env.advance(np.array([env.engine.wait_action])).is_truncated.all():
        pass
    assert energy_bound_j(env.engine, 0) <= env.engine.state.clusters["energy_j"][0]


def test_a_server_that_is_always_full_draws_what_the_bound_says() -> None:
    config = ClusterConfig(fleet=FleetConfig(num_servers=1), episode_ticks=20)
    engine = ClusterEngine(config)
    whole = engine.fleet.capacity[0]
    engine.reset([JobTable(arrival_tick=[0], demand=[whole], duration_ticks=[20])])
    engine.step(np.array([0]))
    for _ in range(20):
        engine.step(np.array([engine.wait_action]))
    energy_j = float(engine.state.clusters["energy_j"][0])
    assert energy_bound_j(engine, 0) == pytest.approx(energy_j, rel=1e-6)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_no_schedule_of_a_tiny_instance_undercuts_the_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_servers, ticks, num_jobs = 2, 6, 3
    config = ClusterConfig(
        fleet=FleetConfig(num_servers=num_servers, fleet_seed=int(rng.integers(5))),
        episode_ticks=ticks,
        sla_latency_ticks=2,
        sla_stretch=None,
    )
    jobs = JobTable(
        arrival_tick=np.sort(rng.integers(0, 3, num_jobs)),
        demand=rng.uniform(0.1, 0.5, (num_jobs, 2)),
        duration_ticks=rng.integers(1, 5, num_jobs),
    )
    env = ClusterVectorEnv(1, copy=False, autoreset_mode="Disabled", settings=config.to_dict())
    policy = make_heuristic("llf", config)
    observation = env.reset_to([jobs])
    while not env.advance(policy.act(observation)).is_truncated.all():
        pass
    assert env.engine.state.clusters["violations"][0] == 0
    bound_j = energy_bound_j(env.engine, 0)
    done = work_tube(env.engine, 0)[1][-1]
    best_j = least_energy_j(env.engine, config, jobs, done)
    assert bound_j <= best_j
    assert bound_j >= 0.4 * best_j


def least_energy_j(
    engine: ClusterEngine, config: ClusterConfig, jobs: JobTable, done: float
) -> float:
    """Try every start in time on every server; idle servers sleep and wake for nothing."""
    ticks, best = config.episode_ticks, np.inf
    deadline = start_by(config, jobs)
    starts = [
        range(int(first), min(int(last), ticks - 1) + 1)
        for first, last in zip(jobs.arrival_tick, deadline, strict=True)
    ]
    choices = [itertools.product(start, range(config.num_servers)) for start in starts]
    for plan in itertools.product(*choices):
        used = np.zeros((ticks, config.num_servers, 2))
        for j, (start, server) in enumerate(plan):
            used[start : start + int(jobs.duration_ticks[j]), server] += jobs.demand[j]
        if (used > engine.fleet.capacity).any() or used[:, :, 0].sum() < done - 1e-9:
            continue
        best = min(best, sum(schedule_w(engine, config, row) for row in used) * config.tick_s)
    return best


def schedule_w(engine: ClusterEngine, config: ClusterConfig, used: NDArray[np.float64]) -> float:
    watts = 0.0
    for n, load in enumerate(used[:, 0] / engine.fleet.capacity[:, 0]):
        asleep_w = config.standby_factor * engine.fleet.idle_w[n]
        watts += asleep_w if load == 0.0 else float(engine.power_at(float(load))[n])
    return watts


@given(st.sampled_from(["tiers", "measured"]), st.booleans(), st.integers(0, 2**32 - 1))
def test_no_assignment_of_load_draws_less_than_the_envelope(
    kind: str, has_sleep: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    engine = ClusterEngine(ClusterConfig(fleet=FleetConfig(num_servers=7, kind=kind)))
    fleet = engine.fleet
    standby = 0.05 if has_sleep else 1.0
    loads, watts = power_envelope(fleet, standby)
    share = rng.random(7) ** rng.uniform(0.2, 4.0) * (rng.random(7) < rng.random())
    drawn = np.array([engine.power_at(float(u))[n] for n, u in enumerate(share)])
    if has_sleep:
        drawn = np.where(share == 0.0, standby * fleet.idle_w, drawn)
    total = float((share * fleet.capacity[:, 0]).sum())
    assert np.interp(total, loads, watts) <= drawn.sum()


@pytest.mark.parametrize("kind", ["tiers", "measured"])
def test_the_envelope_is_convex_from_all_asleep_to_all_full(kind: str) -> None:
    fleet = build_fleet(FleetConfig(num_servers=9, kind=kind))
    loads, watts = power_envelope(fleet, 0.05)
    slopes = np.diff(watts) / np.diff(loads)
    assert (np.diff(slopes) >= -1e-6).all()
    assert watts[0] == pytest.approx(0.05 * fleet.idle_w.sum(), abs=1e-4)
    assert loads[-1] == pytest.approx(fleet.capacity[:, 0].sum())
    assert watts[-1] == pytest.approx(fleet.max_w.sum(), rel=1e-6)


@st.composite
def tubes(draw: st.DrawFn) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Two rising curves of whole numbers from 0 to the same end, one not above the other."""
    steps = draw(st.lists(st.integers(0, 4), min_size=1, max_size=8))
    highest = np.concatenate([[0], np.cumsum(steps)])
    late = draw(st.lists(st.integers(0, 5), min_size=len(steps), max_size=len(steps)))
    lowest = np.maximum.accumulate(np.concatenate([[0], highest[1:] - np.array(late)]).clip(0))
    lowest[-1] = highest[-1]
    return lowest.astype(np.float64), highest.astype(np.float64)


@given(tubes())
@settings(max_examples=60)
def test_the_taut_string_is_the_cheapest_curve_for_any_convex_price(
    tube: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> None:
    lowest, highest = tube
    slopes = taut_string(lowest, highest)
    curve = np.concatenate([[0.0], np.cumsum(slopes)])
    assert (curve >= lowest - 1e-9).all()
    assert (curve <= highest + 1e-9).all()
    for price in (np.square, lambda slope: np.maximum(slope, 2.0 * slope - 1.5)):
        exact = float(price(slopes).sum())
        on_grid = cheapest_on_grid(lowest, highest, price, cells=12)
        assert exact <= on_grid + 1e-9
        assert on_grid <= exact + 0.2 * len(slopes)


def cheapest_on_grid(lowest, highest, price, cells: int) -> float:  # type: ignore[no-untyped-def]
    """Dynamic programming over curves whose heights are multiples of 1 / cells."""
    heights = np.arange(int(highest[-1]) * cells + 1) / cells
    cost = np.where(heights == 0.0, 0.0, np.inf)
    for low, high in zip(lowest[1:], highest[1:], strict=True):
        rise = heights[:, None] - heights[None, :]
        step = np.where(rise >= 0.0, price(np.maximum(rise, 0.0)), np.inf)
        cost = (cost[None, :] + step).min(axis=1)
        cost[(heights < low) | (heights > high)] = np.inf
    return float(cost[-1])
