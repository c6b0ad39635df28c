"""From the actions that were taken to the reply that tells them to the caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloudsched.serving import schemas
from cloudsched.serving.planner import Outcome, Planner, Step
from cloudsched.serving.snapshots import is_asleep, names_of
from cloudsched.serving.versions import Version
from cloudsched.serving.wire import struct_of

DecisionReply = struct_of(schemas.DecisionReply)
Decision = struct_of(schemas.Decision)
Alternative = struct_of(schemas.Alternative)
Intervention = struct_of(schemas.Intervention)


def orders_of(planner: Planner, num_clusters: int, most: int) -> NDArray[np.int64]:
    """Return (S, W) the places of each cluster's queued jobs in its request, in window order.

    As many as `most` decisions can name; what is beyond the end of a queue is meaningless.
    """
    state = planner.engine.state
    clusters = state.clusters[:num_clusters]
    width = min(planner.config.visible_jobs + most, state.queue.shape[1])
    heads, num_running = clusters["queue_head"], clusters["num_running"]
    columns = np.minimum(heads[:, None] + np.arange(width), state.queue.shape[1] - 1)
    rows: NDArray[np.int64] = state.queue[np.arange(num_clusters)[:, None], columns]
    places: NDArray[np.int64] = rows - num_running[:, None]
    return places


def reply_of(
    sizes: tuple[int, int, int],
    request: Any,
    version: Version,
    outcome: Outcome,
    e: int,
    order: NDArray[np.int64],
    last_server: int,
    notes: Sequence[tuple[str, str]],
) -> Any:
    """Turn the actions of cluster e into commands.

    Args:
        sizes: number of servers, first toggle, and the action that waits.
        order: where its queued jobs stand in the request, in window order.
        notes: where the shield intervened, and why.
    """
    steps = outcome.steps[e]
    return DecisionReply(
        cluster=request.cluster,
        policy=version.name,
        decisions=_decisions(sizes, request, steps, order) if steps else [],
        ended_by="wait" if outcome.ended_by_wait[e] else "limit",
        wait_probability=outcome.wait_chance[e],
        last_server=last_server,
        interventions=[Intervention(reason=reason, detail=detail) for reason, detail in notes],
    )


def _decisions(
    sizes: tuple[int, int, int], request: Any, steps: Sequence[Step], order: NDArray[np.int64]
) -> list[Any]:
    num_servers, toggles, wait = sizes
    names, places = names_of(request.queue), order.tolist()
    toggled: set[int] = set()

    def named(action: int) -> tuple[str, str | None, int | None]:
        if action < toggles:
            return "place", names[places[action // num_servers]], action % num_servers
        if action == wait:
            return "wait", None, None
        n = action - toggles
        is_now_asleep = is_asleep(request.servers, n) != (n in toggled)
        return "wake" if is_now_asleep else "sleep", None, n

    decisions = []
    for step in steps:
        kind, job, server = named(step.action)
        others = [
            Alternative(kind=kind, job=job, server=server, probability=chance)
            for (kind, job, server), chance in ((named(a), c) for a, c in step.others)
        ]
        decisions.append(
            Decision(
                kind=kind, job=job, server=server, probability=step.chance, alternatives=others
            )
        )
        if kind == "place":
            del places[step.action // num_servers]
        else:
            toggled ^= {step.action - toggles}
    return decisions


def commands_of(reply: Any) -> list[tuple[Any, ...]]:
    """Return what a reply tells to do, without its probabilities."""
    return [(d.kind, d.job, d.server) for d in reply.decisions]
