"""Talks to the service over gRPC.

    python serve/client_grpc.py --address 127.0.0.1:9000 --token TOKEN

Any language will do: the messages are in cloudsched/serving/proto/cloudsched.proto, and the server
answers reflection (`grpcurl -plaintext 127.0.0.1:9000 list`).
"""

from __future__ import annotations

import argparse

import grpc

from cloudsched.serving.proto import cloudsched_pb2 as messages
from cloudsched.serving.proto.cloudsched_pb2_grpc import SchedulerStub


def main() -> None:
    """Ask for the decisions of one tick."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:9000")
    parser.add_argument("--token", default="")
    arguments = parser.parse_args()
    server = messages.ServerSpec(capacity=[1.0, 1.0], idle_w=100.0, max_w=300.0)
    request = messages.DecisionRequest(
        fleet_spec=messages.FleetSpec(resources=["cpu", "memory"], servers=[server] * 3),
        servers=messages.Servers(mode=[messages.ACTIVE, messages.ACTIVE, messages.ASLEEP]),
        running=messages.RunningJobs(server=[0], demand=[0.5, 0.25], ticks_left=[12]),
        queue=messages.QueuedJobs(
            id=["render", "index"], demand=[0.5, 0.5, 0.25, 0.75], duration=[30, 5]
        ),
    )
    with grpc.insecure_channel(arguments.address) as channel:
        reply = SchedulerStub(channel).Decide(
            request, metadata=[("authorization", f"Bearer {arguments.token}")], timeout=10
        )
    for decision in reply.decisions:
        print(decision.kind, decision.job, "server", decision.server)
    print("decided by", reply.policy)


if __name__ == "__main__":
    main()
