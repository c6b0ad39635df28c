"""Every setting refuses what it cannot mean, and says what would be right."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from cloudsched.config import ClusterConfig, FleetConfig, RewardConfig
from cloudsched.envs.catalog import PRESETS
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError

NOT_A_NUMBER = (math.nan, math.inf, "1", None, True)
NOT_A_FLAG = (0, 1, "yes", None)

BAD_FLEET: dict[str, tuple[Any, ...]] = {
    "num_servers": (0, -1, 1.5, True, "15", None),
    "kind": ("tier", "", None),
    "resources": ((), "cpu", ("cpu", "cpu"), ("",), (1,), tuple(f"r{i}" for i in range(17))),
    "base_capacity": (0.0, -1.0, *NOT_A_NUMBER),
    "base_idle_w": (-1.0, 300.0, *NOT_A_NUMBER),
    "base_max_w": (0.0, 100.0, *NOT_A_NUMBER),
    "fleet_seed": (-1, 0.5, None),
}
BAD_REWARD: dict[str, tuple[Any, ...]] = {
    name: (-0.1, *NOT_A_NUMBER)
    for name in (
        *("alpha", "beta", "late_penalty", "toggle_penalty"),
        *("illegal_penalty", "cost_late_rate"),
    )
}
BAD_CLUSTER: dict[str, tuple[Any, ...]] = {
    "fleet": (None, {}, 15),
    "reward": (None, {}, 5.0),
    "tick_s": (0.0, -1.0, 1e6, *NOT_A_NUMBER),
    "episode_ticks": (0, -5, 1.5, None),
    "sleep": NOT_A_FLAG,
    "standby_factor": (-0.1, 1.1, *NOT_A_NUMBER),
    "wake_power_factor": (-0.1, *NOT_A_NUMBER),
    "wake_delay_ticks": (-1, 0.5, None),
    "wake_delay_max_ticks": (0, -1, 1.5, "5"),
    "sla_latency_ticks": (-1, 1.5, "30"),
    "sla_stretch": (0.9, math.nan, "1.6"),
    "drop_expired": NOT_A_FLAG,
    "queue_capacity": (0, -1, 2.5, None),
    "visible_jobs": (0, -1, 5000, None),
    "window_order": ("lifo", None),
    "max_decisions_per_tick": (0, -1, 1.5),
    "wait_only_when_stuck": NOT_A_FLAG,
}


def cases() -> list[tuple[type, str, Any]]:
    tables = ((FleetConfig, BAD_FLEET), (RewardConfig, BAD_REWARD), (ClusterConfig, BAD_CLUSTER))
    return [
        (kind, name, value)
        for kind, table in tables
        for name, values in table.items()
        for value in values
    ]


@pytest.mark.parametrize(("kind", "name", "value"), cases())
def test_a_setting_out_of_range_is_refused_by_name(kind: type, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        kind(**{name: value})
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_every_field_has_a_case_above() -> None:
    for kind, table in (
        (FleetConfig, BAD_FLEET),
        (RewardConfig, BAD_REWARD),
        (ClusterConfig, BAD_CLUSTER),
    ):
        assert set(table) == set(kind.__dataclass_fields__)


@pytest.mark.parametrize("preset", PRESETS)
def test_settings_survive_a_dictionary(preset: str) -> None:
    config = PRESETS[preset].config
    assert ClusterConfig.from_dict(config.to_dict()) == config


def test_an_unknown_setting_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'wake_delay_ticks'"):
        ClusterConfig.from_dict({"wake_delay_tick": 3})
    with pytest.raises(ConfigError, match=r"'fleet.num_server'. Did you mean 'fleet.num_servers'"):
        ClusterConfig.from_dict({"fleet": {"num_server": 3}})
    with pytest.raises(ConfigError, match="Did you mean 'sleep'"):
        ClusterConfig().replace(sleeps=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward": {"alpha": -1.0}}, "reward.alpha=-1.0: expected"),
        ({"reward": {"alfa": 1.0}}, "No setting named 'reward.alfa'. Did you mean 'reward.alpha'?"),
        ({"fleet": {"num_servers": 0}}, "fleet.num_servers=0: expected"),
        ({"fleet": {"kind": "tier"}}, "fleet.kind='tier': expected"),
        ({"fleet": {"resources": ["cpu", "cpu"]}}, "fleet.resources=('cpu', 'cpu'): expected"),
        ({"fleet": {"base_max_w": 50.0}}, "fleet.base_max_w=50.0: expected more than fleet.base_"),
        ({"fleet": {"colour": "red"}}, "Known: fleet.base_capacity, fleet.base_idle_w"),
        ({"tick_s": 0.0}, "tick_s=0.0: expected"),
    ],
)
def test_an_error_names_the_whole_path_of_a_setting(settings: dict[str, Any], message: str) -> None:
    for build in (ClusterConfig.from_dict, lambda values: Scenario(settings=values).config):
        with pytest.raises(ConfigError) as caught:
            build(settings)
        assert message in str(caught.value)


@pytest.mark.parametrize("name", ["base_idle_w", "base_max_w"])
def test_measured_servers_take_no_other_watts(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"fleet.{name}=150.0: measured servers draw what"):
        _ = Scenario(preset="measured", settings={"fleet": {name: 150.0}}).config
    saved = PRESETS["measured"].config.to_dict()
    assert ClusterConfig.from_dict(saved).fleet.kind == "measured"


def test_a_scenario_changes_its_preset_in_place() -> None:
    scenario = Scenario(preset="slow_wake", settings={"fleet": {"num_servers": 7}, "tick_s": 30})
    assert scenario.config.fleet == FleetConfig(num_servers=7)
    assert scenario.config.wake_delay_ticks == 5
    assert scenario.config.tick_s == 30
    assert Scenario.from_dict(scenario.to_dict()) == scenario


def test_the_columbia_preset_has_one_action_for_each_pair_and_one_to_wait() -> None:
    assert PRESETS["columbia"].config.num_actions == 5 * 15 + 1
    assert PRESETS["columbia_sleep"].config.num_actions == 5 * 15 + 15 + 1
