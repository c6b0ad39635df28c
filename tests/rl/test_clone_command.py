"""`cloudsched clone` writes a bundle that acts, and from which PPO can start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cloudsched.bundle import load_bundle, save_bundle
from cloudsched.cli import main
from cloudsched.commands.train import start_from
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.evaluation import evaluate
from cloudsched.rl.algorithms.ppo import ClusterPPOConfig

SMALL = ["--set", "episode_ticks=40", "fleet.num_servers=4", "visible_jobs=3"]


def test_a_clone_acts_and_training_starts_from_it(tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    words = ["clone", "--teacher", "best_fit+sleep", "--rounds", "2", "--out", str(folder)]
    assert main([*words, *SMALL]) == 0
    bundle = load_bundle(folder)
    assert bundle.training["teacher"] == "best_fit+sleep"
    assert bundle.training["rounds"] == 2
    scenario = Scenario(settings={"episode_ticks": 40})  # at N=15, though cloned at N=4
    metrics = evaluate(bundle.policy(scenario.config), scenario, [0, 1]).metrics
    assert metrics["illegal"].sum() == 0
    assert metrics["jobs_served"].min() > 0.0

    config = ClusterPPOConfig()
    start_from(config, folder)
    assert Path(config.initial_weights).samefile(folder / "weights.safetensors")
    assert config.model_config["network"] == bundle.network.to_dict()

    values = save_bundle(replace(bundle, is_q_network=True), tmp_path / "values")
    with pytest.raises(ConfigError, match="not action values"):
        start_from(config, values)


def test_no_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clone", "--rounds", "0"]) == 2
    assert "--rounds 0" in capsys.readouterr().err
