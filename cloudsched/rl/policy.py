"""A network as a `Policy`, so that evaluation treats learned and other policies alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cloudsched.errors import ConfigError
from cloudsched.models.masking import likeliest_kind, most_likely, sample

RULES = ("kind", "argmax", "sample")


class NetworkPolicy:
    """Acts with a network.

    Args:
        network: from observations to masked logits and values.
        rule: `kind` takes the likeliest action of the likeliest kind, `argmax` the action with the
            highest logit (right for action values), `sample` draws.
        seed: of the draws.
    """

    def __init__(self, network: nn.Module, *, rule: str = "kind", seed: int = 0) -> None:
        if rule not in RULES:
            raise ConfigError(f"rule={rule!r}: expected one of {', '.join(RULES)}.")
        self._network = network
        self._rule = rule
        self._seed = seed
        self._generator = torch.Generator()
        self.reset(0)

    def reset(self, num_clusters: int) -> None:
        """Start the draws again; a network remembers nothing."""
        self._generator.manual_seed(self._seed)

    @torch.inference_mode()
    def act(self, observation: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
        """Return (E,) legal actions."""
        tensors = {name: torch.from_numpy(array) for name, array in observation.items()}
        logits_EA, _ = self._network(tensors)
        if self._rule == "sample":
            return sample(logits_EA, self._generator).numpy()
        if self._rule == "kind":
            num_servers, num_jobs = tensors["servers"].shape[1], tensors["jobs"].shape[1]
            logits_EA = likeliest_kind(logits_EA, num_servers, num_jobs)
        return most_likely(logits_EA).numpy()
