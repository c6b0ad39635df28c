"""Clusters whose state is kept: events, idempotence, contention, and the simulator's dynamics."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import document, make_service
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudsched.commands.policies import make_policy
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.scenario import Scenario
from cloudsched.evaluation import evaluate
from cloudsched.serving.errors import ConflictError, UnknownError
from cloudsched.serving.keeper import ClusterKeeper
from cloudsched.serving.store import ClusterBook, LocalStore

FLEET = {
    "resources": ["cpu", "memory"],
    "servers": [{"capacity": [1.0, 1.0], "idle_w": 100.0, "max_w": 300.0}] * 3,
}


class Cluster:
    """A cluster on a keeper, with events that number themselves."""

    def __init__(self, folder: Path, policy: str = "best_fit+sleep", **options: Any) -> None:
        self.service = make_service(policy, **options)
        self.store = LocalStore(folder / "clusters.sqlite")
        self.keeper = ClusterKeeper(self.service, self.store)
        self._next = 0

    def create(self, fleet: Any = FLEET) -> Any:
        return asyncio.run(self.keeper.create(document("ClusterRequest", id="c", fleet=fleet)))

    def send(self, *events: dict[str, Any], **fields: Any) -> Any:
        numbered = []
        for event in events:
            self._next += 1
            numbered.append({"id": f"e{self._next}", **event})
        request = document("EventsRequest", events=numbered, **fields)
        return json.loads(asyncio.run(self.keeper.events("c", request)))

    @property
    def view(self) -> Any:
        return asyncio.run(self.keeper.view("c"))


TICK = {"kind": "tick"}


def arrival(job: str, cpu: float = 0.25, duration: int = 5) -> dict[str, Any]:
    return {"kind": "arrival", "job": job, "demand": [cpu, cpu], "duration": duration}


def completion(job: str) -> dict[str, Any]:
    return {"kind": "completion", "job": job}


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    cluster = Cluster(tmp_path)
    cluster.create()
    return cluster


def test_an_arrival_is_placed_and_a_completion_frees_its_server(cluster: Cluster) -> None:
    reply = cluster.send(TICK, arrival("a"))
    first = reply["decisions"][0]
    assert (first["kind"], first["job"]) == ("place", "a")
    assert cluster.view.running == {"a": reply["decisions"][0]["server"]}
    cluster.send(completion("a"))
    assert cluster.view.running == {}
    assert cluster.view.counters["completed"] == 1


def test_a_repeated_event_changes_nothing_and_gets_its_reply_again(cluster: Cluster) -> None:
    events = [{"id": "t", **TICK}, {"id": "a", **arrival("x")}]
    first = cluster.send(*events)
    again = cluster.send(*events)
    assert again["decisions"] == first["decisions"]
    assert (again["applied"], again["repeated"]) == ([], ["t", "a"])
    assert (again["version"], cluster.view.version) == (1, 1)
    mixed = cluster.send(*events, {"id": "b", **arrival("y")})
    assert (mixed["applied"], mixed["repeated"]) == (["b"], ["t", "a"])
    assert cluster.view.counters["arrived"] == 2


@pytest.mark.parametrize(
    "events",
    [
        [completion("never")],
        [TICK, arrival("a"), completion("a")],
        [TICK, arrival("a"), arrival("a")],
        [{"kind": "server_failed", "server": 9}],
        [{"kind": "server_recovered", "server": 1}],
        [arrival("fine"), completion("never")],
    ],
)
def test_what_cannot_have_happened_is_refused_and_changes_nothing(
    cluster: Cluster, events: list[dict[str, Any]]
) -> None:
    before = cluster.view
    with pytest.raises(ConflictError, match="event 'e"):
        cluster.send(*events)
    assert cluster.view == before


def test_an_unknown_cluster_and_an_outdated_version(cluster: Cluster) -> None:
    with pytest.raises(UnknownError, match="nobody"):
        asyncio.run(cluster.keeper.view("nobody"))
    cluster.send(TICK, expect_version=0)
    with pytest.raises(ConflictError, match="has version 1, not 0"):
        cluster.send(TICK, expect_version=0)


def test_registering_again_is_harmless_unless_it_is_another(cluster: Cluster) -> None:
    cluster.send(TICK)
    assert cluster.create().version == 1
    with pytest.raises(ConflictError, match="already"):
        cluster.create("default")


def test_a_failed_server_takes_no_jobs_and_gives_its_own_back(cluster: Cluster) -> None:
    cluster.send(TICK, arrival("a", 0.9), arrival("b", 0.9), arrival("c", 0.9))
    server = cluster.view.running["a"]
    reply = cluster.send({"kind": "server_failed", "server": server})
    assert reply["requeued"] == ["a"]
    assert reply["decisions"] == []  # the other two are full
    assert cluster.view.servers[server].mode == "failed"
    cluster.send(TICK, TICK)
    assert cluster.view.servers[server].mode == "failed"
    reply = cluster.send({"kind": "server_recovered", "server": server})
    assert [(d["kind"], d["job"], d["server"]) for d in reply["decisions"]] == [
        ("place", "a", server)
    ]


def test_a_job_that_fits_nowhere_is_rejected_aloud(cluster: Cluster) -> None:
    assert cluster.send(TICK, arrival("huge", 2.0))["rejected"] == ["huge"]
    assert cluster.send(arrival("huge", 2.0))["rejected"] == ["huge"]
    assert cluster.view.counters["violations"] == 2


def test_two_replicas_that_change_one_cluster_lose_nothing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.create()
    keepers = [ClusterKeeper(make_service("rr"), LocalStore(tmp_path / "clusters.sqlite"))]
    keepers.append(cluster.keeper)

    async def send(keeper: ClusterKeeper, i: int) -> None:
        event = {"id": f"a{i}", **arrival(f"job{i}", 0.001)}
        await keeper.events("c", document("EventsRequest", events=[event]))

    async def everyone() -> None:
        await asyncio.gather(*(send(keepers[i % 2], i) for i in range(40)))

    cluster.send(TICK)
    asyncio.run(everyone())
    view = cluster.view
    assert (view.version, view.counters["arrived"]) == (41, 40)
    assert len(view.running) + len(view.queue) == 40


def test_a_book_survives_its_process(tmp_path: Path) -> None:
    book = ClusterBook(tmp_path / "b.sqlite")
    assert book.create("c", b"0")
    assert not book.create("c", b"1")
    assert book.commit("c", 0, b"1", ["a", "b"], b"reply").is_done
    # Not closed: the process has died. Another one opens the file.
    other = ClusterBook(tmp_path / "b.sqlite")
    assert other.load("c") == (1, b"1")
    assert other.commit("c", 1, b"2", ["b"], b"").seen == {"b": 1}
    assert not other.commit("c", 0, b"2", ["z"], b"").is_done
    assert other.replies("c", [1]) == [b"reply"]
    assert other.swap("note", b"", b"x")
    assert not other.swap("note", b"", b"y")
    for open_book in (book, other):
        open_book.close()


@pytest.mark.parametrize("policy", ["power_aware+headroom", "rr+sleep"])
def test_events_of_an_episode_lead_to_the_decisions_of_an_evaluation(
    tmp_path: Path, policy: str
) -> None:
    scenario = Scenario(workload="diurnal", settings={"episode_ticks": 80}, load=0.7)
    expected = evaluate(make_policy(policy, scenario.config), scenario, [31])
    env = ClusterVectorEnv(
        1, **scenario.to_dict(), copy=False, autoreset_mode=AutoresetMode.DISABLED
    )
    env.reset(seed=[31])
    table = env.workload.jobs(31, 80)
    cluster = Cluster(tmp_path, policy, rules=scenario.config)
    asyncio.run(
        cluster.keeper.create(document("ClusterRequest", id="c", time_of_day_s=table.time_of_day_s))
    )
    ends: dict[int, list[str]] = {}
    num_decisions = 0
    for tick in range(80):
        rows = np.flatnonzero(table.arrival_tick == tick).tolist()
        events = [TICK, *(completion(job) for job in ends.pop(tick, []))]
        events += [
            {
                "kind": "arrival",
                "job": str(j),
                "demand": table.demand[j].tolist(),
                "duration": int(table.duration_ticks[j]),
            }
            for j in rows
        ]
        reply = cluster.send(*events)
        num_decisions += len(reply["decisions"]) + 1
        for decision in reply["decisions"]:
            if decision["kind"] == "place":
                end = tick + int(table.duration_ticks[int(decision["job"])])
                ends.setdefault(end, []).append(decision["job"])
    cluster.send(TICK)
    counters = cluster.view.counters
    assert num_decisions == expected.metrics["decisions"][0]
    assert counters["energy_kwh"] == pytest.approx(expected.metrics["energy_kwh"][0], rel=1e-12)
    assert counters["violations"] == pytest.approx(
        expected.metrics["sla_violation_rate"][0] * counters["arrived"]
    )


@settings(max_examples=25)
@given(data=st.data())
def test_no_sequence_of_events_breaks_capacity_or_loses_a_job(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cluster = Cluster(tmp_path_factory.mktemp("c"), data.draw(st.sampled_from(["rr", "random"])))
    cluster.create()
    cluster.send(TICK)
    kinds = ["arrival", "completion", "tick", "server_failed", "server_recovered"]
    for step in range(data.draw(st.integers(1, 25))):
        kind = data.draw(st.sampled_from(kinds))
        event: dict[str, Any] = {"kind": kind}
        if kind == "arrival":
            event = arrival(
                f"j{step}", data.draw(st.floats(0.0, 1.5)), data.draw(st.integers(1, 9))
            )
        elif kind == "completion":
            event["job"] = f"j{data.draw(st.integers(0, step))}"
        elif kind != "tick":
            event["server"] = data.draw(st.integers(0, 3))
        try:
            cluster.send(event)
        except ConflictError:
            continue
    _, live = cluster.keeper._cache["c"]
    used = np.zeros((3, 2))
    for job in live.running.values():
        used[job.server] += job.demand
        assert live.servers[job.server].mode == "active"
    assert (used <= 1.0).all()
    counters = live.counters
    accounted = len(live.queue) + len(live.running)
    accounted += counters["completed"] + counters["rejected"] + counters["dropped"]
    assert counters["arrived"] == accounted
