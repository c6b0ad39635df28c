"""What a benchmark makes of its trials' outcomes, without Ray."""

from __future__ import annotations

import io
import json

import numpy as np
import pyarrow.parquet
import pytest

from cloudsched.config import ClusterConfig
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.evaluation import Evaluation, first_seeds
from cloudsched.metrics import METRICS
from cloudsched.statistics import summarise, summarise_grid
from cloudsched.sweeps import report
from cloudsched.sweeps.specs import Outcome, TrialSpec, begin, read_outcome, write_outcome

NUM_SEEDS = 5


def outcome(policy: str, *, train: float, test: float, seed: int | None = None) -> Outcome:
    spec = TrialSpec(policy=policy, num_seeds=NUM_SEEDS, train_seed=seed, steps=100)
    generator = np.random.default_rng(0)

    def evaluation(split: str, mean: float) -> Evaluation:
        noise = generator.normal(size=NUM_SEEDS)
        metrics = {name: 1000.0 + noise for name in METRICS}
        metrics["episode_return"] = mean + noise - noise.mean()
        metrics["sla_violation_rate"] = np.linspace(0.0, 0.01, NUM_SEEDS)
        seeds = tuple(first_seeds(split, NUM_SEEDS))
        return Evaluation(policy=policy, scenario=spec.scenario, seeds=seeds, metrics=metrics)

    return Outcome(
        spec=spec,
        train=evaluation("train", train),
        test=evaluation("test", test),
        training={} if seed is None else {"steps": 100, "seconds": 1.0},
    )


@pytest.fixture
def contest() -> report.Contest:
    outcomes = [
        outcome("rr", train=-30.0, test=-30.0),
        outcome("headroom@poisson", train=-20.0, test=-20.0),
        outcome("ppo", train=-19.0, test=-21.5, seed=0),
        outcome("ppo", train=-17.0, test=-19.5, seed=1),
        outcome("dqn", train=-18.0, test=-10.0, seed=0),  # best on test seeds: must not win
    ]
    [found] = report.contests(outcomes, {"poisson": "headroom@poisson"})
    return found


def test_the_winner_is_chosen_on_train_seeds(contest):
    document = report.benchmark_document([contest])
    assert document["winner"] == "ppo-poisson-seed1"
    assert contest.lead == pytest.approx(3.0 / 20.0)


def test_differences_are_paired_by_test_seed_to_the_tuned_heuristic(contest):
    entry = report.benchmark_document([contest])["workloads"]["poisson"]
    assert list(entry["policies"]) == ["dqn", "headroom@poisson", "ppo", "rr"]
    assert "headroom@poisson" not in entry["differences"]
    difference = entry["differences"]["rr"]["episode_return"]  # noise is shared, so it cancels
    assert difference == pytest.approx({"mean": -10.0, "ci_low": -10.0, "ci_high": -10.0})
    ppo = entry["differences"]["ppo"]["episode_return"]  # the two trainings differ by 2
    assert (ppo["ci_low"], ppo["mean"], ppo["ci_high"]) == pytest.approx((-1.5, -0.5, 0.5))


def test_the_document_is_json_and_the_table_has_a_row_for_each_policy(contest):
    document = report.benchmark_document([contest])
    json.dumps(document, allow_nan=False)
    assert report.table(document).row_count == 4


def test_a_training_that_time_cut_short_is_marked():
    short = outcome("ppo", train=-1.0, test=-1.0, seed=0)
    short = Outcome(spec=short.spec, train=short.train, test=short.test, training={"steps": 7})
    [found] = report.contests(
        [short, outcome("headroom@poisson", train=-2.0, test=-2.0)],
        {"poisson": "headroom@poisson"},
    )
    notes = report.notes(report.benchmark_document([found]))
    assert "ended by time" in notes[0]
    assert "ppo-poisson-seed0" in notes[0]


def test_every_episode_is_a_row_of_the_parquet_file(contest):
    outcomes = [o for group in contest.outcomes.values() for o in group]
    table = pyarrow.parquet.read_table(io.BytesIO(report.parquet(outcomes)))
    assert table.num_rows == 5 * 2 * NUM_SEEDS
    assert set(table.column_names) == {
        *("workload", "policy", "train_seed", "split", "seed"),
        *METRICS,
    }
    assert table["train_seed"].null_count == 2 * 2 * NUM_SEEDS


def test_the_picture_has_a_point_for_each_training(contest):
    assert report.picture([contest]).startswith(b"\x89PNG")


def test_an_outcome_survives_its_file(tmp_path):
    written = outcome("ppo", train=-1.0, test=-2.0, seed=3)
    assert read_outcome(written.spec, tmp_path) is None
    write_outcome(written, tmp_path)
    read = read_outcome(written.spec, tmp_path)
    assert read is not None
    assert read.training == written.training
    assert read.test.seeds == written.test.seeds
    np.testing.assert_array_equal(
        read.train.metrics["episode_return"], written.train.metrics["episode_return"]
    )


def test_a_folder_of_a_trial_with_other_settings_is_refused(tmp_path):
    written = outcome("ppo", train=-1.0, test=-2.0, seed=3)
    write_outcome(written, tmp_path)
    with pytest.raises(ConfigError, match="steps: 100, now 200"):
        read_outcome(written.spec.replace(steps=200), tmp_path)
    (tmp_path / "outcome.json").write_text("{}")
    with pytest.raises(ConfigError, match="not the outcome of a trial"):
        read_outcome(written.spec, tmp_path)


def test_a_trial_that_began_with_other_settings_does_not_go_on(tmp_path):
    spec = outcome("ppo", train=-1.0, test=-2.0, seed=3).spec.replace(config_digest="before")
    begin(spec, tmp_path)
    assert read_outcome(spec, tmp_path) is None
    with pytest.raises(ConfigError, match="config_digest: 'before', now 'after'"):
        read_outcome(spec.replace(config_digest="after"), tmp_path)
    (tmp_path / "spec.json").write_text("{")
    with pytest.raises(ConfigError, match="not the outcome of a trial"):
        read_outcome(spec, tmp_path)


def test_keys_are_safe_names_of_folders():
    scenario = Scenario(preset="slow_wake", workload="poisson")
    spec = TrialSpec(policy="headroom@slow_wake/poisson", scenario=scenario)
    assert spec.key == "headroom@slow_wake_poisson-poisson"
    assert TrialSpec.from_dict(spec.to_dict()) == spec
    assert isinstance(spec.scenario.config, ClusterConfig)


def test_a_grid_of_one_training_has_the_interval_of_its_row():
    row = np.random.default_rng(0).normal(size=50)
    assert summarise_grid({"x": row[None]}) == summarise({"x": row})


def test_the_interval_of_a_grid_covers_the_spread_of_trainings():
    shared = np.random.default_rng(0).normal(size=50)
    grid = np.stack([shared - 10.0, shared, shared + 10.0])
    wide, narrow = summarise_grid({"x": grid})["x"], summarise({"x": grid.mean(axis=0)})["x"]
    assert wide.mean == pytest.approx(narrow.mean)
    assert wide.ci_high - wide.ci_low > 10.0 > narrow.ci_high - narrow.ci_low
