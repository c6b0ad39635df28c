"""The rules of the cluster, checked by hand on clusters small enough to work out on paper."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cloudsched.config import ClusterConfig, FleetConfig, RewardConfig
from cloudsched.errors import ConfigError, InvalidJobsError
from cloudsched.sim.fleet import Fleet
from cloudsched.sim.jobs import JobTable
from cloudsched.sim.reference import ReferenceCluster
from cloudsched.sim.state import ACTIVE, ASLEEP, NEVER, NONE, WAKING

FREE_OF_CHARGE = RewardConfig(
    alpha=0, beta=0, late_penalty=0, toggle_penalty=0, illegal_penalty=0, cost_late_rate=0
)


def table(*rows: tuple[int, int, float], time_of_day_s: float = 0.0) -> JobTable:
    """Jobs as (arrival, duration, demand); they demand as much memory as CPU."""
    return JobTable(
        arrival_tick=np.array([row[0] for row in rows], dtype=np.int32),
        duration_ticks=np.array([row[1] for row in rows], dtype=np.int32),
        demand=np.array([[row[2]] * 2 for row in rows]).reshape(-1, 2),
        time_of_day_s=time_of_day_s,
    )


def linear_fleet(*capacities: float) -> Fleet:
    """Servers that draw 100 W idle, 300 W at full load, and in proportion between."""
    num_servers = len(capacities)
    return Fleet(
        resources=("cpu", "memory"),
        models=("linear",) * num_servers,
        capacity=np.array([[capacity] * 2 for capacity in capacities]),
        idle_w=np.full(num_servers, 100.0),
        max_w=np.full(num_servers, 300.0),
        exponent=np.ones(num_servers),
        curve_w=np.zeros((num_servers, 11)),
    )


def cluster_of(
    jobs: JobTable, *, capacities: tuple[float, ...] = (1.0,), **settings: Any
) -> ReferenceCluster:
    """A cluster of linear servers, reset with these jobs; two of them are visible."""
    settings = {"visible_jobs": 2, **settings}
    config = ClusterConfig(fleet=FleetConfig(num_servers=len(capacities)), **settings)
    cluster = ReferenceCluster(config, linear_fleet(*capacities))
    cluster.reset(jobs)
    return cluster


def wait(cluster: ReferenceCluster, ticks: int = 1) -> Any:
    """Let ticks pass; return what the last gave."""
    for _ in range(ticks):
        result = cluster.step(cluster.config.num_actions - 1)
    return result


def toggle(cluster: ReferenceCluster, server: int) -> Any:
    """Put a server to sleep or wake it."""
    config = cluster.config
    return cluster.step(config.visible_jobs * config.num_servers + server)


@pytest.mark.parametrize(
    ("tier", "capacity", "idle_w", "half_w", "max_w"),
    [
        ("efficient", 0.7, 70.0, 70 + 110 * 0.5**1.2, 180.0),
        ("standard", 1.0, 100.0, 100 + 200 * 0.5**1.4, 300.0),
        ("power_hungry", 1.4, 150.0, 150 + 330 * 0.5**1.6, 480.0),
    ],
)
def test_power_follows_mode_and_tier(
    tier: str, capacity: float, idle_w: float, half_w: float, max_w: float
) -> None:
    config = ClusterConfig(
        fleet=FleetConfig(num_servers=3), standby_factor=0.05, wake_power_factor=0.5
    )
    cluster = ReferenceCluster(config)
    n = cluster.fleet.models.index(tier)
    cluster.reset(table((0, 9, capacity / 2)))
    assert cluster.server_power_w(cluster.servers[n]) == idle_w
    cluster.step(n)
    # The grid holds half of 0.7 only to within a millionth, hence not exactly half the load.
    assert cluster.server_power_w(cluster.servers[n]) == pytest.approx(half_w, abs=1e-3)

    cluster.reset(table((0, 9, capacity)))
    cluster.step(n)
    assert cluster.server_power_w(cluster.servers[n]) == max_w

    cluster.reset(table())
    server = cluster.servers[n]
    toggle(cluster, n)
    assert cluster.server_power_w(server) == pytest.approx(0.05 * idle_w, abs=1e-6)
    toggle(cluster, n)
    assert cluster.server_power_w(server) == 0.5 * idle_w


def test_a_measured_curve_is_interpolated_between_its_points() -> None:
    fleet = Fleet(
        resources=("cpu", "memory"),
        models=("measured",),
        capacity=np.array([[2.0, 2.0]]),
        idle_w=np.array([50.0]),
        max_w=np.array([400.0]),
        exponent=np.zeros(1),
        curve_w=np.array([[50.0, 80, 100, 140, 150, 160, 170, 180, 200, 300, 400]]),
    )
    cluster = ReferenceCluster(ClusterConfig(fleet=FleetConfig(num_servers=1)), fleet)
    cluster.reset(table((0, 9, 0.5), (0, 9, 0.5), (0, 9, 1.0)))
    watts = [cluster.power_w]
    for _ in range(2):
        cluster.step(0)
        watts.append(cluster.power_w)
    # The default clock of one server ends the tick after two decisions, so it is tick 1 now.
    cluster.step(0)
    watts.append(cluster.power_w)
    # Loads 0, 25, 50 and 100 %; at 25 % halfway from 100 W (20 %) to 140 W (30 %).
    assert watts == [50.0, 120.0, 160.0, 400.0]


def test_energy_is_power_times_seconds() -> None:
    cluster = cluster_of(table((0, 2, 0.5)), tick_s=30.0, reward=RewardConfig(alpha=3.0))
    cluster.step(0)
    rewards = [wait(cluster).reward for _ in range(3)]
    # Half load is 200 W of 300 W for two ticks, then idle at 100 W.
    assert rewards == [-2.0, -2.0, -1.0]
    assert cluster.energy_j == (200 + 200 + 100) * 30
    assert cluster.cpu_ticks == 2 * 0.5
    assert cluster.awake_ticks == 3


def test_watts_are_rounded_to_the_grid_so_that_sums_are_exact() -> None:
    cluster = cluster_of(table(), capacities=(1.0, 1.0), standby_factor=0.001)
    toggle(cluster, 0)
    steps = cluster.power_w * 2**20
    assert steps == int(steps)
    assert cluster.power_w == pytest.approx(0.1 + 100, abs=2**-20)


@pytest.mark.parametrize(
    ("latency", "stretch", "duration", "slack"),
    [
        (30, 1.6, 10, 6),  # 0.6 x 10, although 1.6 - 1 is a little above 0.6 in floats
        (30, 1.6, 5, 3),
        (30, 1.6, 7, 5),  # 4.2, rounded up
        (30, 1.6, 1, 1),
        (30, 1.6, 100, 30),
        (30, 1.0, 50, 1),  # never less than one tick of stretch
        (0, 1.6, 50, 0),
        (None, 1.6, 100, 60),
        (5, None, 100, 5),
    ],
)
def test_slack_is_the_smaller_of_latency_and_stretch(
    latency: int | None, stretch: float | None, duration: int, slack: int
) -> None:
    cluster = cluster_of(
        table((0, 1, 0.5), (4, duration, 0.5)), sla_latency_ticks=latency, sla_stretch=stretch
    )
    assert cluster.jobs[1].start_by == 4 + slack


def test_without_both_knobs_no_deadline_ever_passes() -> None:
    cluster = cluster_of(
        table((0, 1, 0.5)), sla_latency_ticks=None, sla_stretch=None, episode_ticks=50
    )
    assert cluster.jobs[0].start_by == NEVER
    assert cluster.observation()["jobs"][0, -2] == 1.0
    wait(cluster, 50)
    assert (cluster.violations, cluster.late_job_ticks) == (0, 0)


def test_a_deadline_beyond_the_last_tick_number_is_never() -> None:
    cluster = cluster_of(table((7, 2**30, 0.5)), sla_latency_ticks=None, sla_stretch=2.999999999)
    assert cluster.jobs[0].start_by == NEVER


def test_a_violation_is_counted_once_and_late_ticks_go_on() -> None:
    rewards = RewardConfig(alpha=0, beta=60, late_penalty=6, cost_late_rate=0.25)
    cluster = cluster_of(table((0, 9, 0.5)), capacities=(1, 1), sla_latency_ticks=2, reward=rewards)
    results = [wait(cluster) for _ in range(4)]
    # In time at ticks 0 and 1. Not started by the end of tick 2: one violation (60 / 2 servers),
    # and late from then on (6 / 2 servers a tick).
    assert [r.reward for r in results] == [0.0, 0.0, -33.0, -3.0]
    assert [r.cost for r in results] == [0.0, 0.0, 1.25, 0.25]
    assert (cluster.violations, cluster.late_job_ticks) == (1, 2)

    assert cluster.step(0).elapsed_ticks == 0  # a late job still has to run
    assert wait(cluster).reward == 0.0
    assert (cluster.violations, cluster.late_job_ticks, cluster.num_running) == (1, 2, 1)


def test_a_start_in_the_last_allowed_tick_is_in_time() -> None:
    cluster = cluster_of(table((0, 9, 0.5)), sla_latency_ticks=2)
    wait(cluster, 2)
    cluster.step(0)
    wait(cluster, 3)
    assert (cluster.violations, cluster.jobs[0].start) == (0, 2)


def test_an_expired_job_is_dropped_where_the_rules_say_so() -> None:
    rewards = RewardConfig(alpha=0, beta=60, late_penalty=6)
    cluster = cluster_of(
        table((0, 9, 0.5), (0, 9, 0.5), (1, 9, 0.5)),
        sla_latency_ticks=1,
        drop_expired=True,
        reward=rewards,
    )
    wait(cluster)
    assert wait(cluster).reward == -120.0  # two violations on one server, and nobody is late
    assert (cluster.dropped, cluster.violations, cluster.queue_length) == (2, 2, 1)
    wait(cluster)
    assert (cluster.dropped, cluster.violations, cluster.queue_length) == (3, 3, 0)
    assert cluster.late_job_ticks == 0


def test_an_arrival_to_a_full_queue_is_rejected_and_violates() -> None:
    rewards = RewardConfig(alpha=0, beta=60, late_penalty=0)
    cluster = cluster_of(
        table((0, 1, 0.25), (0, 2, 0.25), (0, 3, 0.25), (1, 4, 0.25)),
        queue_capacity=2,
        reward=rewards,
    )
    assert (cluster.arrived, cluster.rejected, cluster.unplaceable) == (3, 1, 0)
    assert (cluster.violations, cluster.queue_length) == (1, 2)
    assert cluster.step(0).reward == 0.0  # paid for when the tick ends
    assert wait(cluster).reward == -60.0
    assert [job.duration for job in cluster.queue] == [2, 4]  # there was room for the fourth
    assert cluster.rejected == 1


def test_a_job_that_fits_on_no_server_is_rejected_at_once() -> None:
    cluster = cluster_of(table((0, 5, 2.5), (0, 5, 2.0)), capacities=(1.0, 2.0))
    assert (cluster.arrived, cluster.rejected, cluster.unplaceable) == (2, 1, 1)
    assert [job.demand for job in cluster.queue] == [[2.0, 2.0]]
    assert cluster.violations == 1


def test_an_unplaceable_job_takes_no_room_in_the_queue() -> None:
    cluster = cluster_of(table((0, 5, 9.0), (0, 5, 0.5)), queue_capacity=1)
    assert (cluster.rejected, cluster.unplaceable, cluster.queue_length) == (1, 1, 1)


@pytest.mark.parametrize(
    ("order", "expected"), [("laxity", [4, 10, 12, 5, 20]), ("fifo", [10, 4, 12, 20, 5])]
)
def test_equal_laxity_keeps_the_order_of_arrival(order: str, expected: list[int]) -> None:
    # With a stretch of 2 the slack is the duration, at most 10, so that three jobs share the
    # deadline 10: two from tick 0, and the last one. Durations tell them apart.
    jobs = table((0, 10, 0.1), (0, 4, 0.1), (0, 12, 0.1), (1, 20, 0.1), (5, 5, 0.1))
    cluster = cluster_of(jobs, window_order=order, sla_latency_ticks=10, sla_stretch=2.0)
    wait(cluster, 5)
    deadlines = {job.duration: job.start_by for job in cluster.queue}
    assert deadlines == {10: 10, 4: 4, 12: 10, 20: 11, 5: 10}
    assert [job.duration for job in cluster.queue] == expected


def test_jobs_after_the_last_tick_never_arrive() -> None:
    cluster = cluster_of(table((0, 1, 0.1), (2, 1, 0.1), (3, 1, 0.1)), episode_ticks=3)
    result = wait(cluster, 3)
    assert result.is_truncated
    assert cluster.arrived == 2


def test_rates_are_means_until_the_horizon_and_fade_after_it() -> None:
    jobs = table((0, 2, 0.5), (0, 2, 8.0), *[(2, 4, 0.25)] * 4)
    cluster = cluster_of(jobs)
    assert cluster.arrival_rate == [2.0, 2.0, 2.0]
    assert cluster.work_rate == [17.0, 17.0, 17.0]  # the unplaceable job counts: 2 x 0.5 + 2 x 8
    wait(cluster)
    assert cluster.arrival_rate == [1.0, 1.0, 1.0]
    wait(cluster)
    assert cluster.arrival_rate == pytest.approx([2.0, 2.0, 2.0])  # 6 jobs in 3 ticks
    assert cluster.work_rate == pytest.approx([7.0, 7.0, 7.0])  # 17 + 4 x 4 x 0.25 = 21 in 3 ticks
    wait(cluster, 3)
    # After six ticks the mean is 6 / 6; the horizon of five takes 6 / 5 and fades it by a fifth.
    assert cluster.arrival_rate == pytest.approx([0.96, 1.0, 1.0])
    assert cluster.work_rate == pytest.approx([21 / 5 * 0.8, 3.5, 3.5])


def test_a_sleeping_server_never_takes_a_job() -> None:
    cluster = cluster_of(table((0, 5, 0.5)), max_decisions_per_tick=9)
    toggle(cluster, 0)
    assert cluster.servers[0].mode == ASLEEP
    assert cluster.mask().tolist() == [0, 0, 1, 1]
    cluster.step(0)
    assert (cluster.illegal, cluster.started, cluster.queue_length) == (1, 0, 1)


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_a_waking_server_is_active_after_the_wake_delay(delay: int) -> None:
    cluster = cluster_of(table((0, 5, 0.5)), wake_delay_ticks=delay, max_decisions_per_tick=9)
    server = cluster.servers[0]
    toggle(cluster, 0)
    wait(cluster, 3)
    toggle(cluster, 0)
    for left in range(delay, 0, -1):
        assert (server.mode, server.wake_left) == (WAKING, left)
        assert cluster.mask().tolist() == [0, 0, 0, 1]  # takes no job and cannot be toggled
        assert cluster.observation()["servers"][0, 10] == np.float32(left / (left + 5))
        wait(cluster)
    assert (server.mode, server.wake_left, server.idle_since) == (ACTIVE, 0, 3 + delay)
    assert cluster.mask().tolist() == [1, 0, 1, 1]
    # Asleep for three ticks at 5 W, then waking at 100 W.
    assert cluster.energy_j == (3 * 5 + delay * 100) * 60
    assert cluster.awake_ticks == delay


def test_without_wake_delay_a_server_wakes_within_the_tick() -> None:
    cluster = cluster_of(table((0, 5, 0.5)), wake_delay_ticks=0, max_decisions_per_tick=9)
    toggle(cluster, 0)
    wait(cluster, 2)
    toggle(cluster, 0)
    server = cluster.servers[0]
    assert (server.mode, server.idle_since) == (ACTIVE, 2)
    cluster.step(0)
    assert (cluster.started, cluster.jobs[0].start) == (1, 2)


def test_only_a_request_to_sleep_is_charged() -> None:
    rewards = RewardConfig(alpha=0, toggle_penalty=0.5)
    cluster = cluster_of(table(), capacities=(1, 1, 1), reward=rewards)
    assert toggle(cluster, 1) == (-2.5, 0.0, 0, False)  # 0.5 x 15 / 3 servers
    assert toggle(cluster, 1) == (0.0, 0.0, 0, False)
    assert (cluster.sleep_requests, cluster.wake_requests) == (1, 1)


def test_a_server_with_a_job_may_not_be_put_to_sleep() -> None:
    cluster = cluster_of(table((0, 2, 0.5)), max_decisions_per_tick=9)
    cluster.step(0)
    assert cluster.mask().tolist() == [0, 0, 0, 1]
    toggle(cluster, 0)
    assert (cluster.illegal, cluster.servers[0].mode) == (1, ACTIVE)
    wait(cluster)
    assert cluster.mask().tolist() == [0, 0, 1, 1]
    assert cluster.servers[0].idle_since == 2


def test_without_sleep_there_are_no_toggles() -> None:
    cluster = cluster_of(table((0, 2, 0.5)), capacities=(1, 1), sleep=False)
    assert cluster.mask().tolist() == [1, 1, 0, 0, 1]
    assert wait(cluster).elapsed_ticks == 1
    assert cluster.illegal == 0


def test_a_job_holds_its_demand_from_start_to_end() -> None:
    cluster = cluster_of(
        table((0, 3, 0.75), (0, 1, 0.5)), capacities=(1.0, 1.0), window_order="fifo"
    )
    assert cluster.step(1) == (0.0, 0.0, 0, False)  # the first job on the second server
    job = cluster.jobs[0]
    assert (job.start, job.end, job.server, cluster.jobs[1].server) == (0, 3, 1, NONE)
    assert cluster.servers[1].free == [0.25, 0.25]
    # The second job has moved up; it fits only beside the first one's server.
    assert cluster.mask().tolist() == [1, 0, 0, 0, 1, 0, 1]
    wait(cluster, 2)
    assert cluster.num_running == 1
    wait(cluster)
    assert (cluster.num_running, cluster.completed) == (0, 1)
    assert cluster.servers[1].free == [1.0, 1.0]
    assert cluster.mask().tolist() == [1, 1, 0, 0, 1, 1, 1]


def test_every_resource_has_to_fit() -> None:
    config = ClusterConfig(fleet=FleetConfig(num_servers=1), visible_jobs=2)
    cluster = ReferenceCluster(config, linear_fleet(1.0))
    jobs = JobTable(
        arrival_tick=np.array([0, 0]),
        duration_ticks=np.array([5, 5]),
        demand=np.array([[0.1, 0.75], [0.1, 0.5]]),
    )
    cluster.reset(jobs)
    assert cluster.mask().tolist() == [1, 1, 1, 1]
    cluster.step(0)
    assert cluster.mask().tolist() == [0, 0, 0, 1]


def test_any_visible_job_may_be_placed_and_the_rest_close_up() -> None:
    jobs = table((0, 1, 0.1), (0, 2, 0.1), (0, 3, 0.1))
    cluster = cluster_of(jobs, capacities=(1.0, 1.0), window_order="fifo")
    cluster.step(1 * 2 + 0)
    assert [job.duration for job in cluster.queue] == [1, 3]
    assert [job.duration for job in cluster.servers[0].running] == [2]


def test_a_tick_ends_by_itself_after_its_decisions() -> None:
    jobs = table(*[(0, 9, 0.1)] * 7)
    cluster = cluster_of(jobs, max_decisions_per_tick=3)
    assert [cluster.step(0).elapsed_ticks for _ in range(7)] == [0, 0, 1, 0, 0, 1, 0]
    assert (cluster.tick, cluster.decisions_in_tick, cluster.decisions) == (2, 1, 7)
    assert [job.start for job in cluster.jobs] == [0, 0, 0, 1, 1, 1, 2]


def test_two_decisions_a_server_is_the_default_clock() -> None:
    cluster = cluster_of(table(*[(0, 9, 0.1)] * 5), capacities=(1.0, 1.0))
    assert [cluster.step(0).elapsed_ticks for _ in range(5)] == [0, 0, 0, 1, 0]


def test_the_classic_clock_pays_for_a_tick_with_every_action() -> None:
    cluster = cluster_of(
        table((0, 9, 0.5)), max_decisions_per_tick=1, reward=RewardConfig(alpha=3.0)
    )
    assert cluster.step(0) == (-2.0, 0.0, 1, False)


@pytest.mark.parametrize("action", [-1, 4, 10**6, 1])
def test_an_illegal_action_acts_as_wait_and_is_charged(action: int) -> None:
    # Actions of this cluster: two placements, of which only the first has a job; toggle; wait.
    cluster = cluster_of(table((0, 9, 0.5)), reward=RewardConfig(alpha=3.0, illegal_penalty=10.0))
    assert cluster.step(action) == (-11.0, 0.0, 1, False)  # 3 x 100 W / 300 W for the tick
    assert (cluster.illegal, cluster.tick, cluster.started) == (1, 1, 0)
    assert cluster.decisions == 1


def test_waiting_is_illegal_while_a_job_could_be_placed_where_the_rules_say_so() -> None:
    cluster = cluster_of(table((0, 9, 0.75), (0, 9, 0.75)), wait_only_when_stuck=True)
    assert cluster.mask().tolist() == [1, 1, 1, 0]
    wait(cluster)
    assert (cluster.illegal, cluster.tick) == (1, 1)
    cluster.step(0)
    assert cluster.mask().tolist() == [0, 0, 0, 1]
    wait(cluster)
    assert cluster.illegal == 1


def test_an_episode_is_truncated_and_then_stands_still() -> None:
    cluster = cluster_of(table((0, 2, 0.5)), episode_ticks=2, reward=FREE_OF_CHARGE)
    cluster.step(0)
    assert [wait(cluster).is_truncated for _ in range(2)] == [False, True]
    assert (cluster.completed, cluster.decisions) == (1, 3)
    assert wait(cluster) == (0.0, 0.0, 0, True)
    assert cluster.step(-5) == (0.0, 0.0, 0, True)
    assert (cluster.tick, cluster.decisions, cluster.illegal) == (2, 3, 0)
    assert cluster.mask().tolist() == [0, 0, 1, 1]


def test_reset_forgets_the_last_episode() -> None:
    cluster = cluster_of(table((0, 9, 0.5), (0, 9, 0.75)), sla_latency_ticks=0)
    cluster.step(0)
    wait(cluster, 3)
    cluster.step(-1)
    cluster.reset(table())
    fresh = cluster_of(table(), sla_latency_ticks=0)
    for name in ("tick", "arrived", "started", "violations", "illegal", "decisions", "energy_j"):
        assert getattr(cluster, name) == 0
    for name, values in fresh.observation().items():
        np.testing.assert_array_equal(cluster.observation()[name], values)


def test_the_observation_says_what_is_so() -> None:
    # Tick 0: jobs of 0.5 for 3 ticks and of 1.0 for 10 start on server 1 (capacity 2).
    # Then four ticks pass with server 0 asleep from the first on. At tick 4 a job has waited 1.
    jobs = table((0, 3, 0.5), (0, 10, 1.0), (3, 10, 0.5), time_of_day_s=21_600 - 4 * 60)
    cluster = cluster_of(jobs, capacities=(1.0, 2.0), max_decisions_per_tick=8)
    cluster.step(1)
    cluster.step(1)
    two_jobs = cluster.observation()["servers"][1, -5:]
    expected = np.array([2 / 10, 3 / 33, 10 / 40, 0, 0.25], dtype=np.float32)
    np.testing.assert_array_equal(two_jobs, expected)
    toggle(cluster, 0)
    wait(cluster, 4)
    toggle(cluster, 0)
    observation = cluster.observation()

    power_shares = [100 / 300, 1.0, 200 / 300]
    asleep_then_waking = [0.5, 0.5, 0.5, 0.5, *power_shares, 0, 1, 0, 1 / 6, 0, 0, 0, 0, 0]
    # One job left, which ends at tick 10: in 6 ticks, so nothing is released within 5.
    busy = [0.5, 0.5, 1, 1, *power_shares, 1, 0, 0, 0, 1 / 9, 6 / 36, 6 / 36, 0, 0]
    expected_servers = np.array([asleep_then_waking, busy], dtype=np.float32)
    np.testing.assert_array_equal(observation["servers"], expected_servers)

    # Slack is min(30, 0.6 x 10) = 6, so the deadline is tick 9, in 5 ticks.
    waiting = [0.25, 0.25, 10 / 40, 1 / 31, 5 / 35, 1.0]
    expected_jobs = np.array([waiting, [0.0] * 6], dtype=np.float32)
    np.testing.assert_array_equal(observation["jobs"], expected_jobs)

    # Arrivals 2, 0, 0, 1, 0 and work 11.5, 0, 0, 5, 0 of a capacity of 3, over five ticks. Six in
    # the morning is a quarter of a day. Waking draws 100 W, half load 200 W, of 600 W.
    rate, work = 3 / 5, 16.5 / 5 / 3
    work_rms = math.sqrt((11.5**2 + 5**2) / 5) / 3
    expected_context = [
        1 / 3,
        *[(0.5 / 3) / (0.5 / 3 + 1)] * 2,
        *[rate / (rate + 2)] * 3,
        *[work / (work + 1)] * 3,
        *[1.0, 0.0, 1.0, 0.5, 1 / 8],
        *[1 / 6, 0.0, work_rms / (work_rms + 1)],
    ]
    np.testing.assert_allclose(observation["context"], expected_context, rtol=1e-6, atol=1e-6)
    assert observation["context"].dtype == np.float32
    # The job fits on server 1 alone; server 0 is waking and server 1 busy: no toggles.
    assert observation["action_mask"].tolist() == [0, 1, 0, 0, 0, 0, 1]
    assert observation["action_mask"].dtype == np.int8

    wait(cluster)
    ends_in_five_ticks = cluster.observation()["servers"][1]
    assert ends_in_five_ticks[-1] == 0.5  # 1.0 of a largest capacity of 2.0 comes back
    wait(cluster, 5)
    late = cluster.observation()["jobs"][0]
    assert late[4] == np.float32(-1 / 31)  # a tick past the deadline
    assert cluster.observation()["context"][-2] == np.float32(1 / 3)  # one late job, two servers
    idle = cluster.observation()["servers"][0]
    assert idle[-2] == np.float32(5 / 35)  # awake and idle since tick 5


def test_a_fleet_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(2, 2\); expected \(1, 2\)"):
        ReferenceCluster(ClusterConfig(fleet=FleetConfig(num_servers=1)), linear_fleet(1.0, 1.0))


def test_jobs_with_other_resources_are_refused() -> None:
    jobs = JobTable(
        arrival_tick=np.array([0]), duration_ticks=np.array([1]), demand=np.array([[0.5]])
    )
    with pytest.raises(InvalidJobsError, match="1 resources, the fleet has 2"):
        cluster_of(jobs)


@pytest.mark.parametrize("seed", range(12))
def test_no_job_is_lost_at_any_step_of_a_random_episode(seed: int) -> None:
    rng = np.random.default_rng(seed)
    config = ClusterConfig(
        fleet=FleetConfig(num_servers=4, kind=("tiers", "measured")[seed % 2]),
        episode_ticks=60,
        queue_capacity=6,
        visible_jobs=3,
        wake_delay_ticks=seed % 3,
        drop_expired=seed % 4 == 0,
        window_order=("laxity", "fifo")[seed % 2],
        wait_only_when_stuck=seed % 5 == 0,
    )
    num_jobs = 120
    cluster = ReferenceCluster(config)
    cluster.reset(
        JobTable(
            arrival_tick=np.sort(rng.integers(0, 60, num_jobs, dtype=np.int32)),
            duration_ticks=rng.integers(1, 12, num_jobs, dtype=np.int32),
            demand=rng.uniform(0.05, 2.0, (num_jobs, 2)),
        )
    )
    is_over = False
    while not is_over:
        action = int(rng.integers(-1, config.num_actions + 1))
        legal = np.flatnonzero(cluster.mask())
        if rng.random() < 0.9:
            action = int(rng.choice(legal))
        illegal_before = cluster.illegal
        is_over = cluster.step(action).is_truncated
        assert cluster.illegal - illegal_before == (action not in legal)
        _check_books(cluster)
    assert cluster.arrived == num_jobs
    assert cluster.completed > 0
    assert cluster.rejected > 0


def _check_books(cluster: ReferenceCluster) -> None:
    """Every job is in exactly one place, and every server's room adds up exactly."""
    queued, running = cluster.queue_length, cluster.num_running
    gone = cluster.completed + cluster.rejected + cluster.dropped
    assert cluster.arrived == queued + running + gone
    assert cluster.started == running + cluster.completed
    assert cluster.unplaceable <= cluster.rejected <= cluster.violations
    assert queued <= cluster.config.queue_capacity
    everywhere = [*cluster.queue, *(job for s in cluster.servers for job in s.running)]
    assert len({id(job) for job in everywhere}) == queued + running
    for server in cluster.servers:
        assert server.mode == ACTIVE or not server.running
        for r, capacity in enumerate(server.capacity):
            assert server.free[r] == capacity - math.fsum(job.demand[r] for job in server.running)
            assert server.free[r] >= 0
    for name, values in cluster.observation().items():
        assert np.isfinite(values).all(), name
        assert np.abs(values).max() <= 1.0, name
