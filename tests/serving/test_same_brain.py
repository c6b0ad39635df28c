"""The service decides what the policy decides in the simulator, decision for decision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import document, make_service
from gymnasium.vector import AutoresetMode

from cloudsched.commands.policies import make_policy
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.scenario import Scenario
from cloudsched.evaluation import evaluate
from cloudsched.serving.simulated import drive

SEEDS = (3, 4, 5)
SETTINGS: dict[str, Any] = {"episode_ticks": 60}


def in_process(policy_name: str, scenario: Scenario) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the actions in each episode, and the metrics, of an ordinary evaluation."""
    policy = make_policy(policy_name, scenario.config)
    taken: list[list[int]] = [[] for _ in SEEDS]

    class Recorder:
        def reset(self, num_clusters: int) -> None:
            policy.reset(num_clusters)

        def act(self, observation: Any) -> Any:
            actions = policy.act(observation)
            for e, action in enumerate(actions.tolist()):
                taken[e].append(action)
            return actions

    evaluation = evaluate(Recorder(), scenario, SEEDS)
    decisions = evaluation.metrics["decisions"].astype(int).tolist()
    return [actions[:n] for actions, n in zip(taken, decisions, strict=True)], evaluation.metrics


def fresh_env(scenario: Scenario) -> ClusterVectorEnv:
    env = ClusterVectorEnv(
        len(SEEDS), **scenario.to_dict(), copy=False, autoreset_mode=AutoresetMode.DISABLED
    )
    env.reset(seed=list(SEEDS))
    return env


@pytest.mark.parametrize(
    ("policy", "preset"),
    [
        ("power_aware+headroom", "default"),
        ("rr+sleep", "default"),
        ("best_fit+sleep", "slow_wake"),
        ("ffd", "columbia"),
        ("bundle", "default"),
        ("bundle", "slow_wake"),
    ],
)
def test_whole_episodes_through_the_service_are_those_of_an_evaluation(
    policy: str, preset: str, bundle_folder: Path
) -> None:
    name = str(bundle_folder) if policy == "bundle" else policy
    scenario = Scenario(preset=preset, workload="diurnal", settings=SETTINGS, load=0.7)
    expected, metrics = in_process(name, scenario)
    service = make_service(name, scenario.config)

    def ask(requests: list[dict[str, Any]]) -> Any:
        batch = document("BatchRequest", requests=requests)
        return msgspec.to_builtins(service.decide_batch(batch))["replies"]

    env = fresh_env(scenario)
    assert drive(env, ask) == expected
    energy_j = env.engine.state.clusters["energy_j"]
    assert (energy_j / 3.6e6).tolist() == metrics["energy_kwh"].tolist()


def test_a_batch_decides_as_single_requests_do(bundle_folder: Path) -> None:
    scenario = Scenario(workload="poisson", settings={"episode_ticks": 15}, load=0.7)
    service = make_service(str(bundle_folder), scenario.config)

    def one_by_one(requests: list[dict[str, Any]]) -> Any:
        documents = [document("DecisionRequest", **request) for request in requests]
        return [msgspec.to_builtins(service.decide(request)) for request in documents]

    def at_once(requests: list[dict[str, Any]]) -> Any:
        batch = document("BatchRequest", requests=requests)
        return msgspec.to_builtins(service.decide_batch(batch))["replies"]

    assert drive(fresh_env(scenario), one_by_one) == drive(fresh_env(scenario), at_once)
