"""The benchmark measures what it says, and its policy is uniformly random and legal."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from cloudsched import cli
from cloudsched.bench.env import QUICK, BatchedRunner, Size, bench_env, one_core
from cloudsched.commands import bench
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.heuristics.random import BLOCK, RandomPolicy

SIZES = (Size(3, 1), Size(3, 4), Size(9, 4), Size(3, 4, 2), Size(9, 4, 2))


def test_the_benchmark_reports_every_case_and_its_ratios() -> None:
    seen: list[int] = []
    document = bench_env(
        repeats=2,
        duration=QUICK,
        sizes=SIZES,
        memory_size=Size(3, 4),
        report=lambda name, done: seen.append(done),
    )
    cases = {"n3_e1", "n3_e4", "n9_e4", "n3_e4_d2", "n9_e4_d2", "naive_python", "cartpole"}
    assert set(document["steps_per_s"]) == set(document["spread"]) == cases
    for name, rate in document["steps_per_s"].items():
        low, high = document["spread"][name]
        assert 0.0 < low <= rate <= high
    best = max(document["steps_per_s"][name] for name in ("n3_e1", "n3_e4"))
    naive = document["steps_per_s"]["naive_python"]
    assert document["ratios"]["naive_python"] == pytest.approx(best / naive)
    assert document["ratios"]["cartpole"] > 0.0
    for bound in ("", "_d2"):
        rates = document["steps_per_s"]
        costs = rates[f"n3_e4{bound}"] / rates[f"n9_e4{bound}"]
        assert document["cost_growth"][f"n9_e4{bound}"] == pytest.approx(costs / 3.0)
    assert len(document["cost_growth"]) == 2
    assert document["ticks_per_step"]["n9_e4_d2"] > 0.4
    assert document["memory_mb"]["process"] > document["memory_mb"]["n3_e4"] >= 0.0
    assert all(0.0 < share <= 1.0 for share in document["ticks_per_step"].values())
    assert seen[-1] == 2 * len(cases)


def test_the_command_prints_one_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SIZES", SIZES)
    monkeypatch.setattr(bench, "MEMORY_SIZE", Size(3, 2))
    assert cli.main(["bench", "env", "--quick", "--repeats", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "cloudsched.bench_env.v1"
    assert "n3_e4" in document["steps_per_s"]
    assert document["machine"]["cores"] == os.cpu_count()
    assert "numba" in document["versions"]
    monkeypatch.setattr(bench, "bench_env", lambda **settings: document)
    assert cli.main(["bench", "env"]) == 0
    assert "x CartPole" in capsys.readouterr().out


def test_a_measurement_goes_on_over_the_ends_of_episodes() -> None:
    runner = BatchedRunner(Size(2, 3))
    for _ in range(3):
        assert runner.run(QUICK) > 0.0
    assert runner.env.engine.state.clusters["illegal"].sum() == 0


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system cannot pin processes")
def test_the_process_is_on_one_core_only_while_measuring() -> None:
    before = os.sched_getaffinity(0)
    with one_core():
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


def test_random_actions_are_legal_and_equally_likely() -> None:
    rng = np.random.default_rng(0)
    mask = (rng.random((40, 91)) < 0.2).astype(np.int8)
    mask[:, -1] = 1
    mask[0, :-1] = 0  # only the last is legal
    mask[1] = 1
    policy = RandomPolicy(seed=1)
    policy.reset(40)
    counts = np.zeros(mask.shape)
    draws = 8 * BLOCK
    for _ in range(draws):
        counts[np.arange(40), policy.act({"action_mask": mask})] += 1
    assert (counts[mask == 0] == 0).all()
    expected = draws / mask.sum(axis=1, keepdims=True)
    spread = np.abs(counts - expected * mask) / np.sqrt(expected)
    assert spread.max() < 5.0


def test_the_draws_of_a_cluster_do_not_depend_on_how_many_there_are() -> None:
    env = ClusterVectorEnv(3, copy=False)
    observation, _ = env.reset(seed=0)
    many, one = RandomPolicy(seed=5), RandomPolicy(seed=5)
    many.reset(3)
    one.reset(1)
    first = {name: array[:1] for name, array in observation.items()}
    for _ in range(300):
        actions = many.act(observation)
        assert one.act(first)[0] == actions[0]
        env.advance(actions)
