"""`cloudsched train` leaves a bundle that everything else loads, and goes on after an interrupt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cloudsched.bundle import load_bundle
from cloudsched.rl.algorithms.ppo import ClusterPPOConfig
from cloudsched.rl.training import fit_schedules

pytestmark = pytest.mark.ray

CONFIG = """
from cloudsched.rl.algorithms.ppo import ClusterPPOConfig

SETTINGS = {"episode_ticks": 30, "fleet": {"num_servers": 4}, "visible_jobs": 3}


def build():
    config = ClusterPPOConfig()
    config.environment(env_config={"settings": SETTINGS})
    config.env_runners(num_envs_per_env_runner=8)
    config.rl_module(model_config={"network": {"width": 16, "context_width": 16, "pair_width": 8}})
    config.training(train_batch_size_per_learner=512, minibatch_size=128, num_epochs=2)
    config.debugging(seed=0, log_level="ERROR")
    return config
"""


def command(folder: Path, *words: str) -> list[str]:
    (folder / "tiny.py").write_text(CONFIG)
    paths = [str(folder / "tiny.py"), "--out", str(folder / "run")]
    options = ["--evaluate-every", "2", "--num-seeds", "2"]
    return [sys.executable, "-m", "cloudsched.cli", "train", *paths, *options, *words]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_training_is_interrupted_resumed_and_ends_in_a_bundle(tmp_path: Path, number: int) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        run = subprocess.Popen(
            command(tmp_path, "--steps", "100000000"), stdout=file, stderr=file, text=True
        )
        deadline = time.monotonic() + 200
        while "best" not in log.read_text():
            assert run.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        os.kill(run.pid, number)
        assert run.wait(90) == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    first = json.loads((tmp_path / "run/checkpoint/state.json").read_text())
    assert load_bundle(tmp_path / "run/bundle").training["best_return"] == first["best_return"]

    goal = first["steps"] + 2000
    done = subprocess.run(
        command(tmp_path, "--steps", str(goal), "--resume", "--json"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert goal <= outcome["steps"] < goal + 512
    assert outcome["best_return"] >= first["best_return"]
    assert load_bundle(Path(outcome["bundle"])).cluster.num_servers == 4
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        *("bundle", "checkpoint", "config.json", "progress.csv")
    }


def test_schedules_end_with_the_training():
    config = ClusterPPOConfig()
    config.training(
        lr=[[0, 1e-3], [600, 1e-3], [2_000, 1e-5]], entropy_coeff=[[0, 0.1], [1_000, 0.0]]
    )
    fit_schedules(config, 500)
    assert config.lr == [[0, 1e-3], [150, 1e-3], [500, 1e-5]]
    assert config.entropy_coeff == [[0, 0.1], [250, 0.0]]
    constant = ClusterPPOConfig()
    constant.training(lr=1e-3)
    fit_schedules(constant, 500)
    assert constant.lr == 1e-3
