"""The compiled simulator and the naive one are the same simulator, to the last bit."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudsched.config import ClusterConfig, FleetConfig, RewardConfig
from cloudsched.sim.engine import ClusterEngine
from cloudsched.sim.jobs import JobTable
from cloudsched.sim.reference import ReferenceCluster

COUNTERS = (
    *("tick", "decisions_in_tick", "arrived", "started", "completed", "rejected", "unplaceable"),
    *("dropped", "violations", "new_violations", "late_job_ticks", "sleep_requests"),
    *("wake_requests", "illegal", "decisions", "energy_j", "cpu_ticks", "awake_ticks"),
    *("queue_length", "num_running", "num_awake", "power_w", "wake_delay_ticks", "num_late"),
)
RESOURCES = ("cpu", "memory", "gpu", "disk")


@st.composite
def configs(draw: st.DrawFn) -> ClusterConfig:
    fleet = FleetConfig(
        num_servers=draw(st.integers(1, 6)),
        kind=draw(st.sampled_from(["tiers", "measured"])),
        resources=RESOURCES[: draw(st.integers(1, 4))],
        base_capacity=draw(st.sampled_from([0.5, 1.0, 3.7])),
        fleet_seed=draw(st.integers(0, 5)),
    )
    return ClusterConfig(
        fleet=fleet,
        reward=RewardConfig(late_penalty=draw(st.sampled_from([0.0, 6.0]))),
        tick_s=draw(st.sampled_from([1.0, 60.0, 700.0])),
        episode_ticks=draw(st.integers(1, 40)),
        sleep=draw(st.booleans()),
        standby_factor=draw(st.sampled_from([0.0, 0.05, 1.0])),
        wake_power_factor=draw(st.sampled_from([0.5, 1.0, 3.0])),
        wake_delay_ticks=draw(st.integers(0, 4)),
        sla_latency_ticks=draw(st.sampled_from([None, 0, 3, 30])),
        sla_stretch=draw(st.sampled_from([None, 1.0, 1.6, 2.5])),
        drop_expired=draw(st.booleans()),
        queue_capacity=draw(st.sampled_from([1, 3, 50])),
        visible_jobs=draw(st.integers(1, 6)),
        window_order=draw(st.sampled_from(["fifo", "laxity"])),
        max_decisions_per_tick=draw(st.sampled_from([None, 1, 3])),
        wait_only_when_stuck=draw(st.booleans()),
    )


@st.composite
def job_tables(draw: st.DrawFn, config: ClusterConfig) -> JobTable:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_jobs = draw(st.integers(0, 60))
    largest = draw(st.sampled_from([0.3, 1.0, 6.0])) * config.fleet.base_capacity
    shape = (num_jobs, config.num_resources)
    return JobTable(
        arrival_tick=np.sort(rng.integers(0, config.episode_ticks + 3, num_jobs)),
        demand=np.where(rng.random(shape) < 0.1, 0.0, rng.uniform(0.0, largest, shape)),
        duration_ticks=rng.integers(1, draw(st.sampled_from([3, 20, 100])), num_jobs),
        time_of_day_s=float(rng.integers(0, 86_400)),
        day_s_per_tick=None if rng.random() < 0.5 else float(rng.uniform(0.0, 600.0)),
    )


def agree(engine: ClusterEngine, naive: ReferenceCluster) -> None:
    cluster = engine.state.clusters[0]
    for name in COUNTERS:
        assert cluster[name] == getattr(naive, name), name
    for name, expected in naive.observation().items():
        actual = getattr(engine.observation, name)[0]
        np.testing.assert_array_equal(actual, expected, err_msg=name)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_whole_episodes_agree_with_the_naive_simulator(data: st.DataObject) -> None:
    config = data.draw(configs())
    jobs = data.draw(job_tables(config))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    illegal_share = data.draw(st.sampled_from([0.0, 0.1]))
    wait_share = data.draw(st.sampled_from([0.0, 0.3]))
    naive = ReferenceCluster(config)
    engine = ClusterEngine(config)
    # A first episode leaves traces everywhere; the reset must remove them all.
    for table in (data.draw(job_tables(config)), jobs):
        delay = data.draw(st.sampled_from([None, 0, 1, 5]))
        engine.reset([table], wake_delays=None if delay is None else [delay])
        naive.reset(table, delay)
        agree(engine, naive)
        while naive.tick < config.episode_ticks:
            if rng.random() < illegal_share:
                action = int(rng.integers(-2, config.num_actions + 3))
            elif rng.random() < wait_share:
                action = engine.wait_action
            else:
                action = int(rng.choice(np.flatnonzero(engine.mask[0])))
            expected = naive.step(action)
            actual = engine.step(np.array([action]))
            assert actual.reward[0] == expected.reward
            assert actual.cost[0] == expected.cost
            assert actual.elapsed_ticks[0] == expected.elapsed_ticks
            assert actual.is_truncated[0] == expected.is_truncated
            agree(engine, naive)
        for row, job in zip(engine.state.jobs[0], naive.jobs, strict=False):
            assert (row["start"], row["server"]) == (job.start, job.server)
