"""An RLlib EnvRunner that steps all its clusters with one forward pass and returns columns."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from statistics import fmean
from typing import Any

import numpy as np
import ray
import torch
from ray.rllib.core import COMPONENT_RL_MODULE, DEFAULT_AGENT_ID, DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.framework import get_device
from ray.rllib.utils.metrics import (
    EPISODE_LEN_MEAN,
    EPISODE_RETURN_MAX,
    EPISODE_RETURN_MEAN,
    EPISODE_RETURN_MIN,
    NUM_AGENT_STEPS_SAMPLED,
    NUM_AGENT_STEPS_SAMPLED_LIFETIME,
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES,
    NUM_EPISODES_LIFETIME,
    NUM_MODULE_STEPS_SAMPLED,
    NUM_MODULE_STEPS_SAMPLED_LIFETIME,
    WEIGHTS_SEQ_NO,
)
from torch import nn

from cloudsched.envs.cluster import ClusterVectorEnv
from cloudsched.models.flat_acting import FlatActing
from cloudsched.models.networks import FlatNetwork, SetNetwork
from cloudsched.models.precision import RoundedCopy, products_dtype
from cloudsched.models.rollout import Columns as RolloutColumns
from cloudsched.models.rollout import Network, RolloutCollector, training_env, training_seeds
from cloudsched.models.set_acting import SetActing
from cloudsched.models.threads import one_thread

REPORTED_METRICS = (
    "mean_power_w",
    "energy_kwh",
    "sla_violation_rate",
    "jobs_served",
    "work_served",
    "wait_mean_ticks",
    "toggles",
)
"""Measures of finished episodes that appear in RLlib's results beside the episode's return."""

Batch = dict[str, Any]


class BatchedEnvRunner(EnvRunner, Checkpointable):  # type: ignore[misc]
    """Samples with a `RolloutCollector`; advantages come ready with the columns.

    `config.env_config` holds the fields of a `Scenario`. Episodes draw their seeds below 1,000,000,
    apart from the test seeds.
    """

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self.tune_trial_id = kwargs.get("tune_trial_id")
        self.spaces: dict[str, Any] = kwargs.get("spaces") or {}
        self.module: TorchRLModule | None = None
        self._device = get_device(
            self.config, self.config.num_gpus_per_env_runner if self.worker_index else 0
        )
        self._weights_seq_no = 0
        self._collector: RolloutCollector | None = None
        self._copies: dict[nn.Module, RoundedCopy | FlatActing | SetActing] = {}
        smoothing = self.config.metrics_num_episodes_for_smoothing
        runners = self.config.num_env_runners or 1
        self._recent: deque[dict[str, float]] = deque(maxlen=math.ceil(smoothing / runners))
        is_remote_only = self.worker_index == 0 and self.config.num_env_runners > 0
        if not is_remote_only or self.config.create_env_on_local_worker:
            self.make_env()
        self.make_module()

    def make_env(self) -> None:
        """Build the clusters, and start an episode in each."""
        config = self.config
        self.env: ClusterVectorEnv = training_env(
            config.num_envs_per_env_runner, **dict(config.env_config)
        )
        self._collector = self._make_collector(
            num_steps=config.get_rollout_fragment_length(self.worker_index or 0),
            gamma=config.gamma,
            lambda_=self.lambda_,
            group_size=self.group_size,
            device=self._device,
        )
        seeds = training_seeds(
            self.env.num_envs,
            config.seed,
            stream=self.worker_index or 0,
            group_size=self.group_size,
        )
        self._collector.reset(seeds)

    def _make_collector(self, **arguments: Any) -> RolloutCollector:
        return RolloutCollector(self.env, **arguments)

    @property
    def lambda_(self) -> float:
        """Decay of the advantage's trace over one tick."""
        return float(self.config.lambda_)

    @property
    def group_size(self) -> int:
        """Clusters that see the same arrivals."""
        return int(self.config.arrival_group_size)

    def make_module(self) -> None:
        """Build the module; its weights come from the learner before the first sample."""
        spec = self.config.get_rl_module_spec(
            env=self.env, spaces=self.get_spaces(), inference_only=True
        )
        self.module = spec.build().to(self._device)

    def sample(self, **_: Any) -> Batch:
        """Return a rollout of all clusters as columns, by module.

        A local runner's columns are overwritten by its next sample, so learn from them before.
        """
        assert self._collector is not None, "this runner has no environment"
        columns = self._collect()
        self._count({name: len(part.action) for name, part in columns.items()})
        return {name: self._batch(part) for name, part in columns.items()}

    def _collect(self) -> dict[str, RolloutColumns]:
        """Return the decisions of each module."""
        assert self._collector is not None
        assert self.module is not None
        return {DEFAULT_MODULE_ID: self._collector.collect(self._acting(self.module))}

    def _batch(self, columns: RolloutColumns) -> Batch:
        """Name the columns as RLlib does."""
        return {
            Columns.OBS: {k: v.numpy() for k, v in columns.observation.items()},
            Columns.ACTIONS: columns.action.numpy(),
            Columns.ACTION_LOGP: columns.log_prob.numpy(),
            Columns.VF_PREDS: columns.value.numpy(),
            Postprocessing.ADVANTAGES: columns.advantage.numpy(),
            Postprocessing.VALUE_TARGETS: columns.value_target.numpy(),
        }

    def get_metrics(self) -> Any:
        """Return what was sampled, and the measures of the episodes that ended."""
        if self._collector is not None:
            self._recent.extend(self._collector.finished)
            self._collector.finished.clear()
        if self._recent:
            self._log_recent_episodes()
        return self.metrics.reduce()

    def get_spaces(self) -> dict[str, Any]:
        """Return the spaces of the environment, as RLlib names them."""
        if self.env is None:
            return self.spaces
        single = (self.env.single_observation_space, self.env.single_action_space)
        return {
            INPUT_ENV_SPACES: (self.env.observation_space, self.env.action_space),
            INPUT_ENV_SINGLE_SPACES: single,
            DEFAULT_MODULE_ID: single,
        }

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the counter of steps and, if asked for, the weights."""
        state = {NUM_ENV_STEPS_SAMPLED_LIFETIME: self.num_env_steps_sampled_lifetime}
        if self._check_component(COMPONENT_RL_MODULE, components, not_components):
            assert self.module is not None
            state[COMPONENT_RL_MODULE] = self.module.get_state(**kwargs)
            state[WEIGHTS_SEQ_NO] = self._weights_seq_no
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over weights that are newer than ours, and the counter of steps."""
        if COMPONENT_RL_MODULE in state:
            number = state.get(WEIGHTS_SEQ_NO, 0)
            if number == 0 or number > self._weights_seq_no:
                weights = state[COMPONENT_RL_MODULE]
                if isinstance(weights, ray.ObjectRef):
                    weights = ray.get(weights)
                assert self.module is not None
                with one_thread():
                    self.module.set_state(weights.get(DEFAULT_MODULE_ID, weights))
            self._weights_seq_no = number or self._weights_seq_no
        if NUM_ENV_STEPS_SAMPLED_LIFETIME in state:
            self.num_env_steps_sampled_lifetime = state[NUM_ENV_STEPS_SAMPLED_LIFETIME]

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what rebuilds this runner from a checkpoint."""
        return (), {"config": self.config}

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        """Return the parts that are saved apart."""
        return [(COMPONENT_RL_MODULE, self.module)]

    def assert_healthy(self) -> None:
        """Check that clusters and module were built."""
        assert self.env is not None
        assert self.module is not None

    def stop(self) -> None:
        """Close the clusters."""
        if self.env is not None:
            self.env.close()

    def _acting(self, module: Any) -> Network:
        """Return a module's network as it acts for one rollout, in the learner's precision."""
        network, dtype = module.network, products_dtype(self.config.precision, self._device)
        if network not in self._copies:
            if type(network) is FlatNetwork and self._device.type == "cpu":
                self._copies[network] = FlatActing(network, dtype)
            elif type(network) is SetNetwork and self._device.type == "cpu":
                self._copies[network] = SetActing(network)
            elif dtype == torch.float32:
                return network  # type: ignore[no-any-return]
            else:
                self._copies[network] = RoundedCopy(network, dtype)
        return self._copies[network].updated()

    def _count(self, num_rows: dict[str, int]) -> None:
        """Log the steps sampled, in all and of each module."""
        assert self._collector is not None
        num_steps = self._collector.num_steps * self.env.num_envs
        self.num_env_steps_sampled_lifetime += num_steps
        log = self.metrics.log_value
        log(NUM_ENV_STEPS_SAMPLED, num_steps, reduce="sum")
        log(NUM_ENV_STEPS_SAMPLED_LIFETIME, num_steps, reduce="lifetime_sum")
        for name, count in num_rows.items():
            agent = DEFAULT_AGENT_ID if name == DEFAULT_MODULE_ID else name
            log((NUM_AGENT_STEPS_SAMPLED, agent), count, reduce="sum")
            log((NUM_AGENT_STEPS_SAMPLED_LIFETIME, agent), count, reduce="lifetime_sum")
            log((NUM_MODULE_STEPS_SAMPLED, name), count, reduce="sum")
            log((NUM_MODULE_STEPS_SAMPLED_LIFETIME, name), count, reduce="lifetime_sum")
        log(NUM_EPISODES, len(self._collector.finished), reduce="sum")
        log(NUM_EPISODES_LIFETIME, len(self._collector.finished), reduce="lifetime_sum")

    def _log_recent_episodes(self) -> None:
        """Log means over the last episodes, also in iterations in which none ended."""
        means = {name: fmean(one[name] for one in self._recent) for name in self._recent[0]}
        returns = [one["episode_return"] for one in self._recent]
        for name, value in (
            (EPISODE_RETURN_MEAN, means["episode_return"]),
            (EPISODE_RETURN_MIN, min(returns)),
            (EPISODE_RETURN_MAX, max(returns)),
            (EPISODE_LEN_MEAN, means["decisions"]),
            *((name, means[name]) for name in REPORTED_METRICS),
        ):
            self.metrics.log_value(name, value, window=1)


def concatenate(batches: list[Batch]) -> Batch:
    """Join the columns of several runners; those of a single one are not copied."""
    if len(batches) == 1:
        return batches[0]
    joined: Batch = {}
    for name in dict.fromkeys(name for batch in batches for name in batch):
        columns = [batch[name] for batch in batches if name in batch]
        is_nested = isinstance(columns[0], dict)
        joined[name] = concatenate(columns) if is_nested else np.concatenate(columns)
    return joined


def as_tensors(batch: Batch, device: torch.device | str) -> Batch:
    """Return the columns as tensors on a device; on the CPU they share memory if they may."""
    tensors: Batch = {}
    for name, column in batch.items():
        if isinstance(column, dict):
            tensors[name] = as_tensors(column, device)
            continue
        # What comes from a remote runner alone lies in Ray's object store, which nobody may change.
        own = column if column.flags.writeable else column.copy()
        tensors[name] = torch.as_tensor(own, device=device)
    return tensors
