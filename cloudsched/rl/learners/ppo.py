"""PPO's update without RLlib's cost for each minibatch: tensor slices, one pass, few metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import torch
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.policy.sample_batch import MultiAgentBatch
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from torch import Tensor, nn

from cloudsched.models.clipped_adam import ClippedAdam
from cloudsched.models.flat_gradient import FlatGradient, PPOColumns, PPOWeights
from cloudsched.models.flat_pass import FlatRows
from cloudsched.models.losses import PPOLoss
from cloudsched.models.memory import keep_freed_memory
from cloudsched.models.networks import ROW, FlatNetwork
from cloudsched.models.precision import products_dtype, take_products_in
from cloudsched.models.set_gradient import SetGradient
from cloudsched.models.set_pass import CACHED_SERVERS
from cloudsched.models.surrogate import backward_ppo
from cloudsched.models.threads import one_thread
from cloudsched.rl.runner import Batch, as_tensors

KNOWN = (
    Columns.ACTIONS,
    Columns.ACTION_LOGP,
    Columns.VF_PREDS,
    Postprocessing.ADVANTAGES,
    Postprocessing.VALUE_TARGETS,
)
"""The columns of PPO's loss beside observations, in the order of `PPOColumns`."""
ADVANTAGE_STATE = "advantage_variances"
ADVANTAGE_DECAY = 0.9


class ColumnPPOLearner(PPOTorchLearner):  # type: ignore[misc]
    """Learns from the columns of a `BatchedEnvRunner`.

    Anything but columns (RLlib's episodes, for example) goes the way of the parent.
    """

    def build(self) -> None:
        """Build module and optimiser."""
        super().build()
        keep_freed_memory()
        dtype = products_dtype(self.config.precision, self._device)
        self.module.foreach_module(lambda _, module: take_products_in(dtype, module))
        self._advantage_variances: dict[str, float] = {}
        self._flat_gradients: dict[nn.Module, FlatGradient] = {}
        self._set_gradients: dict[nn.Module, SetGradient] = {}

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Use an Adam that clips gradients as well, in few passes over all parameters."""
        parameters = self.get_parameters(self._module[module_id])
        optimizer = ClippedAdam(parameters, eps=1e-5)
        self.register_optimizer(
            module_id=module_id,
            optimizer=optimizer,
            params=parameters,
            lr_or_lr_schedule=config.lr,
        )

    def update(
        self,
        batch: MultiAgentBatch | None = None,
        *,
        training_data: TrainingData | None = None,
        timesteps: dict[str, Any] | None = None,
        num_epochs: int = 1,
        minibatch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the epochs over the columns of each module."""
        data = TrainingData(batch=batch) if training_data is None else training_data
        data.solve_refs()
        if data.batch is None:
            return super().update(
                training_data=data,
                timesteps=timesteps,
                num_epochs=num_epochs,
                minibatch_size=minibatch_size,
                **kwargs,
            )
        self._check_is_built()
        self.before_gradient_based_update(timesteps=timesteps or {})
        self._weights_seq_no += 1
        sampled = (timesteps or {}).get(NUM_ENV_STEPS_SAMPLED_LIFETIME, math.inf)
        for module_id, columns in data.batch.policy_batches.items():
            if self.should_module_be_updated(module_id, data.batch):
                tensors = as_tensors(dict(columns), self._device)
                is_critic_alone = sampled <= self.config.critic_first
                self._update_module(module_id, tensors, num_epochs, minibatch_size, is_critic_alone)
        self._log_steps_trained_metrics(data.batch)
        self.after_gradient_based_update(timesteps=timesteps or {})
        return self.metrics.reduce()

    def _update_module(
        self,
        module_id: str,
        columns: Batch,
        num_epochs: int,
        minibatch_size: int | None,
        is_critic_alone: bool,
    ) -> None:
        config = self.config.get_config_for_module(module_id)
        columns[Postprocessing.ADVANTAGES] = self._scaled_advantages(
            module_id, columns[Postprocessing.ADVANTAGES], config.advantage_scaling
        )
        schedule = self.entropy_coeff_schedulers_per_module[module_id]
        entropy_weight = float(schedule.get_current_value()) - config.entropy_penalty
        if is_critic_alone:
            columns[Postprocessing.ADVANTAGES].zero_()
            entropy_weight = 0.0
        weights = PPOWeights(
            config.clip_param, config.vf_clip_param, config.vf_loss_coeff, entropy_weight
        )
        optimizer = self.get_optimizer(module_id)
        terms: list[Tensor] = []
        with ExitStack() as stack:
            write_gradient = self._way_to_gradients(module_id, columns, weights, stack)
            for _ in range(num_epochs):
                epoch_start = len(terms)
                for rows in minibatches(columns, minibatch_size):
                    found = write_gradient(rows)
                    norm = optimizer.clipped_step(config.grad_clip or math.inf)
                    terms.append(torch.cat([found, norm[None]]))
                if config.target_kl is not None:
                    kl = self._mean_over_learners(torch.stack(terms[epoch_start:]).mean(0))[4]
                    if kl > config.target_kl:
                        break
        self._log_update(module_id, columns, torch.stack(terms))

    def _way_to_gradients(
        self, module_id: str, columns: Batch, weights: PPOWeights, stack: ExitStack
    ) -> Callable[[Tensor], Tensor]:
        """Return what writes the gradient over some rows, and returns the terms of the loss.

        Args:
            stack: gets what must hold until the last gradient.
        """
        module = self.module[module_id]
        network, observation = module.unwrapped().network, columns[Columns.OBS]
        is_alone = module is module.unwrapped()  # no gradients of other learners to be added
        if is_alone and FlatGradient.suits(network, observation["action_mask"]):
            if network not in self._flat_gradients:
                self._flat_gradients[network] = FlatGradient(network)
            # Not only within the gradient: where threads have shared an operation they go on
            # spinning for a while, on cores that other threads need.
            stack.enter_context(one_thread())
            dtype = products_dtype(self.config.precision, self._device)
            read = FlatRows.of(network, observation, dtype)
            known = PPOColumns(observation["action_mask"], *(columns[name] for name in KNOWN))
            write = self._flat_gradients[network].write
            return lambda rows: write(read, known, rows, weights)
        if is_alone and SetGradient.suits(network, observation["action_mask"]):
            if network not in self._set_gradients:
                self._set_gradients[network] = SetGradient(network)
            stack.enter_context(one_thread())
            gradient = self._set_gradients[network]
            seen = gradient.read(observation)
            known = PPOColumns(observation["action_mask"], *(columns[name] for name in KNOWN))
            return lambda rows: gradient.write(seen, known, rows, weights)
        if isinstance(network, FlatNetwork):
            columns[Columns.OBS] = network.condensed(observation)
        return lambda rows: _autograd(module, columns, rows, weights)

    def _scaled_advantages(self, module_id: str, advantage_B: Tensor, scaling: str) -> Tensor:
        """Centre advantages and bring them to order one, by a running scale or the batch's own."""
        if scaling == "none":
            return advantage_B
        moments = torch.stack([advantage_B.mean(), advantage_B.square().mean()])
        mean, square = self._mean_over_learners(moments).tolist()
        variance = max(square - mean**2, 1e-12)
        if scaling == "running":
            last = self._advantage_variances.get(module_id, variance)
            variance = ADVANTAGE_DECAY * last + (1.0 - ADVANTAGE_DECAY) * variance
            self._advantage_variances[module_id] = variance
        scaled_B: Tensor = (advantage_B - mean) / math.sqrt(variance)
        return scaled_B

    def _mean_over_learners(self, tensor: Tensor) -> Any:
        """Return the mean over all learners, so that they decide and scale alike."""
        if self.config.num_learners > 1:
            torch.distributed.all_reduce(tensor)
            return tensor / self.config.num_learners
        return tensor

    def _log_update(self, module_id: str, columns: Batch, terms: Tensor) -> None:
        """Log the means over the update, once."""
        names = [f"{f.name}_loss" for f in fields(PPOLoss)[:3]]
        names += [f.name for f in fields(PPOLoss)[3:]] + ["gradient_norm"]
        target, value = columns[Postprocessing.VALUE_TARGETS], columns[Columns.VF_PREDS]
        unexplained = (target - value).var() / target.var().clamp(min=1e-12)
        values = {
            **dict(zip(names, terms.mean(dim=0).tolist(), strict=True)),
            "value_explained_variance": 1.0 - unexplained.item(),
            "num_minibatches": len(terms),
        }
        self.metrics.log_dict(values, key=module_id, window=1)

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the parent's state and the running scale of the advantages."""
        state: dict[str, Any] = super().get_state(*args, **kwargs)
        return {**state, ADVANTAGE_STATE: dict(self._advantage_variances)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` gave."""
        super().set_state(state)
        self._advantage_variances = dict(state.get(ADVANTAGE_STATE, self._advantage_variances))


def minibatches(columns: Batch, minibatch_size: int | None) -> Iterator[Tensor]:
    """Yield the numbers of all rows once, in random order, in parts of nearly equal size."""
    num_rows = len(columns[Columns.ACTIONS])
    # Rounded, so that learners whose shards differ by a row take the same number of steps.
    count = max(1, round(num_rows / (minibatch_size or num_rows)))
    order = torch.randperm(num_rows, device=columns[Columns.ACTIONS].device)
    yield from order.tensor_split(count)


def in_cache(columns: Batch, rows: Tensor) -> Iterator[Batch]:
    """Yield these rows of a minibatch, on a CPU in parts whose embeddings fit into its cache."""
    observation = columns[Columns.OBS]
    if ROW in observation or rows.device.type != "cpu":
        size = len(rows)
    else:
        size = max(1, CACHED_SERVERS // observation["servers"].shape[1])
    for part in rows.tensor_split(-(-len(rows) // size)):
        yield _take(columns, part)


def _autograd(module: Any, columns: Batch, rows: Tensor, weights: PPOWeights) -> Tensor:
    """Write the gradient of any module; return (6,) the terms of the loss."""
    module.zero_grad(set_to_none=True)
    found: list[Tensor] = []
    for part in in_cache(columns, rows):
        output = module.forward_train({Columns.OBS: part[Columns.OBS]})
        action_B, old_log_prob_B, old_value_B, advantage_B, return_B = (part[n] for n in KNOWN)
        loss = backward_ppo(
            logits_BA=output[Columns.ACTION_DIST_INPUTS],
            value_B=output[Columns.VF_PREDS],
            action_B=action_B,
            old_log_prob_B=old_log_prob_B,
            old_value_B=old_value_B,
            advantage_B=advantage_B,
            return_B=return_B,
            **weights._asdict(),
            share=len(action_B) / len(rows),
        )
        found.append(torch.stack([getattr(loss, f.name).detach() for f in fields(PPOLoss)]))
    return torch.stack(found).sum(dim=0)


def _take(columns: Batch, rows: Tensor) -> Batch:
    return {
        name: _take(column, rows) if isinstance(column, dict) else column.index_select(0, rows)
        for name, column in columns.items()
    }
