"""What our algorithms share: sample columns from the runners, learn, send the weights back."""

from __future__ import annotations

from typing import Any

import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
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
from torch import Tensor, nn

from cloudsched.rl.runner import concatenate

ENV_ID = "cloudsched/Cluster-v0"


class ColumnTraining:
    """One iteration on columns; to be put before an RLlib `Algorithm` among the base classes."""

    config: Any
    get_module: Any
    env_runner_group: Any
    learner_group: Any
    metrics: Any

    def update_arguments(self) -> dict[str, Any]:
        """Return what the learners' `update` takes beside the batch."""
        raise NotImplementedError

    def training_step(self) -> None:
        """Run one iteration."""
        with self.metrics.log_time((TIMERS, ENV_RUNNER_SAMPLING_TIMER)):
            batches, results = synchronous_parallel_sample(
                worker_set=self.env_runner_group,
                max_env_steps=self.config.total_train_batch_size,
                sample_timeout_s=self.config.sample_timeout_s,
                concat=False,
                _uses_new_env_runners=True,
                _return_metrics=True,
            )
            if not batches:  # all runners failed; RLlib restarts them
                return
            self.metrics.aggregate(results, key=ENV_RUNNER_RESULTS)
        sampled = self.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME))
        with self.metrics.log_time((TIMERS, LEARNER_UPDATE_TIMER)):
            modules = {name: SampleBatch(part) for name, part in concatenate(batches).items()}
            num_steps = max(np.size(part[Columns.ACTIONS]) for part in modules.values())
            learner_results = self.learner_group.update(
                batch=MultiAgentBatch(modules, env_steps=num_steps),
                timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: sampled},
                **self.update_arguments(),
            )
            self.metrics.aggregate(learner_results, key=LEARNER_RESULTS)
        with self.metrics.log_time((TIMERS, SYNCH_WORKER_WEIGHTS_TIMER)):
            self.sync_weights()

    def policy_network(self) -> nn.Module:
        """Return the network that acts: from observations to logits or action values."""
        network: nn.Module = self.get_module(DEFAULT_MODULE_ID).network
        return network

    def load_network(self, module_id: str, weights: dict[str, Tensor]) -> None:
        """Give the network of a module these weights, in learners and runners."""

        def load(learner: Any) -> None:
            learner.module[module_id].unwrapped().network.load_state_dict(weights)

        self.learner_group.foreach_learner(load)
        self.sync_weights()

    def sync_weights(self) -> None:
        """Give the runners the weights of the learners."""
        self.env_runner_group.sync_weights(
            from_worker_or_learner_group=self.learner_group, inference_only=True
        )
