"""How fast PPO trains: inside RLlib with our parts, as a bare torch loop, in SB3, in stock RLlib.

All contenders learn the same task with the same flat 256x256 actor and critic and the same
hyper-parameters. A figure is env steps a second end to end: sampling, learning and weight sync.
Ours takes matrix products in the precision that is its default on this hardware, and, as a
contender of its own, in float32 as all others do. `stock_rllib` is RLlib as it comes, with its own
masking module.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cloudsched.config import Settings
from cloudsched.models.networks import NetworkConfig, ObservationSizes, build_network
from cloudsched.models.precision import DEFAULT_PRECISION, products_dtype
from cloudsched.models.rollout import RolloutCollector, training_env, training_seeds
from cloudsched.models.surrogate import backward_ppo

GAMMA, LAMBDA = 0.99, 0.95
CLIP, VALUE_WEIGHT, ENTROPY_WEIGHT, GRADIENT_CLIP = 0.2, 0.5, 0.01, 0.5
LEARNING_RATE = 3e-4


@dataclass(frozen=True, kw_only=True)
class TrainBenchConfig(Settings):
    """What is measured."""

    batch_size: int = 4096
    """Env steps of one iteration."""
    minibatch_size: int = 1024
    """Env steps of one gradient step."""
    num_epochs: int = 4
    """Passes over a batch."""
    seconds: float = 5.0
    """Time for which each contender is measured, a round."""
    rounds: int = 3
    """Rounds over all contenders; the median counts, so that a burst of other work does not."""
    env_counts: tuple[int, ...] = (16, 64)
    """Numbers of clusters; each contender counts with its best."""
    workload: str = "poisson"
    """Workload of the clusters, with the default preset."""
    fleet_sizes: tuple[int, ...] = (15, 150, 500)
    """Numbers of servers with which the set policy is measured, to see how its cost grows."""
    runner_counts: tuple[int, ...] = (1, 2)
    """Numbers of remote runners that share the sampling, to see how training scales."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "minibatch_size", "num_epochs", "rounds"):
            self._integer(name, low=1)
        self._number("seconds", low=0.0, exclusive=True)


Iterate = Callable[[], int]
"""Runs one iteration of training and returns the env steps it took."""

Build = Callable[[TrainBenchConfig, int, ExitStack], Iterate]
"""Builds a contender for a number of clusters; the stack gets what must be stopped at the end."""


def run(config: TrainBenchConfig, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure all contenders, in turns.

    Returns:
        `steps_per_s` by contender (None with a reason in `absent` where it cannot run), `ratios` of
        ours to each peer and `float32_ratios` of ours in float32, `precision` of each contender,
        `set_policy_over_flat`, `set_policy_steps_per_s` by number of servers,
        `steps_per_s_by_remote_runners` of ours, and the settings.
    """
    absent: dict[str, str] = {}
    samples: dict[str, dict[int, list[float]]] = {}
    running: dict[tuple[str, int], Iterate] = {}
    with ExitStack() as stack:
        for name, build in CONTENDERS.items():
            for num_envs in config.env_counts:
                report(f"building {name} with {num_envs} clusters")
                try:
                    iterate = build(config, num_envs, stack)
                except ImportError as error:
                    absent[name] = f"{error}; install the extra `bench`"
                    break
                iterate()  # warm up
                running[name, num_envs] = iterate
                samples.setdefault(name, {})[num_envs] = []
        for _ in range(config.rounds):
            for (name, num_envs), iterate in running.items():
                speed = _measure(iterate, config.seconds)
                samples[name][num_envs].append(speed)
                report(f"{name} with {num_envs} clusters: {speed:,.0f} steps/s")
    by_size = {size: _set_policy_speed(config, size, report) for size in config.fleet_sizes}
    by_runners = {count: _remote_speed(config, count, report) for count in config.runner_counts}
    medians = {
        name: {num_envs: sorted(speeds)[len(speeds) // 2] for num_envs, speeds in counts.items()}
        for name, counts in samples.items()
    }
    best = {name: max(counts.values()) for name, counts in medians.items()}
    return {
        "steps_per_s": {name: best.get(name) for name in CONTENDERS},
        "ratios": {name: _ratio(best, "cloudsched", name) for name in PEERS},
        "float32_ratios": {name: _ratio(best, "cloudsched_float32", name) for name in PEERS},
        "precision": {name: _precision(name) for name in CONTENDERS},
        "set_policy_over_flat": best["cloudsched_set"] / best["cloudsched"],
        "set_policy_steps_per_s": by_size,
        "steps_per_s_by_remote_runners": by_runners,
        "steps_per_s_by_env_count": medians,
        "absent": absent,
        "config": asdict(config),
        "torch_threads": torch.get_num_threads(),
    }


def _ratio(best: dict[str, float], name: str, peer: str) -> float | None:
    return best[name] / best[peer] if peer in best else None


def _precision(name: str) -> str:
    """Return the type of a contender's matrix products."""
    # The set policy has no layers that are rounded.
    dtype = products_dtype(DEFAULT_PRECISION if name == "cloudsched" else "float32", "cpu")
    return str(dtype).removeprefix("torch.")


def _measure(iterate: Iterate, seconds: float) -> float:
    start, steps = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        steps += iterate()
    return steps / elapsed


def _set_policy_speed(
    config: TrainBenchConfig, num_servers: int, report: Callable[[str], None]
) -> float:
    """Return the steps a second of the set policy in fleets of a size, the load scaled with it."""
    with ExitStack() as stack:
        settings = {"fleet": {"num_servers": num_servers}}
        iterate = _ours(config, max(config.env_counts), stack, kind="set", settings=settings)
        iterate()  # warm up
        speed = _measure(iterate, config.seconds)
    report(f"cloudsched_set with {num_servers} servers: {speed:,.0f} steps/s")
    return speed


def _remote_speed(
    config: TrainBenchConfig, num_runners: int, report: Callable[[str], None]
) -> float:
    """Return the steps a second with as many clusters as elsewhere, shared out among runners."""
    with ExitStack() as stack:
        num_envs = max(1, max(config.env_counts) // num_runners)
        iterate = _ours(config, num_envs, stack, num_runners=num_runners)
        iterate()  # warm up
        speed = _measure(iterate, config.seconds)
    report(f"cloudsched with {num_runners} remote runners: {speed:,.0f} steps/s")
    return speed


def _ours(
    config: TrainBenchConfig,
    num_envs: int,
    stack: ExitStack,
    kind: str = "flat",
    settings: dict[str, Any] | None = None,
    precision: str = DEFAULT_PRECISION,
    num_runners: int = 0,
) -> Iterate:
    from cloudsched.rl.algorithms.ppo import ClusterPPOConfig

    algorithm_config = ClusterPPOConfig()
    algorithm_config.environment(
        env_config={"workload": config.workload, "settings": settings or {}}
    )
    algorithm_config.env_runners(num_env_runners=num_runners, num_envs_per_env_runner=num_envs)
    algorithm_config.rl_module(model_config={"network": {"kind": kind}})
    algorithm_config.training(precision=precision)
    return _rllib(algorithm_config, config, stack)


def _ours_float32(config: TrainBenchConfig, num_envs: int, stack: ExitStack) -> Iterate:
    return _ours(config, num_envs, stack, precision="float32")


def _ours_set(config: TrainBenchConfig, num_envs: int, stack: ExitStack) -> Iterate:
    return _ours(config, num_envs, stack, kind="set")


def _stock_rllib(config: TrainBenchConfig, num_envs: int, stack: ExitStack) -> Iterate:
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.core.rl_module.rl_module import RLModuleSpec
    from ray.rllib.examples.rl_modules.classes.action_masking_rlm import ActionMaskingTorchRLModule

    from cloudsched.bench.stock import MASKED_ID, register_masked_clusters

    register_masked_clusters()
    network = DefaultModelConfig(
        fcnet_hiddens=[256, 256], fcnet_activation="relu", vf_share_layers=False
    )
    module = RLModuleSpec(module_class=ActionMaskingTorchRLModule, model_config=network)
    algorithm_config = PPOConfig()
    algorithm_config.environment(MASKED_ID, env_config={"workload": config.workload})
    algorithm_config.env_runners(
        num_env_runners=0,
        num_envs_per_env_runner=num_envs,
        gym_env_vectorize_mode="vector_entry_point",
    )
    algorithm_config.rl_module(rl_module_spec=module)
    algorithm_config.training(use_kl_loss=False)
    return _rllib(algorithm_config, config, stack)


def _rllib(algorithm_config: Any, config: TrainBenchConfig, stack: ExitStack) -> Iterate:
    algorithm_config.training(
        train_batch_size_per_learner=config.batch_size,
        minibatch_size=config.minibatch_size,
        num_epochs=config.num_epochs,
        gamma=GAMMA,
        lambda_=LAMBDA,
        lr=LEARNING_RATE,
        clip_param=CLIP,
        vf_loss_coeff=VALUE_WEIGHT,
        entropy_coeff=ENTROPY_WEIGHT,
        grad_clip=GRADIENT_CLIP,
    )
    algorithm_config.debugging(seed=0, log_level="ERROR")
    algorithm = algorithm_config.build_algo()
    stack.callback(algorithm.stop)

    def iterate() -> int:
        result = algorithm.train()
        return int(result["env_runners"]["num_env_steps_sampled"])

    return iterate


def _bare_torch(config: TrainBenchConfig, num_envs: int, stack: ExitStack) -> Iterate:
    """PPO as one would write it in a single file, on the same batched simulator."""
    env = training_env(num_envs, workload=config.workload)
    network = build_network(ObservationSizes.of(env.config), NetworkConfig(kind="flat"))
    collector = RolloutCollector(
        env, num_steps=config.batch_size // num_envs, gamma=GAMMA, lambda_=LAMBDA
    )
    collector.reset(training_seeds(num_envs, 0))
    parameters = list(network.parameters())
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE, eps=1e-5, fused=True)

    def iterate() -> int:
        columns = collector.collect(network)
        advantage_B = (columns.advantage - columns.advantage.mean()) / columns.advantage.std()
        num_rows = len(columns.action)
        for _ in range(config.num_epochs):
            for rows in torch.randperm(num_rows).split(config.minibatch_size):
                logits_BA, value_B = network({k: v[rows] for k, v in columns.observation.items()})
                optimizer.zero_grad()
                backward_ppo(
                    logits_BA=logits_BA,
                    value_B=value_B,
                    action_B=columns.action[rows],
                    old_log_prob_B=columns.log_prob[rows],
                    old_value_B=columns.value[rows],
                    advantage_B=advantage_B[rows],
                    return_B=columns.value_target[rows],
                    clip=CLIP,
                    value_clip=None,
                    value_weight=VALUE_WEIGHT,
                    entropy_weight=ENTROPY_WEIGHT,
                )
                torch.nn.utils.clip_grad_norm_(parameters, GRADIENT_CLIP)
                optimizer.step()
        return num_rows

    return iterate


def _sb3(config: TrainBenchConfig, num_envs: int, stack: ExitStack) -> Iterate:
    from sb3_contrib import MaskablePPO

    from cloudsched.bench.sb3 import StableBaselinesEnv

    env = StableBaselinesEnv(num_envs, workload=config.workload)
    model = MaskablePPO(
        "MultiInputPolicy",
        env,
        n_steps=config.batch_size // num_envs,
        batch_size=config.minibatch_size,
        n_epochs=config.num_epochs,
        gamma=GAMMA,
        gae_lambda=LAMBDA,
        learning_rate=LEARNING_RATE,
        clip_range=CLIP,
        vf_coef=VALUE_WEIGHT,
        ent_coef=ENTROPY_WEIGHT,
        max_grad_norm=GRADIENT_CLIP,
        policy_kwargs={
            "net_arch": {"pi": [256, 256], "vf": [256, 256]},
            "activation_fn": torch.nn.ReLU,
        },
        seed=0,
        device="cpu",
    )

    def iterate() -> int:
        model.learn(config.batch_size, reset_num_timesteps=False)
        return config.batch_size

    return iterate


CONTENDERS: dict[str, Build] = {
    "cloudsched": _ours,
    "cloudsched_float32": _ours_float32,
    "cloudsched_set": _ours_set,
    "bare_torch": _bare_torch,
    "sb3_maskable_ppo": _sb3,
    "stock_rllib": _stock_rllib,
}

PEERS = ("bare_torch", "sb3_maskable_ppo", "stock_rllib")
