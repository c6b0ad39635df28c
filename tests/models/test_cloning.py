import pytest
import torch

from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.heuristics.catalog import make_heuristic
from cloudsched.models.cloning import CloningConfig, clone
from cloudsched.models.networks import NetworkConfig, ObservationSizes, build_network


def test_a_clone_comes_to_agree_with_its_teacher_and_learns_its_value():
    torch.manual_seed(0)
    settings = {"episode_ticks": 100, "fleet": {"num_servers": 4}, "visible_jobs": 3}
    scenario = Scenario(settings=settings)
    network = build_network(ObservationSizes.of(scenario.config), NetworkConfig())
    rounds = []
    clone(
        network,
        make_heuristic("power_aware+headroom", scenario.config),
        scenario,
        range(32),
        CloningConfig(num_rounds=6, num_steps=64, minibatch_size=256),
        rounds.append,
    )
    assert rounds[-1].agreement > 0.8 > rounds[0].agreement
    assert rounds[-1].policy < 0.5 * rounds[0].policy
    assert rounds[-1].value < rounds[0].value


def test_nonsense_settings_are_refused():
    with pytest.raises(ConfigError, match="student_share=2"):
        CloningConfig(student_share=2)
