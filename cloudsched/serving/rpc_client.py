"""For callers: a document of the HTTP API as a gRPC message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloudsched.serving.proto import cloudsched_pb2

messages: Any = cloudsched_pb2

MODES = {"active": 0, "waking": 1, "asleep": 2, "failed": 3}


def decision_message_of(document: Mapping[str, Any]) -> Any:
    """Return a `DecisionRequest` of HTTP, with a named fleet, as the message of gRPC."""
    servers = document.get("servers", ())
    running, queue = document.get("running", ()), document.get("queue", ())
    message = messages.DecisionRequest(
        cluster=document.get("cluster", ""),
        fleet_name=document.get("fleet", "default"),
        servers=messages.Servers(
            mode=[MODES[s.get("mode", "active")] for s in servers],
            wake_left=[s.get("wake_left", 0) for s in servers],
            idle_ticks=[s.get("idle_ticks", 0) for s in servers],
        ),
        running=messages.RunningJobs(
            server=[j["server"] for j in running],
            demand=[x for j in running for x in j["demand"]],
            ticks_left=[j["ticks_left"] for j in running],
        ),
        queue=messages.QueuedJobs(
            id=[j["id"] for j in queue],
            demand=[x for j in queue for x in j["demand"]],
            duration=[j["duration"] for j in queue],
            waited=[j.get("waited", 0) for j in queue],
        ),
        alternatives=document.get("alternatives", 3),
        **{
            name: document[name]
            for name in (
                "time_of_day_s",
                "decisions_in_tick",
                "arrival_rates",
                "work_rates",
                "work_square",
                "last_server",
                "max_decisions",
            )
            if document.get(name) is not None
        },
    )
    if queue and all(j.get("laxity") is not None for j in queue):
        message.queue.laxity.extend(j["laxity"] for j in queue)
    return message
