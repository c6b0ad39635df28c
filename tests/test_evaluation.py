"""The protocol: paired episodes, honest intervals, complete results."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError, InvalidActionError, UnknownNameError
from cloudsched.evaluation import (
    SPLITS,
    TEST_SEEDS,
    TRAIN_SEEDS,
    Episodes,
    Evaluation,
    evaluate,
    evaluate_all,
    first_seeds,
    paired_difference,
)
from cloudsched.heuristics.catalog import make_heuristic
from cloudsched.metrics import METRICS
from cloudsched.results import (
    check_folder,
    comparison_document,
    evaluation_document,
    git_commit,
    to_json,
    to_parquet,
    write_files,
)
from cloudsched.statistics import summarise

SHORT = Scenario(settings={"episode_ticks": 80}, load=0.8)


class FixedPolicy:
    """Gives the same action everywhere."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def reset(self, num_clusters: int) -> None:
        self.num_clusters = num_clusters

    def act(self, observation: Any) -> NDArray[np.int64]:
        return np.full(self.num_clusters, self.action)


def run(name: str, seeds: Any = range(5), scenario: Scenario = SHORT) -> Evaluation:
    return evaluate(make_heuristic(name, scenario.config), scenario, seeds, name=name)


def test_train_and_test_seeds_are_fifty_each_and_never_meet() -> None:
    assert len(TRAIN_SEEDS) == len(TEST_SEEDS) == 50
    assert not set(TRAIN_SEEDS) & set(TEST_SEEDS)
    assert list(first_seeds("test", 3)) == [1_000_000, 1_000_001, 1_000_002]
    assert first_seeds("train") is SPLITS["train"]


@pytest.mark.parametrize("name", ["rr+sleep", "power_aware+headroom", "random"])
def test_the_same_seeds_give_the_same_bits(name: str) -> None:
    first, second = run(name), run(name)
    for metric in METRICS:
        np.testing.assert_array_equal(first.metrics[metric], second.metrics[metric], metric)


@pytest.mark.parametrize("name", ["rr+sleep", "tetris+band", "power_aware+headroom"])
def test_seeds_give_the_same_bits_together_and_one_by_one(name: str) -> None:
    together = run(name, seeds=[7, 3, 1_000_049])
    for position, seed in enumerate([7, 3, 1_000_049]):
        alone = run(name, seeds=[seed])
        for metric in METRICS:
            assert alone.metrics[metric][0] == together.metrics[metric][position], metric


def test_policies_that_share_episodes_do_not_disturb_each_other() -> None:
    episodes = Episodes(SHORT, range(4))
    for name in ("rr", "random", "best_fit+headroom", "rr"):
        shared = episodes.run(make_heuristic(name, SHORT.config), name=name)
        alone = run(name, seeds=range(4))
        for metric in METRICS:
            np.testing.assert_array_equal(shared.metrics[metric], alone.metrics[metric], metric)


def test_an_evaluation_agrees_with_the_stepped_environment() -> None:
    env = ClusterVectorEnv(3, **SHORT.to_dict(), autoreset_mode="SameStep")
    policy = make_heuristic("llf+sleep", env.config)
    observation, _ = env.reset(seed=[4, 5, 6])
    total = np.zeros(3)
    expected: dict[int, dict[str, float]] = {}
    while len(expected) < 3:
        observation, reward, _, truncated, info = env.step(policy.act(observation))
        total += np.where([e in expected for e in range(3)], 0.0, reward)
        for e in np.flatnonzero(truncated):
            metrics = {name: values[e] for name, values in info["episode_metrics"].items()}
            expected.setdefault(int(e), metrics)
    actual = run("llf+sleep", seeds=[4, 5, 6]).metrics
    for metric in METRICS.keys() - {"energy_bound_kwh"}:  # only evaluations have it
        np.testing.assert_array_equal(actual[metric], [expected[e][metric] for e in range(3)])
    np.testing.assert_allclose(actual["episode_return"], total)


def test_illegal_actions_are_counted_and_not_hidden() -> None:
    evaluation = evaluate(FixedPolicy(10**6), SHORT, range(3))
    np.testing.assert_array_equal(evaluation.metrics["illegal"], 80)
    assert evaluation.policy == "FixedPolicy"


def test_a_policy_that_starves_everything_saves_energy_and_serves_nothing() -> None:
    waiting = evaluate(FixedPolicy(SHORT.config.num_actions - 1), SHORT, range(3))
    assert (waiting.metrics["jobs_served"] == 0.0).all()
    assert (waiting.metrics["work_served"] == 0.0).all()
    assert (waiting.metrics["mean_power_w"] < run("rr", range(3)).metrics["mean_power_w"]).all()
    assert (waiting.metrics["episode_return"] < run("rr", range(3)).metrics["episode_return"]).all()


class WrongShapePolicy(FixedPolicy):
    """Forgets the axis of the clusters."""

    def act(self, observation: Any) -> Any:
        return self.action


@pytest.mark.parametrize("action", [3, np.zeros(7, np.int64), np.zeros(3), None, "wait"])
def test_a_policy_with_the_wrong_shape_is_named(action: Any) -> None:
    with pytest.raises(InvalidActionError, match=r"Policy 'mine': actions have shape .*\(3,\)"):
        evaluate(WrongShapePolicy(action), SHORT, range(3), name="mine")


def test_bad_seeds_and_splits_are_refused() -> None:
    with pytest.raises(ConfigError, match="no seeds"):
        evaluate(FixedPolicy(0), SHORT, [])
    with pytest.raises(ConfigError, match="seeds=51"):
        first_seeds("test", 51)
    with pytest.raises(ConfigError, match="seeds=0"):
        first_seeds("test", 0)
    with pytest.raises(UnknownNameError, match="Did you mean 'test'"):
        first_seeds("tests")
    with pytest.raises(ConfigError, match="seed=-1"):
        evaluate(FixedPolicy(0), SHORT, [-1])


def test_progress_rises_to_one() -> None:
    seen: list[tuple[str, float]] = []
    policy = make_heuristic("rr", Scenario().config)
    evaluate(
        policy,
        Scenario(),
        [0, 1],
        name="rr",
        progress=lambda name, share: seen.append((name, share)),
    )
    assert {name for name, _ in seen} == {"rr"}
    shares = [share for _, share in seen]
    assert len(shares) > 3
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60))
def test_an_interval_holds_its_mean_and_lies_within_the_data(values: list[float]) -> None:
    estimate = summarise({"x": np.array(values)})["x"]
    margin = 1e-9 * max(1.0, *map(abs, values))
    assert estimate.ci_low <= estimate.mean <= estimate.ci_high
    assert min(values) - margin <= estimate.ci_low
    assert estimate.ci_high <= max(values) + margin


def test_an_interval_of_many_normal_draws_is_the_textbook_one() -> None:
    values = np.random.default_rng(0).normal(10.0, 3.0, 50)
    estimate = summarise({"x": values})["x"]
    half = 1.96 * values.std() / np.sqrt(50)
    assert estimate.mean == pytest.approx(values.mean())
    assert estimate.ci_high - estimate.ci_low == pytest.approx(2.0 * half, rel=0.05)


def test_a_constant_has_no_interval() -> None:
    estimate = summarise({"x": np.full(50, 1.0)})["x"]
    assert (estimate.ci_low, estimate.mean, estimate.ci_high) == (1.0, 1.0, 1.0)


def test_an_interval_does_not_depend_on_what_is_estimated_beside_it() -> None:
    one, two = np.arange(50.0), np.arange(50.0) ** 2
    assert summarise({"one": one})["one"] == summarise({"two": two, "one": one})["one"]


def test_paired_differences_are_sharper_than_the_means() -> None:
    rr, sjf = run("rr", range(20)), run("sjf", range(20))
    difference = paired_difference(rr, sjf)["mean_power_w"]
    alone = rr.summary["mean_power_w"]
    assert difference.mean == pytest.approx(alone.mean - sjf.summary["mean_power_w"].mean)
    assert difference.ci_high - difference.ci_low < 0.5 * (alone.ci_high - alone.ci_low)
    assert all(estimate.ci_high == 0.0 for estimate in paired_difference(rr, rr).values())


def test_evaluations_of_different_episodes_are_not_paired() -> None:
    with pytest.raises(ConfigError, match="different seeds"):
        paired_difference(run("rr", range(3)), run("rr", range(1, 4)))
    with pytest.raises(ConfigError, match="scenarios"):
        paired_difference(run("rr", range(2)), run("rr", range(2), Scenario(load=0.3)))


def test_the_json_of_an_evaluation_has_every_metric_at_the_top() -> None:
    evaluation = run("rr")
    document = json.loads(to_json(evaluation_document(evaluation, split="train")))
    for metric in (*METRICS, "energy_over_bound"):
        assert set(document[metric]) == {"mean", "ci_low", "ci_high"}
    assert document["mean_power_w"]["mean"] == evaluation.metrics["mean_power_w"].mean()
    assert document["schema"] == "cloudsched.evaluation.v1"
    assert document["seeds"] == [0, 1, 2, 3, 4]
    assert document["split"] == "train"
    assert Scenario.from_dict(document["scenario"]) == SHORT
    assert document["cluster"]["episode_ticks"] == 80
    assert {"cloudsched", "python", "numpy", "numba"} == set(document["versions"])
    described = {"schema", "policy", "scenario", "cluster", "split", "seeds", "files"}
    assert not (described | {"versions", "git_commit"}) & set(METRICS)


def test_the_json_of_a_comparison_holds_every_policy_and_its_differences() -> None:
    policies = {name: make_heuristic(name, SHORT.config) for name in ("rr", "sjf", "ffd")}
    evaluations = evaluate_all(policies, SHORT, range(3))
    document = json.loads(to_json(comparison_document(evaluations, baseline="sjf")))
    assert set(document["policies"]) == {"rr", "sjf", "ffd"}
    assert set(document["differences"]) == {"rr", "ffd"}
    assert document["baseline"] == "sjf"
    assert set(document["differences"]["rr"]) == set(METRICS)
    entry = document["policies"]["rr"]["energy_kwh"]["mean"]
    base = document["policies"]["sjf"]["energy_kwh"]["mean"]
    assert document["differences"]["rr"]["energy_kwh"]["mean"] == pytest.approx(entry - base)


def test_the_parquet_table_has_a_row_for_each_policy_and_seed(tmp_path: Path) -> None:
    evaluations = [run("rr", range(3)), run("random", range(3))]
    path = tmp_path / "new" / "episodes.parquet"
    write_files({path: to_parquet(evaluations)})
    table = pyarrow.parquet.read_table(path)
    assert table.column_names == ["policy", "seed", *METRICS]
    assert table["policy"].to_pylist() == ["rr"] * 3 + ["random"] * 3
    assert table["seed"].to_pylist() == [0, 1, 2, 0, 1, 2]
    for metric in METRICS:
        expected = np.concatenate([e.metrics[metric] for e in evaluations])
        np.testing.assert_array_equal(table[metric].to_numpy(), expected)


@pytest.mark.parametrize("stop_at", ["write", "replace"])
def test_an_interrupt_while_saving_leaves_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: str
) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text("old")
    original = Path.write_bytes

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    def write_first_only(path: Path, data: bytes) -> int:
        if ".b.json" in path.name:
            original(path, data[:1])
            raise KeyboardInterrupt
        return original(path, data)

    if stop_at == "write":
        monkeypatch.setattr(Path, "write_bytes", write_first_only)
    else:
        monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_files({first: b"new", second: b"new"})
    assert first.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_folders_that_cannot_be_written_to_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below"):
        with pytest.raises(ConfigError, match="is not a folder"):
            check_folder(folder)
        with pytest.raises(ConfigError, match="Cannot write"):
            write_files({folder / "x.json": b""})
    if Path("/proc").is_dir():  # even root cannot make files there
        with pytest.raises(ConfigError, match="Cannot write to '/proc/new'"):
            check_folder(Path("/proc/new"))
    check_folder(tmp_path / "new" / "deep")
    assert sorted(tmp_path.iterdir()) == [file]
    assert not (tmp_path / "new").exists()


def test_a_folder_outside_any_repository_has_no_commit(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("")
    assert git_commit(tmp_path) is None
    assert git_commit(tmp_path / "absent") is None


def test_importing_the_package_is_quick_and_loads_nothing_heavy() -> None:
    heavy = "gymnasium numpy numba matplotlib rich tyro pyarrow torch ray"
    code = (
        "import time, sys; start = time.perf_counter(); import cloudsched; "
        "print(time.perf_counter() - start); "
        f"print(sorted(set({heavy!r}.split()) & set(sys.modules)))"
    )
    best_s = math.inf
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        seconds, loaded = done.stdout.splitlines()
        assert loaded == "[]"
        best_s = min(best_s, float(seconds))
    assert best_s < 0.3
