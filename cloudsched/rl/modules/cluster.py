"""Networks as RLModules, for our runner and for RLlib's own."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.spaces import Dict as DictSpace
from gymnasium.spaces import Discrete
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from torch import Tensor

from cloudsched.models.masking import epsilon_greedy, likeliest_kind
from cloudsched.models.networks import NetworkConfig, ObservationSizes, QNetwork, build_network

NETWORK = "network"


class ClusterModule(TorchRLModule, ValueFunctionAPI):  # type: ignore[misc]
    """Actor and critic in one pass.

    `model_config["network"]` holds the fields of a `NetworkConfig`; RLlib adds keys of its own
    beside it.
    """

    def setup(self) -> None:
        """Build the network for the spaces of the environment."""
        self.network = build_network(
            observation_sizes(self.observation_space, self.action_space),
            NetworkConfig.from_dict(dict(self.model_config or {}).get(NETWORK, {})),
        )

    def train(self, mode: bool = True) -> ClusterModule:
        """Switch all layers; RLlib asks for it in each pass, where mostly nothing is to be done."""
        return self if self.training == mode else super().train(mode)

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        logits_BA, value_B = self.network(batch[Columns.OBS])
        return {Columns.ACTION_DIST_INPUTS: logits_BA, Columns.VF_PREDS: value_B}

    def _forward_inference(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Without exploration, choose the likeliest kind of action first."""
        outputs: dict[str, Any] = super()._forward_inference(batch, **kwargs)
        observation = batch[Columns.OBS]
        outputs[Columns.ACTION_DIST_INPUTS] = likeliest_kind(
            outputs[Columns.ACTION_DIST_INPUTS],
            observation["servers"].shape[1],
            observation["jobs"].shape[1],
        )
        return outputs

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        """Return (B,) values."""
        value_B: Tensor = self.network(batch[Columns.OBS])[1]
        return value_B


class ClusterQModule(TorchRLModule):  # type: ignore[misc]
    """Action values; illegal actions have the lowest finite one, for the target as for acting."""

    def setup(self) -> None:
        """Build the network for the spaces of the environment."""
        settings = {"is_balanced": False, **dict(self.model_config or {}).get(NETWORK, {})}
        sizes = observation_sizes(self.observation_space, self.action_space)
        self.network = QNetwork(build_network(sizes, NetworkConfig.from_dict(settings)))

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self.network(batch[Columns.OBS])[0]}

    def _forward_exploration(
        self, batch: dict[str, Any], *, epsilon: float = 0.0, **_: Any
    ) -> dict[str, Any]:
        observation = batch[Columns.OBS]
        with torch.no_grad():
            logits_BA = epsilon_greedy(
                self.network(observation)[0],
                observation["servers"].shape[1],
                observation["jobs"].shape[1],
                epsilon,
            )
        return {Columns.ACTION_DIST_INPUTS: logits_BA}


def observation_sizes(
    observation_space: DictSpace, action_space: Discrete[Any]
) -> ObservationSizes:
    """Return the sizes that a network needs, from the spaces of the environment."""
    servers, jobs = observation_space["servers"].shape, observation_space["jobs"].shape
    context = observation_space["context"].shape
    assert servers is not None
    assert jobs is not None
    assert context is not None
    return ObservationSizes(
        num_servers=servers[0],
        num_jobs=jobs[0],
        server_features=servers[1],
        job_features=jobs[1],
        context_features=context[0],
        num_actions=int(action_space.n),
    )
