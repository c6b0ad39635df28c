import numpy as np
import pytest
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from safetensors.torch import save_file

from cloudsched.errors import ConfigError
from cloudsched.models import set_pass
from cloudsched.models.flat_gradient import FlatGradient
from cloudsched.models.precision import Linear
from cloudsched.rl.algorithms.ppo import ENV_ID, ClusterPPO, ClusterPPOConfig
from cloudsched.rl.learners import ppo
from cloudsched.rl.modules.cluster import ClusterModule
from cloudsched.rl.runner import REPORTED_METRICS, as_tensors

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


@pytest.fixture
def build():
    """Build algorithms that are stopped when the test ends."""
    built = []

    def builder(config):
        built.append(config.build_algo())
        return built[-1]

    yield builder
    for algorithm in built:
        algorithm.stop()


def weights(algorithm):
    state = algorithm.learner_group.get_state(components="learner/rl_module")
    return state["learner"]["rl_module"]["default_policy"]


def test_results_carry_the_measures_of_episodes_by_name(build, tiny_config):
    algorithm = build(tiny_config)
    for _ in range(3):
        result = algorithm.train()
    reported = result["env_runners"]
    for name in ("episode_return_mean", *REPORTED_METRICS):
        assert np.isfinite(reported[name]), name
    assert reported["num_env_steps_sampled_lifetime"] == 3 * 512
    assert result["learners"]["default_policy"]["num_minibatches"] == 2 * 4


def test_an_entropy_penalty_makes_the_policy_decide(build, tiny_config):
    entropies = []
    for penalty in (0.0, 1.0):
        # A schedule, because RLlib hands out its values in another form than a plain number's.
        tiny_config = tiny_config.copy(copy_frozen=False)
        schedule = [[0, 0.01], [10_000, 0.0]]
        tiny_config.training(lr=5e-3, entropy_coeff=schedule, entropy_penalty=penalty)
        algorithm = build(tiny_config)
        for _ in range(4):
            result = algorithm.train()
        entropies.append(result["learners"]["default_policy"]["entropy"])
    assert entropies[1] < 0.8 * entropies[0]


def test_the_critic_may_learn_before_the_policy_does(build, tiny_config):
    tiny_config.training(critic_first=2 * 512, lr=1e-2)
    algorithm = build(tiny_config)
    results = [algorithm.train()["learners"]["default_policy"] for _ in range(3)]
    assert [result["policy_loss"] == 0.0 for result in results] == [True, True, False]
    assert results[1]["value_loss"] < results[0]["value_loss"]


@pytest.mark.parametrize("is_by_hand", [True, False])
def test_a_minibatch_taken_in_parts_gives_the_weights_of_autograd(
    build, tiny_config, monkeypatch, is_by_hand
):
    found = []
    monkeypatch.setattr(set_pass, "FEWEST_ROWS", 1)
    for cached_servers in (ppo.CACHED_SERVERS, 4 * 13):  # all of 128 rows, or 13 at a time
        is_hand_used = is_by_hand and bool(found)
        monkeypatch.setattr(ppo.SetGradient, "suits", lambda *_, used=is_hand_used: used)
        for module in (ppo, set_pass):
            monkeypatch.setattr(module, "CACHED_SERVERS", cached_servers)
        algorithm = build(tiny_config.copy(copy_frozen=False))
        result = algorithm.train()["learners"]["default_policy"]
        learner = algorithm.learner_group._learner
        assert bool(learner._set_gradients) == is_hand_used
        found.append((weights(algorithm), result))
    (whole, seen), (parts, seen_in_parts) = found
    for name, array in whole.items():
        np.testing.assert_allclose(parts[name], array, atol=2e-5, err_msg=name)
    for name in ("policy_loss", "value_loss", "entropy", "gradient_norm"):
        assert seen_in_parts[name] == pytest.approx(seen[name], rel=1e-3, abs=1e-5), name


def test_the_runner_acts_with_the_weights_that_the_learner_has(build, tiny_config):
    algorithm = build(tiny_config)
    algorithm.train()
    runner = algorithm.env_runner_group.local_env_runner
    for name, array in weights(algorithm).items():
        np.testing.assert_array_equal(runner.module.state_dict()[name], array, err_msg=name)


def test_two_remote_runners_share_a_batch_and_a_killed_one_is_replaced(
    build, tiny_config, local_ray
):
    tiny_config.env_runners(num_env_runners=2)
    algorithm = build(tiny_config)
    assert algorithm.train()["env_runners"]["num_env_steps_sampled"] == 512
    group = algorithm.env_runner_group
    assert group.num_healthy_remote_workers() == 2
    local_ray.kill(group._worker_manager.actors()[1], no_restart=False)
    num_iterations = 1
    result = algorithm.train()  # goes on with the other one
    while group.num_healthy_remote_workers() < 2:
        num_iterations += 1
        result = algorithm.train()
    sampled = result["env_runners"]["num_env_steps_sampled_lifetime"]
    assert sampled == (1 + num_iterations) * 512


def test_two_learners_end_with_the_same_weights(build, tiny_config):
    tiny_config.learners(num_learners=2, num_cpus_per_learner=1)
    tiny_config.training(train_batch_size_per_learner=256)
    algorithm = build(tiny_config)
    before = weights(algorithm)
    algorithm.train()
    sums = algorithm.learner_group.foreach_learner(
        lambda learner: sum(
            p.double().sum().item() for p in learner.module["default_policy"].parameters()
        )
    )
    values = [result.get() for result in sums]
    assert values[0] == pytest.approx(values[1], abs=1e-6)
    after = weights(algorithm)
    assert any((before[name] != after[name]).any() for name in before)


def test_a_checkpoint_restores_weights_optimiser_counters_and_advantage_scale(
    build, tiny_config, tmp_path
):
    algorithm = build(tiny_config)
    algorithm.train()
    algorithm.save_to_path(str(tmp_path))
    restored = ClusterPPO.from_checkpoint(str(tmp_path))
    try:
        for name, array in weights(algorithm).items():
            np.testing.assert_array_equal(weights(restored)[name], array, err_msg=name)
        learner, other = algorithm.learner_group._learner, restored.learner_group._learner
        assert learner._advantage_variances == other._advantage_variances
        assert other._advantage_variances["default_policy"] > 0.0
        optimizer, again = (
            one.get_optimizer("default_policy").state_dict()["state"] for one in (learner, other)
        )
        torch.testing.assert_close(optimizer[0]["exp_avg"], again[0]["exp_avg"])
        lifetime = restored.train()["env_runners"]["num_env_steps_sampled_lifetime"]
        assert lifetime == 2 * 512
    finally:
        restored.stop()


@pytest.mark.parametrize("kind", ["set", "flat"])
def test_rllibs_own_runner_and_ppo_train_our_module(build, tiny_config, kind):
    config = PPOConfig()
    config.environment(ENV_ID, env_config=tiny_config.env_config)
    config.env_runners(
        num_env_runners=0,
        num_envs_per_env_runner=4,
        gym_env_vectorize_mode="vector_entry_point",
    )
    config.rl_module(
        rl_module_spec=RLModuleSpec(
            module_class=ClusterModule, model_config={"network": {"kind": kind}}
        )
    )
    config.training(train_batch_size_per_learner=128, minibatch_size=64, num_epochs=1)
    config.debugging(log_level="ERROR")
    result = build(config).train()
    assert np.isfinite(result["learners"]["default_policy"]["total_loss"])


def test_an_update_stops_when_the_policy_moved_too_far(build, tiny_config):
    tiny_config.training(target_kl=1e-9, num_epochs=10, lr=0.01)
    result = build(tiny_config).train()
    assert result["learners"]["default_policy"]["num_minibatches"] == 4


def test_training_can_start_from_given_weights(build, tiny_config, tmp_path):
    donor = build(tiny_config).env_runner_group.local_env_runner.module.network
    save_file(donor.state_dict(), tmp_path / "weights.safetensors")
    tiny_config.debugging(seed=1)
    tiny_config.training(initial_weights=str(tmp_path / "weights.safetensors"))
    algorithm = build(tiny_config)
    runner = algorithm.env_runner_group.local_env_runner
    for name, array in donor.state_dict().items():
        torch.testing.assert_close(runner.module.network.state_dict()[name], array)
        np.testing.assert_array_equal(weights(algorithm)["network." + name], array)
    algorithm.train()


@pytest.mark.parametrize("kind", ["flat", "set"])
def test_rounded_products_sample_and_learn_alike(build, tiny_config, kind):
    tiny_config.training(precision="bfloat16", lr=0.0)
    tiny_config.rl_module(model_config={"network": {"kind": kind}})
    algorithm = build(tiny_config)
    result = algorithm.train()["learners"]["default_policy"]
    assert result["approximate_kl"] < 1e-8, "without a step, all ratios are one"
    assert result["clip_fraction"] == 0.0
    runner = algorithm.env_runner_group.local_env_runner
    layers = [layer for layer in runner.module.modules() if isinstance(layer, Linear)]
    assert (len(layers) > 0) == (kind == "flat")
    assert {layer.products for layer in layers} <= {torch.float32}, "what is kept is not rounded"


def flat(config, **training):
    """Return a config of the flat network where few actions are legal and threads share rows."""
    config = config.copy(copy_frozen=False)
    config.environment(env_config={"settings": {"episode_ticks": 30}})
    config.rl_module(model_config={"network": {"kind": "flat", "flat_width": 32}})
    config.training(minibatch_size=256, **training)
    return config


def test_gradients_by_hand_give_the_weights_of_autograd(build, tiny_config, monkeypatch):
    found = []
    for is_by_hand in (True, False):
        if not is_by_hand:
            monkeypatch.setattr(FlatGradient, "suits", lambda *_: False)
        algorithm = build(flat(tiny_config, precision="float32", lr=1e-3, vf_clip_param=None))
        before = weights(algorithm)
        result = algorithm.train()["learners"]["default_policy"]
        assert bool(algorithm.learner_group._learner._flat_gradients) == is_by_hand
        found.append((weights(algorithm), result))
    (by_hand, seen), (plain, seen_plainly) = found
    for name, array in plain.items():
        step = np.abs(array - before[name]).max()
        assert step > 1e-3, name
        np.testing.assert_allclose(by_hand[name], array, atol=0.02 * step, err_msg=name)
    for name in ("policy_loss", "value_loss", "entropy", "gradient_norm", "num_minibatches"):
        assert seen[name] == pytest.approx(seen_plainly[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_same_seed_gives_the_same_bits(build, tiny_config, precision):
    found = []
    for _ in range(2):
        algorithm = build(flat(tiny_config, precision=precision))
        for _ in range(2):
            algorithm.train()
        assert algorithm.learner_group._learner._flat_gradients
        found.append(weights(algorithm))
    for name, array in found[0].items():
        np.testing.assert_array_equal(found[1][name], array, err_msg=name)


def test_an_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match="expected one of auto, float32, bfloat16"):
        ClusterPPOConfig().training(precision="float16")


def test_missing_initial_weights_are_named(tiny_config, tmp_path):
    tiny_config.training(initial_weights=str(tmp_path / "nothing.safetensors"))
    with pytest.raises(ConfigError, match=r"nothing\.safetensors"):
        tiny_config.build_algo()


def test_an_unknown_advantage_scaling_is_refused():
    with pytest.raises(ConfigError, match="expected one of running, batch, none"):
        ClusterPPOConfig().training(advantage_scaling="bach")


def test_columns_in_the_object_store_are_not_written_to():
    shared = {"own": np.zeros(3, np.float32), "obs": {"stored": np.zeros(3, np.float32)}}
    shared["obs"]["stored"].flags.writeable = False
    tensors = as_tensors(shared, "cpu")
    tensors["own"] += 1.0
    tensors["obs"]["stored"] += 1.0
    assert (shared["own"] == 1.0).all()
    assert (shared["obs"]["stored"] == 0.0).all()
