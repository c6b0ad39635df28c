"""DQN on columns: double, dueling, n-step, with masks in exploration and in the target."""

from __future__ import annotations

from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.schedules.scheduler import Scheduler
from torch import Tensor

from cloudsched.errors import ConfigError
from cloudsched.models.rollout import Columns as RolloutColumns
from cloudsched.models.rollout import Network
from cloudsched.rl.algorithms.columns import ENV_ID, ColumnTraining
from cloudsched.rl.learners.dqn import ELAPSED_TICKS, ReplayDQNLearner
from cloudsched.rl.modules.cluster import ClusterQModule
from cloudsched.rl.runner import Batch, BatchedEnvRunner

CLOCKS = ("tick", "decision")


class ReplayEnvRunner(BatchedEnvRunner):
    """Explores with epsilon-greedy actions and returns columns with a row for each cluster."""

    lambda_ = 1.0  # advantages are not used
    group_size = 1

    def make_module(self) -> None:
        """Build the module and the schedule of exploration."""
        super().make_module()
        self._epsilon = Scheduler(fixed_value_or_schedule=self.config.epsilon, framework="torch")

    def _acting(self, module: Any) -> Network:
        return self._explore

    def _explore(self, observation: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        assert self.module is not None
        epsilon = float(self._epsilon.get_current_value())
        outputs = self.module._forward_exploration({Columns.OBS: observation}, epsilon=epsilon)
        logits_EA: Tensor = outputs[Columns.ACTION_DIST_INPUTS]
        return logits_EA, logits_EA.new_zeros(len(logits_EA))

    def _batch(self, columns: RolloutColumns) -> Batch:
        """Return (E, T, ...) columns, so that shards and runners split and join along E."""
        self._epsilon.update(timestep=self.num_env_steps_sampled_lifetime)
        tables = {
            Columns.ACTIONS: columns.action,
            Columns.REWARDS: columns.reward / (1.0 - self.config.gamma),
            ELAPSED_TICKS: columns.elapsed,
            Columns.TRUNCATEDS: columns.is_cut,
        }
        return {
            Columns.OBS: {k: self._by_cluster(v) for k, v in columns.observation.items()},
            **{name: self._by_cluster(table) for name, table in tables.items()},
        }

    def _by_cluster(self, table: Tensor) -> Any:
        return table.unflatten(0, (-1, self.env.num_envs)).transpose(0, 1).numpy()


class ClusterDQNConfig(AlgorithmConfig):  # type: ignore[misc]
    """Settings of `ClusterDQN`; `env_config` holds the fields of a `Scenario`.

    `gamma` is per tick. `train_batch_size_per_learner` are the env steps of an iteration.
    """

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or ClusterDQN)
        self.n_step = 10
        self.replay_capacity = 200_000
        self.learning_starts = 10_000
        self.updates_per_iteration = 4
        self.target_tau = 0.02
        self.epsilon: Any = [[0, 0.2], [100_000, 0.05]]
        self.target_mask = True
        self.clock = "tick"
        self.environment(ENV_ID)
        self.env_runners(
            env_runner_cls=ReplayEnvRunner,
            num_env_runners=0,
            num_envs_per_env_runner=64,
            rollout_fragment_length="auto",
            gym_env_vectorize_mode="vector_entry_point",
        )
        self.training(
            gamma=0.97,
            lr=1e-3,
            train_batch_size_per_learner=512,
            minibatch_size=256,
            grad_clip=10.0,
        )
        self.learners(num_learners=0)

    def training(  # type: ignore[override]
        self,
        *,
        n_step: int = NotProvided,
        replay_capacity: int = NotProvided,
        learning_starts: int = NotProvided,
        updates_per_iteration: int = NotProvided,
        target_tau: float = NotProvided,
        epsilon: float | list[list[float]] = NotProvided,
        target_mask: bool = NotProvided,
        clock: str = NotProvided,
        **kwargs: Any,
    ) -> ClusterDQNConfig:
        """Set hyper-parameters.

        Args:
            n_step: ticks whose rewards are summed before the bootstrap.
            replay_capacity: decisions in memory, over all clusters.
            learning_starts: decisions in memory before the first gradient step.
            updates_per_iteration: gradient steps after each rollout.
            target_tau: share of the way to the online network that the target goes at each step.
            epsilon: share of random actions, or a schedule `[[env steps, share], ...]`.
            target_mask: whether the bootstrap only considers legal actions. False is wrong, and is
                there to show what happens then (`python -m tune.dqn_ablation`).
            clock: what `gamma` and `n_step` count: `tick`, or every `decision` as if it took time,
                which is wrong too.
            kwargs: RLlib's.
        """
        super().training(**kwargs)
        if clock is not NotProvided and clock not in CLOCKS:
            raise ConfigError(f"clock={clock!r}: expected one of {', '.join(CLOCKS)}.")
        for name, value in (
            ("n_step", n_step),
            ("replay_capacity", replay_capacity),
            ("learning_starts", learning_starts),
            ("updates_per_iteration", updates_per_iteration),
            ("target_tau", target_tau),
            ("epsilon", epsilon),
            ("target_mask", target_mask),
            ("clock", clock),
        ):
            if value is not NotProvided:
                setattr(self, name, value)
        return self

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """Use our module."""
        return RLModuleSpec(module_class=ClusterQModule)

    def get_default_learner_class(self) -> type[ReplayDQNLearner]:
        """Use our learner."""
        return ReplayDQNLearner


class ClusterDQN(ColumnTraining, Algorithm):  # type: ignore[misc]
    """Adds columns to a memory, and learns from draws of it."""

    @classmethod
    def get_default_config(cls) -> ClusterDQNConfig:
        """Return the settings."""
        return ClusterDQNConfig()

    def update_arguments(self) -> dict[str, Any]:
        """Return the size of an update."""
        return {"num_updates": self.config.updates_per_iteration}
