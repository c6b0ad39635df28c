"""The four commands of offline learning, in order, on real Ray with real Parquet files."""

import json
import logging
import shutil

import numpy as np
import pytest
import torch

from cloudsched.cli import run_script
from cloudsched.commands.policies import make_policy
from cloudsched.datasets.manifest import read_manifest
from cloudsched.evaluation import Episodes
from cloudsched.models.constrained import ConstrainedConfig
from cloudsched.models.networks import NetworkConfig
from cloudsched.rl.offline import OfflineRunConfig, train
from offline.check import Check
from offline.evaluate import Evaluate
from offline.record import Record
from offline.train import Train

pytestmark = pytest.mark.ray

TINY = ConstrainedConfig(
    network=NetworkConfig(width=8, context_width=8, pair_width=8), batch_size=128, num_ticks=2
)


@pytest.fixture(scope="module", autouse=True)
def _a_ray():
    """Ray for this module: as another one left it, or our own; the commands join it."""
    import ray

    is_own = not ray.is_initialized()
    if is_own:
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            object_store_memory=150 * 2**20,
            _system_config={"worker_niceness": 0},  # or workers starve on a busy machine
        )
    yield
    if is_own:
        ray.shutdown()


@pytest.fixture
def _stays_connected(monkeypatch):
    """Commands connect and let go by themselves; here they share one Ray to save its starts."""
    import ray

    monkeypatch.setattr(ray, "init", lambda *_, **__: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_stays_connected")
def test_record_check_train_evaluate_end_in_a_bundle_that_acts(tmp_path, capsys):
    data, out = tmp_path / "data", tmp_path / "policy"
    rules = ["--set", "episode_ticks=60", "fleet.num_servers=4", "visible_jobs=3"]
    behaviours = ["--behaviours", "rr", "best_fit+sleep~0.2", "power_aware+headroom~0.2"]
    assert (
        run_script(Record, "record", ["--out", str(data), "--episodes", "12", *rules, *behaviours])
        == 0
    )
    assert run_script(Check, "check", [str(data)]) == 0
    steps = ["--steps", "12", "--batch-size", "64", "--checkpoint-every", "6"]
    assert run_script(Train, "train", [str(data), "--out", str(out), *steps]) == 0
    # A second run is refused, and nothing is left half-done.
    assert run_script(Train, "train", [str(data), "--out", str(out), *steps]) == 2
    capsys.readouterr()
    command = [str(data), "--policies", str(out / "bundle"), "--steps", "5", "--truth-seeds", "4"]
    assert run_script(Evaluate, "evaluate", [*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    entry = document["policies"][str(out / "bundle")]
    for method in ("fitted_q", "importance", "doubly_robust"):
        estimate = entry["estimates"][method]["power_w"]
        assert estimate["ci_low"] <= estimate["mean"] <= estimate["ci_high"]
    assert entry["truth"]["power_w"]["mean"] > 0.0
    scenario = read_manifest(data).scenario
    for name in ("bundle", "clone"):
        policy = make_policy(str(out / name), scenario.config)
        assert Episodes(scenario, [0, 1]).run(policy).metrics["illegal"].sum() == 0


def weights(state):
    return state["learner"]["model"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_resumed_run_ends_with_the_same_weights_as_one_that_never_stopped(recorded, tmp_path):
    whole = train(recorded, TINY, _run(8, every=4), tmp_path / "whole")
    cut = tmp_path / "cut"
    shutil.copytree(tmp_path / "whole", cut)
    _forget_last(cut / "ray")
    resumed = train(recorded, TINY, _run(8, every=4), cut)
    assert resumed["position"] == whole["position"]
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_workers_share_each_batch_and_keep_the_same_price(recorded, tmp_path):
    two = train(recorded, TINY, _run(3, every=3, workers=2), tmp_path / "two")
    assert two["learner"]["step_count"] == 3
    lines = (tmp_path / "two" / "progress.jsonl").read_text().splitlines()
    assert len(lines) == 1  # the first worker alone tells
    price = json.loads(lines[0])["price"]
    assert price == pytest.approx(np.exp(two["learner"]["multiplier"]["log_price"]))


def _run(num_steps, *, every, workers=1):
    return OfflineRunConfig(
        num_steps=num_steps, report_every=every, checkpoint_every=every, num_workers=workers
    )


def _forget_last(folder):
    """Take the run back to its first checkpoint, as if it had been killed before the second."""
    path = folder / "checkpoint_manager_snapshot.json"
    document = json.loads(path.read_text())
    first, second = document["checkpoint_results"]
    shutil.rmtree(folder / second["checkpoint_dir_name"])
    document["checkpoint_results"] = [first]
    document["checkpoint_report_indices"] = document["checkpoint_report_indices"][:1]
    document["latest_checkpoint_result"] = first
    path.write_text(json.dumps(document))
