"""A simulated cluster as a client of the service: its state as a request, the reply as actions.

For tests, the demo and the bench: the service decides, the simulator shows what comes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.sim.engine import ClusterEngine
from cloudsched.sim.state import MODE_NAMES, NEVER, NONE

Ask = Callable[[list[dict[str, Any]]], Sequence[Mapping[str, Any]]]
"""Sends the requests of some clusters, and returns the replies."""

FAR = 10**6  # ticks: a deadline that never passes, on the wire


def request_of(engine: ClusterEngine, e: int, **fields: Any) -> dict[str, Any]:
    """Return the state of cluster e as a `DecisionRequest`; `fields` are added to it."""
    cluster, servers = engine.state.clusters[e], engine.state.servers[e]
    tick = int(cluster["tick"])
    running = []
    for n, server in enumerate(servers):
        j = int(server["first_running"])
        while j != NONE:
            job = engine.state.jobs[e, j]
            end = int(job["start"]) + int(job["duration"])
            demand = written(engine.state.demand[e, j])
            running.append({"server": n, "demand": demand, "ticks_left": end - tick})
            j = int(job["next_running"])
    queue = []
    for j in queued_rows(engine, e):
        job = engine.state.jobs[e, j]
        start_by = int(job["start_by"])
        queue.append(
            {
                "id": str(j),
                "demand": written(engine.state.demand[e, j]),
                "duration": int(job["duration"]),
                "waited": tick - int(job["arrival"]),
                "laxity": FAR if start_by == NEVER else start_by - tick,
            }
        )
    return {
        "cluster": str(e),
        "servers": [
            {
                "mode": MODE_NAMES[server["mode"]],
                "wake_left": int(server["wake_left"]),
                "idle_ticks": tick - int(server["idle_since"]),
            }
            for server in servers
        ],
        "running": running,
        "queue": queue,
        "time_of_day_s": float(cluster["time_of_day_s"])
        + tick * (engine.config.tick_s + float(cluster["day_gain_s"])),
        "decisions_in_tick": int(cluster["decisions_in_tick"]),
        "arrival_rates": cluster["arrival_rate"].tolist(),
        "work_rates": cluster["work_rate"].tolist(),
        "work_square": float(cluster["work_square"]),
        **fields,
    }


def written(demand: NDArray[np.float64]) -> list[float]:
    """Return demands with the seven digits that the service reads back as the same grid points."""
    digits: list[float] = (np.ceil(demand * 1e7) / 1e7).tolist()
    return digits


def in_columns(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `DecisionRequest` with its servers and jobs in columns, which are read faster."""

    def columns(rows: Sequence[Mapping[str, Any]], *names: str) -> dict[str, list[Any]]:
        return {name: [row[name] for row in rows] for name in names}

    def demands(rows: Sequence[Mapping[str, Any]]) -> list[float]:
        return [amount for row in rows for amount in row["demand"]]

    running, queue = request["running"], request["queue"]
    return {
        **request,
        "servers": columns(request["servers"], "mode", "wake_left", "idle_ticks"),
        "running": {"demand": demands(running), **columns(running, "server", "ticks_left")},
        "queue": {
            "demand": demands(queue),
            **columns(queue, "id", "duration", "waited", "laxity"),
        },
    }


def queued_rows(engine: ClusterEngine, e: int) -> list[int]:
    """Return the job rows of the queue of cluster e, in window order."""
    cluster = engine.state.clusters[e]
    head, length = int(cluster["queue_head"]), int(cluster["queue_length"])
    rows: list[int] = engine.state.queue[e, head : head + length].tolist()
    return rows


def action_of(engine: ClusterEngine, e: int, decision: Mapping[str, Any]) -> int:
    """Return the action that carries out a decision of a reply."""
    num_servers, num_slots = engine.fleet.num_servers, engine.config.visible_jobs
    if decision["kind"] == "place":
        slot = queued_rows(engine, e).index(int(decision["job"]))
        return slot * num_servers + int(decision["server"])
    return num_slots * num_servers + int(decision["server"])


def drive(env: ClusterVectorEnv, ask: Ask, **fields: Any) -> list[list[int]]:
    """Let the service decide in every cluster until the episodes of a fresh env end.

    Args:
        fields: added to each request.

    Returns:
        The actions of each cluster, in order.
    """
    engine = env.engine
    taken: list[list[int]] = [[] for _ in range(env.num_envs)]
    last_server = [-1] * env.num_envs
    ticks = env.config.episode_ticks
    while True:
        rows = np.flatnonzero(engine.state.clusters["tick"] < ticks).tolist()
        if not rows:
            return taken
        replies = ask([request_of(engine, e, last_server=last_server[e], **fields) for e in rows])
        before = engine.state.clusters["tick"].copy()
        actions = np.full(env.num_envs, engine.wait_action)
        plans = {e: list(reply["decisions"]) for e, reply in zip(rows, replies, strict=True)}
        for e, reply in zip(rows, replies, strict=True):
            last_server[e] = reply["last_server"]
        while plans:
            # One decision in each cluster that has any left; the others must stay as they are,
            # so they are held by an action for a cluster whose tick is already over.
            for e in list(plans):
                is_over = engine.state.clusters["tick"][e] > before[e]
                if is_over:
                    del plans[e]
                    continue
                actions[e] = (
                    action_of(engine, e, plans[e].pop(0)) if plans[e] else engine.wait_action
                )
                taken[e].append(int(actions[e]))
            if plans:
                _advance_some(env, actions, list(plans))


def _advance_some(env: ClusterVectorEnv, actions: Any, rows: list[int]) -> None:
    """Carry out one decision in some clusters and none in the others."""
    clusters = env.engine.state.clusters
    others = np.setdiff1d(np.arange(env.num_envs), rows)
    ticks = clusters["tick"][others].copy()
    clusters["tick"][others] = env.config.episode_ticks  # the kernels leave ended ones alone
    env.advance(actions)
    clusters["tick"][others] = ticks
