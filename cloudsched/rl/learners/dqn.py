"""Double, dueling, n-step Q-learning from a replay memory that the learner keeps on its device."""

from __future__ import annotations

import copy
import math
from dataclasses import fields
from typing import Any

import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.policy.sample_batch import MultiAgentBatch
from torch import Tensor

from cloudsched.models.losses import QLoss, double_q_target, q_loss
from cloudsched.models.replay import ColumnReplay
from cloudsched.rl.runner import Batch, as_tensors

TARGET_STATE, MEAN_REWARD_STATE = "target_networks", "mean_rewards"
ELAPSED_TICKS, MASK = "elapsed_ticks", "action_mask"


class ReplayDQNLearner(TorchLearner):  # type: ignore[misc]
    """Adds the columns of a `ReplayEnvRunner` to its memory, then draws minibatches from it.

    Values are discounted sums of rewards less the mean reward of a tick in the first batch.
    Checkpoints hold the networks and the optimiser, not the memory, which fills again.
    """

    def build(self) -> None:
        """Build module, target network, memory and optimiser."""
        super().build()
        self._targets = {
            module_id: copy.deepcopy(self.module[module_id].unwrapped().network)
            for module_id in self.module.keys()  # noqa: SIM118 - a MultiRLModule is no dictionary
        }
        self._memories: dict[str, ColumnReplay] = {}
        self._mean_rewards: dict[str, float] = {}

    def update(
        self,
        batch: MultiAgentBatch | None = None,
        *,
        training_data: TrainingData | None = None,
        timesteps: dict[str, Any] | None = None,
        num_updates: int = 1,
        **_: Any,
    ) -> Any:
        """Remember the columns, then take `num_updates` gradient steps on each module."""
        data = TrainingData(batch=batch) if training_data is None else training_data
        data.solve_refs()
        assert data.batch is not None
        self._check_is_built()
        self.before_gradient_based_update(timesteps=timesteps or {})
        self._weights_seq_no += 1
        for module_id, columns in data.batch.policy_batches.items():
            self._remember(module_id, as_tensors(dict(columns), self._device))
            self._update_module(module_id, num_updates)
        self._log_steps_trained_metrics(data.batch)
        self.after_gradient_based_update(timesteps=timesteps or {})
        return self.metrics.reduce()

    def _remember(self, module_id: str, columns: Batch) -> None:
        config = self.config.get_config_for_module(module_id)
        if module_id not in self._memories:
            num_clusters = len(columns[Columns.ACTIONS])
            self._memories[module_id] = ColumnReplay(
                math.ceil(config.replay_capacity / num_clusters),
                num_ticks=config.n_step,
                gamma=config.gamma,
                device=self._device,
            )
        reward, elapsed = columns[Columns.REWARDS], columns[ELAPSED_TICKS]
        if config.clock == "decision":
            elapsed = torch.ones_like(elapsed)
        # Without the mean, which no decision changes, values are small and differences count.
        mean = self._mean_rewards.setdefault(module_id, (reward.sum() / elapsed.sum()).item())
        self._memories[module_id].add(
            columns[Columns.OBS],
            action=columns[Columns.ACTIONS],
            reward=reward - mean * elapsed,
            elapsed=elapsed,
            is_cut=columns[Columns.TRUNCATEDS],
        )

    def _update_module(self, module_id: str, num_updates: int) -> None:
        config = self.config.get_config_for_module(module_id)
        memory, target = self._memories[module_id], self._targets[module_id]
        module, optimizer = self.module[module_id], self.get_optimizer(module_id)
        network = module.unwrapped().network
        parameters = list(network.parameters())
        if memory.num_known < max(config.learning_starts, 1):
            return
        terms: list[Tensor] = []
        for _ in range(num_updates):
            rows = memory.sample(config.minibatch_size)
            following = rows.next_observation
            if not config.target_mask:
                following = {**following, MASK: torch.ones_like(following[MASK])}
            with torch.no_grad():
                target_B = double_q_target(
                    reward_B=rows.n_step_reward,
                    discount_B=rows.discount,
                    online_next_BA=network(following)[0],
                    target_next_BA=target(following)[0],
                )
            output = module.forward_train({Columns.OBS: rows.observation})
            loss = q_loss(
                q_BA=output[Columns.ACTION_DIST_INPUTS],
                action_B=rows.action,
                target_B=target_B,
                weight_B=rows.is_valid,
            )
            optimizer.zero_grad(set_to_none=True)
            loss.total.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip or math.inf)
            optimizer.step()
            with torch.no_grad():
                torch._foreach_lerp_(list(target.parameters()), parameters, config.target_tau)
            named = [getattr(loss, f.name).detach() for f in fields(QLoss)]
            terms.append(torch.stack([*named, norm.detach()]))
        names = ["total_loss", *(f.name for f in fields(QLoss)[1:]), "gradient_norm"]
        means = torch.stack(terms).mean(dim=0).tolist()
        self.metrics.log_dict(dict(zip(names, means, strict=True)), key=module_id, window=1)

    def compute_loss_for_module(self, **_: Any) -> Tensor:
        """Not used: `update` does all."""
        raise NotImplementedError("ReplayDQNLearner learns in update().")

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the parent's state and the target networks."""
        state: dict[str, Any] = super().get_state(*args, **kwargs)
        targets = {
            module_id: {name: array.cpu().numpy() for name, array in target.state_dict().items()}
            for module_id, target in self._targets.items()
        }
        return {**state, TARGET_STATE: targets, MEAN_REWARD_STATE: dict(self._mean_rewards)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` gave."""
        super().set_state(state)
        self._mean_rewards = dict(state.get(MEAN_REWARD_STATE, self._mean_rewards))
        for module_id, arrays in state.get(TARGET_STATE, {}).items():
            weights = {name: torch.as_tensor(array) for name, array in arrays.items()}
            self._targets[module_id].load_state_dict(weights)
