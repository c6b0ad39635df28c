"""`python -m tune.benchmark` on a local Ray: killed in the middle, then run again to its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet
import pytest

from cloudsched.bundle import load_bundle

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "RAY_worker_niceness": "0"}  # or workers starve on a busy machine


@pytest.mark.timeout(1200)
def test_a_killed_benchmark_goes_on_without_running_finished_trials_again(
    learner, wait_for, tmp_path
):
    out, log = tmp_path / "out", tmp_path / "log"
    words = ["--budget", "tiny", "--policies", "rr", "tuned", str(learner), "--workloads"]
    options = [*words, "poisson", "--train-seeds", "3", "--steps", "16000", "--out", str(out)]
    command = [sys.executable, "-m", "tune.benchmark", *options]
    with log.open("w") as file:
        driver = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, env=ENVIRONMENT)

    def begun():
        """Return the decisions behind each training that has a checkpoint and much left to do."""
        found = {}
        for path in out.glob("trials/*/checkpoint/state.json"):
            with suppress(FileNotFoundError):  # a newer checkpoint is taking its place
                steps = json.loads(path.read_text())["steps"]
                if steps < 8_000:  # half: one that is nearly done may end before the kill arrives
                    found[path.parents[1].name] = steps
        return found

    unfinished = {}

    def is_midway():
        unfinished.update(begun() if list(out.glob("trials/*seed*/outcome.json")) else {})
        return unfinished

    try:
        wait_for(is_midway, driver, log)
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    finished = {path: path.stat().st_mtime_ns for path in out.glob("trials/*/outcome.json")}
    assert 3 <= len(finished) < 5

    done = subprocess.run(
        [*command, "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(finished)} are finished" in done.stderr
    assert done.stderr.count("trials done") == 5 - len(finished)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    document = json.loads(done.stdout)
    trainings = document["workloads"]["poisson"]["policies"][learner.stem]["trainings"]
    assert all(training["steps"] >= 16_000 for training in trainings)
    for trial, steps in unfinished.items():  # went on from the checkpoint, or it would be shorter
        first = next(line for line in done.stderr.splitlines() if trial in line and "deci" in line)
        assert int(first.split(" decisions")[0].split()[-1].replace(",", "")) > steps

    table = pyarrow.parquet.read_table(document["files"]["parquet"]).to_pandas()
    assert len(table) == 5 * (4 + 4)
    winner = load_bundle(Path(document["files"]["winner"]))
    best = max(trainings, key=lambda training: training["train_return"])
    assert document["winner"] == best["trial"]
    assert winner.training["best_return"] == best["best_return"]
    assert winner.evaluation["split"] == "test"
    assert Path(document["files"]["plot"]).read_bytes().startswith(b"\x89PNG")
    events = list(out.glob("tune/*/*/events.out.tfevents.*"))
    assert any(b"mean_power_w" in path.read_bytes() for path in events)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--policies", "pppo"], "No policy named 'pppo'"),
        (["--workloads", "poison"], "Did you mean 'poisson'"),
        (["--preset", "slow_wake", "--workloads", "bursty"], "tune-heuristic"),
        (["--budget", "smal"], "Did you mean 'small'"),
        (["--train-seeds", "0"], "--train-seeds 0"),
    ],
)
def test_a_mistake_costs_one_line_before_ray_starts(words, complaint, capsys, monkeypatch):
    from cloudsched.cli import run_script
    from tune.benchmark import Benchmark

    monkeypatch.chdir(ROOT)
    assert run_script(Benchmark, "python -m tune.benchmark", words) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_a_relative_folder_is_refused_inside_a_ray_job(capsys, monkeypatch):
    from cloudsched.cli import run_script
    from tune.benchmark import Benchmark

    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert run_script(Benchmark, "python -m tune.benchmark", ["--policies", "rr"]) == 2
    assert "absolute path" in capsys.readouterr().err
