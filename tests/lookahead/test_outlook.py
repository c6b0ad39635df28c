"""The outlook agrees with a plain reading of the state."""

from __future__ import annotations

import math

import numpy as np

from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.heuristics.catalog import make_heuristic
from cloudsched.lookahead.outlook import NAMES, Outlook
from cloudsched.sim.state import ACTIVE, ASLEEP


def plain_outlook(engine, e, server_class):
    """The same numbers, job by job and server by server."""
    state, now = engine.state, engine.state.clusters["tick"][e]
    cluster, jobs, cpu = state.clusters[e], state.jobs[e], state.demand[e, :, 0]
    capacity = engine.fleet.capacity[:, 0]
    first = cluster["queue_head"]
    queue = state.queue[e, first : first + cluster["queue_length"]]
    found = dict.fromkeys(NAMES, 0.0)
    found["queued_work"] = sum(jobs["duration"][j] * cpu[j] for j in queue)
    found["queued_cpu"] = sum(cpu[j] for j in queue)
    found["queued_jobs"] = len(queue)
    found["late_jobs"] = sum(jobs["start_by"][j] < now for j in queue)
    for name in ("queued_jobs", "late_jobs"):
        found[f"{name}_squared"] = found[name] ** 2 / 50.0
    for n, server in enumerate(state.servers[e]):
        c = server_class[n]
        ends = {
            j: jobs["start"][j] + jobs["duration"][j]
            for j in range(cluster["next_job"])
            if jobs["start"][j] >= 0
            and jobs["server"][j] == n
            and jobs["start"][j] + jobs["duration"][j] > now
        }
        if server["mode"] == ASLEEP:
            continue
        found[f"awake_{c}"] += 1
        found[f"used_{c}"] += sum(cpu[j] for j in ends)
        found[f"free_{c}"] += (server["mode"] == ACTIVE) * state.free[e, n, 0]
        found[f"life_{c}"] += max(ends.values(), default=now) - now
        found[f"running_work_{c}"] += sum(cpu[j] * (end - now) for j, end in ends.items())
        found["idle_servers"] += not ends
        assert sum(cpu[j] for j in ends) <= capacity[n] + 1e-9
    room = sum(state.free[e, n, 0] for n in range(15) if state.servers["mode"][e, n] != ASLEEP)
    for name, worth in zip(NAMES[-3:], (0.5, 2.0, 6.0), strict=True):
        found[name] = math.exp(-room / capacity.mean() / worth)
    return found


def test_the_outlook_is_what_a_plain_reading_of_the_state_finds():
    env = ClusterVectorEnv(3, workload="diurnal", load=0.9, settings={"wake_delay_ticks": 3})
    policy = make_heuristic("power_aware+headroom", env.config)
    observation, _ = env.reset(seed=5)
    capacity = env.engine.fleet.capacity[:, 0]
    order = np.argsort(env.engine.power_at(1.0) / capacity, kind="stable")
    server_class = np.empty(15, int)
    server_class[order] = np.arange(15) // 5
    outlook = Outlook(env.engine)
    seen = dict.fromkeys(NAMES, 0.0)
    for step in range(1500):
        observation, *_ = env.step(policy.act(observation))
        if step % 100 == 99:
            for e, row in zip((2, 0), outlook(np.array([2, 0])), strict=True):
                expected = plain_outlook(env.engine, e, server_class)
                for name, value in zip(NAMES, row, strict=True):
                    np.testing.assert_allclose(value, expected[name], atol=1e-6, err_msg=name)
                    seen[name] += value
    assert min(seen.values()) > 0.0, "some number was never put to the test"
