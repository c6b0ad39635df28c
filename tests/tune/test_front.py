"""`python -m tune.front` shifts headroom, and compares at equal service."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from cloudsched.bundle import Bundle, load_bundle, save_bundle
from cloudsched.cli import run_script
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.scenario import Scenario
from cloudsched.heuristics.catalog import load_heuristic
from cloudsched.models.networks import NetworkConfig, ObservationSizes, QNetwork, build_network
from tune.front import Front, shifted

WORDS = ["--set", "episode_ticks=150", "--num-seeds", "6", "--shifts", "-1", "0", "2"]


def test_more_headroom_draws_more_and_is_late_less(tmp_path, capsys):
    policies = ["--policies", "headroom@poisson", "power_aware+headroom"]
    words = [*policies, *WORDS, "--out", str(tmp_path)]
    assert run_script(Front, "front", words) == 0
    document = json.loads((tmp_path / "front.json").read_text())
    for points in document["fronts"].values():
        assert [point["shift"] for point in points] == [-1.0, 0.0, 2.0]
        power = [point["mean_power_w"]["mean"] for point in points]
        late = [point["sla_violation_rate"]["mean"] for point in points]
        assert power[0] < power[2]
        assert late[0] >= late[2]
    (comparison,) = document["comparisons"]
    assert comparison["policy"] == "power_aware+headroom"
    assert f"shifted by {comparison['shift']:+g}" in capsys.readouterr().out
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


def test_a_bundle_of_action_values_that_is_not_shifted_decides_as_it_is(tmp_path):
    cluster, rule = Scenario().config, load_heuristic("headroom@poisson")
    settings = NetworkConfig(prior=rule, prior_weight=0.05, is_balanced=False)
    torch.manual_seed(0)
    network = QNetwork(build_network(ObservationSizes.of(cluster), settings))
    weights = {
        name: part + 0.1 * torch.randn(part.shape) for name, part in network.state_dict().items()
    }
    bundle = Bundle(
        network=settings, cluster=cluster, weights=weights, is_q_network=True, training={}
    )
    save_bundle(bundle, tmp_path / "bundle")
    env = ClusterVectorEnv(8, copy=False)
    observation, _ = env.reset(seed=0)
    ours = load_bundle(tmp_path / "bundle").policy(cluster)
    same = shifted(str(tmp_path / "bundle"), 0.0, cluster)
    for _ in range(300):
        actions = ours.act(observation)
        np.testing.assert_array_equal(same.act(observation), actions)
        observation, *_ = env.step(actions)


@pytest.mark.parametrize("words", [["--shifts", "1"], ["--policies", "headroom@poisson"]])
def test_a_mistake_costs_one_line(words, capsys):
    assert run_script(Front, "front", words) == 2
    assert "expected at least two policies" in capsys.readouterr().err
