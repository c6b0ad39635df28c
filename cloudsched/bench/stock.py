"""Our clusters as RLlib's own masking example wants them, for the comparison of training speeds."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from cloudsched.envs.cluster import ClusterVectorEnv

MASKED_ID = "cloudsched/MaskedCluster-v0"


class MaskedClusters(ClusterVectorEnv):
    """Batched clusters that show all features in one row, and a mask of floats beside it.

    `ActionMaskingTorchRLModule` takes no other observations.
    """

    def __init__(self, num_envs: int = 1, **scenario: Any) -> None:
        super().__init__(num_envs, copy=False, **scenario)
        spaces = dict(self.single_observation_space.spaces)  # type: ignore[attr-defined]
        num_actions = spaces.pop("action_mask").shape[0]
        num_features = sum(int(np.prod(space.shape)) for space in spaces.values())
        self.single_observation_space = Dict(
            {
                "action_mask": Box(0.0, 1.0, (num_actions,), np.float32),
                "observations": Box(-1.0, 1.0, (num_features,), np.float32),
            }
        )
        self.observation_space = batch_space(self.single_observation_space, num_envs)

    def reset(self, **kwargs: Any) -> Any:
        """Start an episode in each cluster."""
        observation, info = super().reset(**kwargs)
        return _masked(observation), info

    def step(self, actions: ArrayLike) -> Any:
        """Carry out one decision in each cluster."""
        observation, *rest = super().step(actions)
        return _masked(observation), *rest


def register_masked_clusters() -> None:
    """Make the clusters known to Gymnasium, once."""
    if MASKED_ID not in gymnasium.registry:
        gymnasium.register(MASKED_ID, vector_entry_point=MaskedClusters)


def _masked(observation: dict[str, NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
    mask = observation["action_mask"]
    parts = (observation[name].reshape(len(mask), -1) for name in ("servers", "jobs", "context"))
    return {
        "action_mask": mask.astype(np.float32),
        "observations": np.concatenate([*parts], axis=1),
    }
