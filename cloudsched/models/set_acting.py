"""`SetNetwork` as it acts in rollouts on a CPU: compiled for actions, in threads for values."""

from __future__ import annotations

import torch
from torch import Tensor

from cloudsched.models.compiled import CompiledSetNetwork
from cloudsched.models.networks import Observation, SetNetwork
from cloudsched.models.set_pass import Passed, Room, Seen, SetWeights, pooled
from cloudsched.models.surrogate import draw
from cloudsched.models.threads import Threads

FEWEST_SERVERS = 1024
"""Servers, over all clusters of a share; with fewer, a thread costs more than it spares."""


class SetActing:
    """Computes what the network would, without gradients; to be called in `one_thread`."""

    def __init__(self, network: SetNetwork) -> None:
        self._network = network
        self._threads = Threads()
        self._compiled: CompiledSetNetwork | None = None

    def updated(self) -> SetActing:
        """Return this, with the weights that the network has now."""
        self._compiled = None
        return self

    def __call__(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Return masked logits (B, A) and values (B,)."""
        return self._logits(observation), self.values(observation)

    def draw(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Draw (E,) actions; return them with their log-probabilities."""
        return draw(self._logits(observation))

    def _logits(self, observation: Observation) -> Tensor:
        if self._compiled is None:
            self._compiled = CompiledSetNetwork(self._network)
        compiled = self._compiled
        num_envs, num_servers, _ = observation["servers"].shape
        num_shares = min(self._threads.count, num_envs, num_envs * num_servers // FEWEST_SERVERS)
        shares = [
            dict(zip(observation, parts, strict=True))
            for parts in zip(
                *(part.tensor_split(max(1, num_shares)) for part in observation.values()),
                strict=True,
            )
        ]

        def logits(number: int) -> Tensor:
            share = {name: part.contiguous().numpy() for name, part in shares[number].items()}
            return torch.from_numpy(compiled.logits(share))

        return torch.cat(self._threads.run(logits, len(shares)))

    def values(self, observation: Observation) -> Tensor:
        """Return (B,) values."""
        of_network, seen = SetWeights.of(self._network), Seen.without_pairs(observation)
        shares = self._threads.shares(torch.arange(len(seen.servers)))

        def value(number: int) -> Tensor:
            room = Room.of(of_network.layers, seen, min(seen.rows_per_part, len(shares[number])))
            found = []
            for part_M in torch.split(shares[number], seen.rows_per_part):
                pooled_MF = pooled(of_network.layers, seen, part_M, room)
                found.append(Passed.value_of(of_network.perceptrons, pooled_MF))
            return torch.cat(found)

        return torch.cat(self._threads.run(value, len(shares)))
