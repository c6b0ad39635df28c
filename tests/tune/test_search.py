"""The searches with ASHA and PBT run, resume, and end in hyper-parameters that `train` takes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cloudsched.bundle import load_bundle
from cloudsched.commands.train import load_config
from cloudsched.errors import ConfigError
from cloudsched.rl.training import apply_hyperparameters, read_hyperparameters
from cloudsched.sweeps import search
from tune.ppo_asha import PpoAsha
from tune.ppo_pbt import PpoPbt

pytestmark = [pytest.mark.ray]


@pytest.fixture(scope="module")
def small_ray():
    ray = pytest.importorskip("ray")
    ray.shutdown()  # the one that the tests of other folders share
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _system_config={"worker_niceness": 0},
    )
    yield ray
    ray.shutdown()


def options(learner: Path, folder: Path) -> dict:
    sizes = {"steps": 4 * 512, "reports": 4, "num_seeds": 2, "episode_ticks": 20}
    return {"config": learner, "out": folder, **sizes}


@pytest.mark.slow
@pytest.mark.usefixtures("small_ray")
def test_asha_searches_and_its_best_fits_train(learner, tmp_path):
    a_search = PpoAsha(trials=4, **options(learner, tmp_path))
    what = {"search": "PpoAsha", "workload": "poisson"}
    results = search.fit_or_resume(a_search.tuner, tmp_path, what)
    document = search.save(results, tmp_path, what)
    steps = [row["steps"] for row in document["trials"]]
    assert max(steps) == 2048
    # Whether a trial ends early depends on the order in which trials report: often, not always.
    assert min(steps) >= 512
    returns = [row["best_return"] for row in document["trials"]]
    assert returns == sorted(returns, reverse=True)
    found = read_hyperparameters(tmp_path / "best.json")
    config = load_config(learner)
    apply_hyperparameters(config, found)
    assert config.lr == document["trials"][0]["hyperparameters"]["training"]["lr"]
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.network.width == found["network"]["width"]
    assert bundle.training["best_return"] == returns[0]

    again = search.fit_or_resume(_not_built, tmp_path, what)  # finished: nothing runs again
    assert sorted(r.metrics["steps"] for r in again) == sorted(steps)
    with pytest.raises(ConfigError, match="another search"):
        search.fit_or_resume(_not_built, tmp_path, {**what, "workload": "diurnal"})


@pytest.mark.slow
@pytest.mark.usefixtures("small_ray")
def test_pbt_copies_weights_and_learns_with_the_new_hyperparameters(learner, tmp_path):
    # Of trials that do not wait for each other, each may happen to report when it is not the worst.
    a_search = PpoPbt(trials=3, copies=3, synchronous=True, **options(learner, tmp_path))
    what = {"search": "PpoPbt", "workload": "poisson"}
    results = search.fit_or_resume(a_search.tuner, tmp_path, what)
    assert results.num_terminated == 3
    copies = list((tmp_path / "tune").glob("pbt_policy_*.txt"))
    assert copies, "no trial copied another"
    for result in results:
        learned_with = result.metrics["learners"]["default_policy"][
            "default_optimizer_learning_rate"
        ]
        assert learned_with == pytest.approx(result.config["hyperparameters"]["training"]["lr"])
        assert result.metrics["env_runners"]["mean_power_w"] > 0.0
    document = search.save(results, tmp_path, what)
    assert len(document["trials"]) == 3
    assert "lr" in {column.header for column in search.table(document).columns}


def _not_built():
    raise AssertionError("a finished search was begun again")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[1]", "Cannot read"),
        ("{", "Cannot read"),
        ('{"training": {"lrr": 1}}', "lrr"),
        ('{"network": {"widht": 1}}', "width"),
    ],
)
def test_hyperparameters_that_fit_nothing_are_refused(content, complaint, learner, tmp_path):
    path = tmp_path / "best.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        apply_hyperparameters(load_config(learner), read_hyperparameters(path))


def test_hyperparameters_of_unknown_parts_are_refused(learner):
    with pytest.raises(ConfigError, match="'optimizer'"):
        apply_hyperparameters(load_config(learner), {"optimizer": {}})
