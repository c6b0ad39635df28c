"""Our clusters as a Stable-Baselines3 VecEnv, for the comparison of training speeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Dict
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from cloudsched.models.rollout import training_env


class StableBaselinesEnv(VecEnv):  # type: ignore[misc]
    """Batched clusters without the cost of one Python object for each.

    The mask goes to MaskablePPO through `action_masks`, and is not part of the observation.
    """

    def __init__(self, num_envs: int, **scenario: Any) -> None:
        self.clusters = training_env(num_envs, **scenario)
        spaces = dict(self.clusters.single_observation_space.spaces)  # type: ignore[attr-defined]
        del spaces["action_mask"]
        super().__init__(num_envs, Dict(spaces), self.clusters.single_action_space)
        self._seeds = list(range(num_envs))

    def reset(self) -> dict[str, NDArray[Any]]:
        """Start an episode in every cluster."""
        return self._seen(self.clusters.reset(seed=self._seeds)[0])

    def step_async(self, actions: NDArray[np.int64]) -> None:
        """Keep the actions for `step_wait`."""
        self._actions = actions

    def step_wait(self) -> Any:
        """Carry out one decision in each cluster."""
        observation, reward, _, truncated, info = self.clusters.step(self._actions)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for e in truncated.nonzero()[0]:
            infos[e]["terminal_observation"] = self._seen(info["final_obs"][e])
            infos[e]["TimeLimit.truncated"] = True
        return self._seen(observation), reward.astype(np.float32), truncated, infos

    def _seen(self, observation: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        return {k: v.copy() for k, v in observation.items() if k != "action_mask"}

    def close(self) -> None:
        """Close the clusters."""
        self.clusters.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute of the clusters, once for each."""
        return [getattr(self.clusters, attr_name)] * self._count(indices)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Refuse: the clusters are one object."""
        raise NotImplementedError(f"cannot set {attr_name!r} of single clusters")

    def env_method(
        self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any
    ) -> list[Any]:
        """Answer the one call that MaskablePPO makes."""
        if method_name != "action_masks":
            raise NotImplementedError(f"no method {method_name!r} of single clusters")
        return list(self.clusters.engine.mask.astype(np.bool_))

    def has_attr(self, attr_name: str) -> bool:
        """Say that masks can be had."""
        return attr_name == "action_masks"

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        """Say that there are no wrappers."""
        return [False] * self._count(indices)

    def _count(self, indices: int | Sequence[int] | None) -> int:
        return self.num_envs if indices is None else len(np.atleast_1d(indices))
