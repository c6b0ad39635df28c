"""The supervisor of a hierarchy as an RLModule; its sub-agents are `ClusterModule`s."""

from __future__ import annotations

from typing import Any

from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from torch import Tensor

from cloudsched.models.hierarchy import SupervisorNetwork
from cloudsched.models.networks import NetworkConfig
from cloudsched.rl.modules.cluster import NETWORK, observation_sizes


class SupervisorModule(TorchRLModule, ValueFunctionAPI):  # type: ignore[misc]
    """Chooses a sub-agent; `model_config["network"]` is the sub-agents' own."""

    def setup(self) -> None:
        """Build the network for the spaces of the environment."""
        self.network = SupervisorNetwork(
            observation_sizes(self.observation_space, self.action_space),
            NetworkConfig.from_dict(dict(self.model_config or {}).get(NETWORK, {})),
        )

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        scores_B2, value_B = self.network(batch[Columns.OBS])
        return {Columns.ACTION_DIST_INPUTS: scores_B2, Columns.VF_PREDS: value_B}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        """Return (B,) values."""
        value_B: Tensor = self.network(batch[Columns.OBS])[1]
        return value_B
