import numpy as np
import pytest
import torch

from cloudsched.bundle import Bundle, load_bundle, save_bundle
from cloudsched.commands.policies import make_policy
from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.envs.scenario import Scenario
from cloudsched.errors import BundleError, ConfigError
from cloudsched.evaluation import evaluate, first_seeds
from cloudsched.heuristics.catalog import load_heuristic
from cloudsched.models.hierarchy import MODULES, SUB_AGENTS
from cloudsched.rl.algorithms.hierarchical import HierarchicalConfig
from cloudsched.rl.training import TrainingRun
from cloudsched.sweeps.benchmark import BUDGETS, Resources, plan


@pytest.fixture
def hierarchical_config(tiny_config):
    config = HierarchicalConfig()
    config.environment(env_config=tiny_config.env_config)
    config.env_runners(num_envs_per_env_runner=8)
    config.rl_module(model_config=tiny_config.model_config)
    config.training(train_batch_size_per_learner=256, minibatch_size=64, num_epochs=1)
    config.debugging(seed=0, log_level="ERROR")
    return config


def training_run(config, folder):
    def keep(weights, _):
        save_bundle(Bundle.of_run(run, weights), folder / "bundle")

    run = TrainingRun(config.build_algo(), folder, num_seeds=2, keep=keep)
    return run


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_three_modules_learn_are_restored_and_end_in_one_bundle(hierarchical_config, tmp_path):
    run = training_run(hierarchical_config, tmp_path)
    before = {k: v.clone() for k, v in run.network.state_dict().items()}
    result = run.iterate()
    assert result["env_runners"]["num_env_steps_sampled_lifetime"] == 256
    after = run.network.state_dict()
    for name in MODULES:
        assert np.isfinite(result["learners"][name]["total_loss"])
        assert result["env_runners"]["num_module_steps_sampled_lifetime"][name] > 0
        assert any((before[k] != after[k]).any() for k in before if k.startswith(f"{name}."))
    run.evaluate()
    run.save()

    again = training_run(hierarchical_config, tmp_path)
    again.restore()
    for name, tensor in again.network.state_dict().items():
        torch.testing.assert_close(tensor, after[name])
    assert again.iterate()["env_runners"]["num_env_steps_sampled_lifetime"] == 512
    for each in (run, again):
        each.algorithm.stop()

    cluster, path = run.scenario.config, str(tmp_path / "bundle")
    loaded = load_bundle(tmp_path / "bundle")
    for name, tensor in loaded.weights.items():
        if not name.startswith("supervisor.out."):  # may be set to choose always the same one
            torch.testing.assert_close(tensor, after[name])
    scenario = Scenario.from_dict(dict(hierarchical_config.env_config))
    for suffix in ("", *(f"#{name}" for name in SUB_AGENTS)):
        metrics = evaluate(make_policy(path + suffix, cluster), scenario, range(2)).metrics
        assert (metrics["illegal"] == 0).all()
    with pytest.raises(BundleError, match="no part 'supervisor'"):
        make_policy(path + "#supervisor", cluster)
    with pytest.raises(BundleError, match="it has no parts"):
        loaded.part("power").part("power")


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_a_single_minded_hierarchy_decides_as_its_sub_agent(hierarchical_config, tmp_path):
    run = training_run(hierarchical_config, tmp_path)
    network, scenario = run.network, run.scenario
    observation = {
        name: torch.from_numpy(array)
        for name, array in ClusterVectorEnv(4, **scenario.to_dict()).reset(seed=0)[0].items()
    }
    before = {k: v.clone() for k, v in network.state_dict().items()}
    for name, single_minded in zip(SUB_AGENTS, network.single_minded(), strict=True):
        logits, _ = single_minded(observation)
        assert torch.equal(logits, network.get_submodule(name)(observation)[0])
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name])
    # What is kept is at least as good on the train seeds as each sub-agent alone.
    run.evaluate()
    cluster, path = scenario.config, str(tmp_path / "bundle")
    returns = [
        evaluate(make_policy(path + suffix, cluster), scenario, first_seeds("train", 2))
        .summary["episode_return"]
        .mean
        for suffix in ("", *(f"#{name}" for name in SUB_AGENTS))
    ]
    assert returns[0] >= max(returns[1:])
    run.algorithm.stop()


def test_settings_of_sub_agents_name_sub_agents():
    with pytest.raises(ConfigError, match="expected a number for each of 'power' and 'sla'"):
        HierarchicalConfig().training(sla_weights={"power": 1.0})
    with pytest.raises(ConfigError, match="starts from a `rule`"):
        HierarchicalConfig().training(initial_weights="weights.safetensors")


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_with_a_rule_the_hierarchy_and_both_sub_agents_begin_as_it(hierarchical_config, tmp_path):
    hierarchical_config.training(rule="best_fit+sleep")
    run = training_run(hierarchical_config, tmp_path)
    assert run.starts_as_rule
    run.evaluate()
    rule, path = make_policy("best_fit+sleep", run.scenario.config), str(tmp_path / "bundle")
    expected = evaluate(rule, run.scenario, range(2)).metrics["episode_return"]
    for suffix in ("", *(f"#{name}" for name in SUB_AGENTS)):
        policy = make_policy(path + suffix, run.scenario.config)
        assert (
            evaluate(policy, run.scenario, range(2)).metrics["episode_return"] == expected
        ).all()
    run.algorithm.stop()


@pytest.mark.parametrize(
    ("preset", "workload", "expected"),
    [
        ("default", "diurnal", "headroom@diurnal"),
        ("slow_wake", "poisson", "headroom@slow_wake/poisson"),
    ],
)
def test_a_benchmark_starts_from_the_rule_tuned_to_its_own_workload(
    tmp_path, preset, workload, expected
):
    config = HierarchicalConfig()
    config.environment(env_config={"workload": "poisson"})
    config.training(rule="tuned")
    found = plan(
        policies={"hierarchical": config},
        workloads=(workload,),
        preset=preset,
        budget=BUDGETS["tiny"],
        resources=Resources(),
        folder=tmp_path,
    )
    (moved,) = found.algorithms.values()
    moved.validate()
    assert moved.model_config["network"]["prior"] == load_heuristic(expected).to_dict()


def test_a_workload_that_no_rule_was_tuned_to_is_refused():
    config = HierarchicalConfig()
    config.environment(env_config={"workload": "swf"})
    config.training(rule="tuned")
    with pytest.raises(ConfigError, match="No heuristic is tuned to preset 'default'"):
        config.validate()
