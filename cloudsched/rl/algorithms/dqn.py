"""DQN on columns: double, dueling, n-step, with masks in exploration and in the target."""

from __future__ import annotations

from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.execution.rollout_ops import synchronous_parallel_sample
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    ENV_RUNNER_SAMPLING_TIMER,
    LEARNER_RESULTS,
    LEARNER_UPDATE_TIMER,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    SYNCH_WORKER_WEIGHTS_TIMER,
    TIMERS,
)
from ray.rllib.utils.schedules.scheduler import Scheduler
from torch import Tensor

from cloudsched.models.rollout import Columns as RolloutColumns
from cloudsched.rl.algorithms.ppo import ENV_ID
from cloudsched.rl.learners.dqn import ReplayDQNLearner
from cloudsched.rl.modules.cluster import ClusterQModule
from cloudsched.rl.runner import Batch, BatchedEnvRunner, concatenate


class ReplayEnvRunner(BatchedEnvRunner):
    """Explores with epsilon-greedy actions and returns columns with a row for each cluster."""

    lambda_ = 1.0  # advantages are not used
    group_size = 1

    def make_module(self) -> None:
        """Build the module and the schedule of exploration."""
        super().make_module()
        self._epsilon = Scheduler(fixed_value_or_schedule=self.config.epsilon, framework="torch")

    def _network(self, observation: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
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
            Columns.REWARDS: columns.reward,
            "elapsed_ticks": columns.elapsed,
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
        self.n_step = 8
        self.replay_capacity = 200_000
        self.updates_per_iteration = 8
        self.target_tau = 0.01
        self.epsilon: Any = [[0, 0.3], [300_000, 0.02]]
        self.environment(ENV_ID)
        self.env_runners(
            env_runner_cls=ReplayEnvRunner,
            num_env_runners=0,
            num_envs_per_env_runner=64,
            rollout_fragment_length="auto",
            gym_env_vectorize_mode="vector_entry_point",
        )
        self.training(
            gamma=0.99,
            lr=5e-4,
            train_batch_size_per_learner=1024,
            minibatch_size=512,
            grad_clip=5.0,
        )
        self.learners(num_learners=0)

    def training(  # type: ignore[override]
        self,
        *,
        n_step: int = NotProvided,
        replay_capacity: int = NotProvided,
        updates_per_iteration: int = NotProvided,
        target_tau: float = NotProvided,
        epsilon: float | list[list[float]] = NotProvided,
        **kwargs: Any,
    ) -> ClusterDQNConfig:
        """Set hyper-parameters.

        Args:
            n_step: decisions whose rewards are summed before the bootstrap.
            replay_capacity: decisions in memory, over all clusters.
            updates_per_iteration: gradient steps after each rollout.
            target_tau: share of the way to the online network that the target goes at each step.
            epsilon: share of random actions, or a schedule `[[env steps, share], ...]`.
            kwargs: RLlib's.
        """
        super().training(**kwargs)
        for name, value in (
            ("n_step", n_step),
            ("replay_capacity", replay_capacity),
            ("updates_per_iteration", updates_per_iteration),
            ("target_tau", target_tau),
            ("epsilon", epsilon),
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


class ClusterDQN(Algorithm):  # type: ignore[misc]
    """Sample columns, learn from memory, send the weights back."""

    @classmethod
    def get_default_config(cls) -> ClusterDQNConfig:
        """Return the settings."""
        return ClusterDQNConfig()

    def training_step(self) -> None:
        """Run one iteration."""
        config = self.config
        with self.metrics.log_time((TIMERS, ENV_RUNNER_SAMPLING_TIMER)):
            batches, results = synchronous_parallel_sample(
                worker_set=self.env_runner_group,
                sample_timeout_s=config.sample_timeout_s,
                concat=False,
                _uses_new_env_runners=True,
                _return_metrics=True,
            )
            if not batches:  # all runners failed; RLlib restarts them
                return
            self.metrics.aggregate(results, key=ENV_RUNNER_RESULTS)
            columns = SampleBatch(concatenate(batches))
        sampled = self.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME))
        with self.metrics.log_time((TIMERS, LEARNER_UPDATE_TIMER)):
            learner_results = self.learner_group.update(
                batch=MultiAgentBatch(
                    {DEFAULT_MODULE_ID: columns}, env_steps=columns[Columns.ACTIONS].size
                ),
                timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: sampled},
                num_updates=config.updates_per_iteration,
            )
            self.metrics.aggregate(learner_results, key=LEARNER_RESULTS)
        with self.metrics.log_time((TIMERS, SYNCH_WORKER_WEIGHTS_TIMER)):
            self.env_runner_group.sync_weights(
                from_worker_or_learner_group=self.learner_group,
                policies=[DEFAULT_MODULE_ID],
                inference_only=True,
            )
