"""A benchmark sent by `ray job submit` to two nodes survives the loss of a trial and of a node."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SUBMIT = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit"]
CODE = ["--working-dir", ".", "--runtime-env", "runtime_env.yaml"]


@pytest.mark.timeout(1200)
def test_a_job_on_two_nodes_survives_the_loss_of_a_trial_and_of_a_node(
    ray_cluster, learner, wait_for, tmp_path
):
    out, log = tmp_path / "out", tmp_path / "log"
    words = ["--budget", "tiny", "--workloads", "poisson", "--policies", str(learner)]
    script = ["python", "-m", "tune.benchmark", *words, "--train-seeds", "2", "--steps", "60000"]
    with log.open("w") as file:
        job = subprocess.Popen(
            [*SUBMIT, "--address", ray_cluster.dashboard, *CODE, "--", *script, "--out", str(out)],
            env=ray_cluster.environment,
            stdout=file,
            stderr=file,
            cwd=ROOT,
        )
    try:
        first, second = _held_on_head_and_second(ray_cluster, out, job, log, wait_for)
        first.kill()
        wait_for(lambda: "lost its process" in log.read_text(), job, log)
        ray_cluster.raylets[1].kill()
        second.kill()  # a node takes its processes along
        second.wait(60)
        assert job.wait(600) == 0, log.read_text()
    finally:
        job.kill()
        job.wait()
    text = log.read_text()
    assert text.count("lost its process") >= 2, text
    document = json.loads((out / "benchmark.json").read_text())
    rows = document["workloads"]["poisson"]["policies"]
    assert len(rows) == 2
    assert len(rows[learner.stem]["trainings"]) == 2
    for seed in (0, 1):  # nobody began again from nothing
        steps = re.findall(rf"seed{seed} +([\d,]+) decisions", text)
        counts = [int(count.replace(",", "")) for count in steps]
        assert counts == sorted(set(counts)), text
    assert (out / "winner/bundle.json").is_file()


def _held_on_head_and_second(cluster, out, job, log, wait_for):
    """Return the processes of both trainings, one on each node, held once they have checkpoints.

    Held, because a training of this size may be over before the other has begun.
    """
    held = {}

    def are_held():
        for node in {0, 1} - held.keys():
            for trial in cluster.trials(node):
                with suppress(psutil.Error):
                    key = Path(trial.cwd()).name  # Tune runs a trial in a folder of its name
                    if (out / "trials" / key / "checkpoint/state.json").is_file():
                        trial.suspend()
                        held[node] = trial
        return len(held) == 2

    wait_for(are_held, job, log)
    return held[0], held[1]


def test_a_job_without_the_token_is_refused(ray_cluster):
    strangers = {**ray_cluster.environment, "RAY_AUTH_TOKEN": "0" * 64}
    done = subprocess.run(
        [*SUBMIT, "--address", ray_cluster.dashboard, "--", "true"],
        env=strangers,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "token" in (done.stdout + done.stderr).lower()
