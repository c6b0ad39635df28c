"""A benchmark sent by `ray job submit` to two nodes survives the loss of a trial and of a node."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

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
        first, second = _on_head_and_second(ray_cluster, out, job, log, wait_for)
        first.kill()
        wait_for(lambda: "lost its process" in log.read_text(), job, log)
        ray_cluster.raylets[1].kill()
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


def _on_head_and_second(cluster, out, job, log, wait_for):
    """Return the processes of both trainings, one on each node, once they have checkpoints."""

    def checkpoints():
        return len(list(out.glob("trials/learner-*/checkpoint/state.json"))) == 2

    wait_for(checkpoints, job, log)
    on_head, on_second = cluster.trials(0), cluster.trials(1)
    assert on_head, f"no trial runs on the head\n{log.read_text()}"
    assert on_second, f"no trial runs on the second node\n{log.read_text()}"
    return on_head[0], on_second[0]


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
