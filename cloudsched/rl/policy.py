"""A network as a `Policy`, so that evaluation treats learned and other policies alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cloudsched.errors import ConfigError
from cloudsched.models.choosing import choose
from cloudsched.models.compiled import compile_network
from cloudsched.models.masking import likeliest_kind, most_likely, sample

RULES = ("kind", "argmax", "sample")


class NetworkPolicy:
    """Acts with a network.

    Args:
        network: from observations to masked logits and values.
        rule: `kind` takes the likeliest action of the likeliest kind, `argmax` the action with the
            highest logit (right for action values), `sample` draws.
        seed: of the draws.
        is_frozen: whether the weights will not change any more; then the network is compiled,
            where it can be, and a decision does not depend on what else is in the batch.
    """

    def __init__(
        self, network: nn.Module, *, rule: str = "kind", seed: int = 0, is_frozen: bool = False
    ) -> None:
        if rule not in RULES:
            raise ConfigError(f"rule={rule!r}: expected one of {', '.join(RULES)}.")
        self._network = network
        self._device = next(network.parameters()).device
        self._rule = rule
        self._seed = seed
        self._generator = torch.Generator(self._device)
        self._compiled = compile_network(network) if is_frozen and rule != "sample" else None
        self.reset(0)

    def reset(self, num_clusters: int) -> None:
        """Start the draws again; a network remembers nothing."""
        self._generator.manual_seed(self._seed)

    def act(self, observation: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
        """Return (E,) legal actions."""
        if self._compiled is not None:
            return self.weigh(observation)[0]
        tensors, logits_EA = self._score(observation)
        return self._choose(tensors, logits_EA)

    def weigh(
        self, observation: Mapping[str, NDArray[Any]]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return (E,) actions as `act` does, and (E, A) the probability of each by the network.

        Action values are no probabilities: with `argmax` the chosen action has 1.
        """
        if self._compiled is not None:
            logits_EA = self._compiled.logits(observation)
            action_E = np.empty(len(logits_EA), np.int64)
            chances_EA = np.empty_like(logits_EA)
            num_pairs = observation["servers"].shape[1] * observation["jobs"].shape[1]
            room_A = np.empty(logits_EA.shape[1], np.int64)
            choose(logits_EA, num_pairs, self._rule == "kind", room_A, action_E, chances_EA)
        else:
            tensors, tensor_EA = self._score(observation)
            action_E = self._choose(tensors, tensor_EA)
            chances_EA = torch.softmax(tensor_EA, dim=-1).cpu().numpy()
        if self._rule == "argmax":
            chances_EA[:] = 0.0
            chances_EA[np.arange(len(action_E)), action_E] = 1.0
        return action_E, chances_EA

    @torch.inference_mode()
    def _score(
        self, observation: Mapping[str, NDArray[Any]]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tensors = {
            name: torch.from_numpy(array).to(self._device) for name, array in observation.items()
        }
        return tensors, self._network(tensors)[0]

    @torch.inference_mode()
    def _choose(
        self, tensors: Mapping[str, torch.Tensor], logits_EA: torch.Tensor
    ) -> NDArray[np.int64]:
        if self._rule == "sample":
            return sample(logits_EA, self._generator).cpu().numpy()
        if self._rule == "kind":
            num_servers, num_jobs = tensors["servers"].shape[1], tensors["jobs"].shape[1]
            logits_EA = likeliest_kind(logits_EA, num_servers, num_jobs)
        return most_likely(logits_EA).cpu().numpy()
