"""PPO on columns: RLlib's algorithm with our runner, learner and module as its defaults."""

from __future__ import annotations

from typing import Any

from ray.rllib.algorithms.algorithm_config import NotProvided
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cloudsched.envs.scenario import Scenario
from cloudsched.errors import ConfigError
from cloudsched.heuristics.catalog import load_heuristic, tuned_policy
from cloudsched.models.precision import DEFAULT_PRECISION, check_precision
from cloudsched.rl.algorithms.columns import ENV_ID, ColumnTraining
from cloudsched.rl.learners.ppo import ColumnPPOLearner
from cloudsched.rl.modules.cluster import NETWORK, ClusterModule
from cloudsched.rl.runner import BatchedEnvRunner

TUNED_RULE = "tuned"
ADVANTAGE_SCALINGS = ("running", "batch", "none")


class ClusterPPOConfig(PPOConfig):  # type: ignore[misc]
    """Settings of `ClusterPPO`; `env_config` holds the fields of a `Scenario`.

    As in RLlib, except that `gamma` and `lambda_` are per tick, and that `vf_clip_param` (None for
    no clipping) bounds how far a value may move from the one that was sampled with. Values are
    discounted sums of rewards times `1 - gamma`.
    """

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or ClusterPPO)
        self.advantage_scaling = "running"
        self.target_kl: float | None = None
        self.entropy_penalty = 0.0
        self.critic_first = 0
        self.arrival_group_size = 4
        self.initial_weights: str | None = None
        self.rule: str | None = None
        self.precision = DEFAULT_PRECISION
        self.environment(ENV_ID)
        self.env_runners(
            env_runner_cls=BatchedEnvRunner,
            num_env_runners=0,
            num_envs_per_env_runner=64,
            gym_env_vectorize_mode="vector_entry_point",
        )
        self.training(
            gamma=0.99,
            lambda_=0.97,
            lr=3e-4,
            train_batch_size_per_learner=8192,
            minibatch_size=1024,
            num_epochs=4,
            clip_param=0.2,
            vf_clip_param=0.5,
            vf_loss_coeff=0.5,
            entropy_coeff=0.003,
            grad_clip=5.0,
            use_kl_loss=False,
        )
        self.learners(num_learners=0)
        self.torch_ddp_kwargs = {"find_unused_parameters": True}  # no toggles without sleep

    def training(  # type: ignore[override]
        self,
        *,
        advantage_scaling: str = NotProvided,
        target_kl: float | None = NotProvided,
        entropy_penalty: float = NotProvided,
        critic_first: int = NotProvided,
        arrival_group_size: int = NotProvided,
        initial_weights: str | None = NotProvided,
        rule: str | None = NotProvided,
        precision: str = NotProvided,
        **kwargs: Any,
    ) -> ClusterPPOConfig:
        """Set hyper-parameters.

        Args:
            advantage_scaling: after centring, divide by a `running` standard deviation (batches
                with bursts of violations carry the signal, and keep their weight) or by that of
                the `batch`; `none` leaves advantages alone.
            target_kl: end an update after the epoch in which the policy moved further than this.
            entropy_penalty: what a nat of entropy costs, beside what `entropy_coeff` pays for it. A
                policy that draws may learn to wake a server every other time; without the draws
                it then never does. The penalty makes it decide, so that what is trained is what
                acts in the end.
            critic_first: decisions after which the policy begins to learn; until then only the
                critic does. A policy that starts as a good one is spoilt by a critic that knows
                nothing yet.
            arrival_group_size: clusters of a runner that see the same arrivals, so that the luck
                which they share can be taken out of advantages; 1 for none.
            initial_weights: safetensors file with the weights to start from, of a cloned network
                for example.
            rule: heuristic that the networks begin as and learn to correct: a name that `cloudsched
                policies` lists, or `tuned` for the headroom controller tuned to the scenario; None
                to begin with nothing.
            precision: of the flat network's matrix products in sampling and learning: `float32`,
                `bfloat16`, or `auto` for whichever of them the hardware is faster at. Everything
                else is in float32: the set network, and acting once training has ended.
            kwargs: RLlib's.
        """
        super().training(**kwargs)
        if advantage_scaling is not NotProvided:
            if advantage_scaling not in ADVANTAGE_SCALINGS:
                raise ConfigError(
                    f"advantage_scaling={advantage_scaling!r}: expected one of "
                    f"{', '.join(ADVANTAGE_SCALINGS)}."
                )
            self.advantage_scaling = advantage_scaling
        if target_kl is not NotProvided:
            self.target_kl = target_kl
        if entropy_penalty is not NotProvided:
            self.entropy_penalty = entropy_penalty
        if critic_first is not NotProvided:
            self.critic_first = critic_first
        if arrival_group_size is not NotProvided:
            self.arrival_group_size = arrival_group_size
        if initial_weights is not NotProvided:
            self.initial_weights = initial_weights
        if rule is not NotProvided:
            self.rule = rule
        if precision is not NotProvided:
            self.precision = check_precision(precision)
        return self

    def validate(self) -> None:
        """Check the settings, and put the rule's numbers into those of the networks."""
        super().validate()
        if self.rule is None:
            return
        name = self.rule
        if name == TUNED_RULE:
            scenario = Scenario.from_dict(dict(self.env_config))
            name = tuned_policy(scenario.preset, scenario.workload)
        settings = {**self.model_config.get(NETWORK, {}), "prior": load_heuristic(name).to_dict()}
        self.rl_module(model_config={**self.model_config, NETWORK: settings})

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """Use our module."""
        return RLModuleSpec(module_class=ClusterModule)

    def get_default_learner_class(self) -> type[ColumnPPOLearner]:
        """Use our learner."""
        return ColumnPPOLearner


class ClusterPPO(ColumnTraining, PPO):  # type: ignore[misc]
    """RLlib's PPO on columns."""

    @classmethod
    def get_default_config(cls) -> ClusterPPOConfig:
        """Return the settings."""
        return ClusterPPOConfig()

    def setup(self, config: Any) -> None:
        """Build runners and learners, and hand out the weights to start from."""
        super().setup(config)
        if self.config.initial_weights is not None:
            self.load_network(DEFAULT_MODULE_ID, _read_weights(self.config.initial_weights))

    def update_arguments(self) -> dict[str, Any]:
        """Return the sizes of an update."""
        config = self.config
        return {"num_epochs": config.num_epochs, "minibatch_size": config.minibatch_size}


def _read_weights(path: str) -> dict[str, Tensor]:
    try:
        weights: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"initial_weights={path!r}: cannot be read: {error}.") from error
    return weights
