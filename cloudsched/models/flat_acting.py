"""A `FlatNetwork` as it acts in a rollout: weights rounded once, the critic asked at the end."""

from __future__ import annotations

import torch
from torch import Tensor

from cloudsched.models.flat_pass import Body, FlatRows, Places, last_layer
from cloudsched.models.legal import legal_scores
from cloudsched.models.networks import FlatNetwork, Observation, joined
from cloudsched.models.surrogate import draw
from cloudsched.models.threads import Threads


class FlatActing:
    """Computes what the network would, on a CPU, without gradients; to be called in `one_thread`.

    Args:
        dtype: of the products.
    """

    def __init__(self, network: FlatNetwork, dtype: torch.dtype) -> None:
        self._network = network
        self._dtype = dtype
        self._threads = Threads()
        self._bodies: tuple[Body, Body] | None = None
        self._places: Places | None = None

    def updated(self) -> FlatActing:
        """Return this, with the weights that the network has now."""
        self._bodies = self._places = None
        return self

    def __call__(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Return masked logits (B, A) and values (B,)."""
        return self._logits(observation), self.values(observation)

    def draw(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Draw (E,) actions; return them with their log-probabilities."""
        return draw(self._logits(observation))

    @torch.no_grad()
    def _logits(self, observation: Observation) -> Tensor:
        """Return masked logits (E, A) in clusters of one fleet, that of the first call."""
        if self._bodies is None or self._places is None:
            rows = FlatRows.of(self._network, observation, self._dtype)
            row_EC, self._places = rows.row_BC, rows.places
            self._bodies = self._rounded(rows)
        else:
            row_EC = joined(observation).index_select(1, self._places.changing_C)
            row_EC = row_EC.to(self._dtype)
        _, hidden_EW = self._bodies[0].hidden(row_EC)
        last = last_layer(self._network.actor)
        return legal_scores(hidden_EW, last, observation["action_mask"])

    def values(self, observation: Observation) -> Tensor:
        """Return (B,) values."""
        rows = FlatRows.of(self._network, observation, self._dtype)
        _, body = self._rounded(rows)
        last = last_layer(self._network.critic)
        weight_W, bias = last.weight.detach()[0], last.bias.detach()
        parts = self._threads.shares(rows.row_BC)

        def value(number: int) -> Tensor:
            _, hidden_BW = body.hidden(parts[number])
            return torch.addmv(bias, hidden_BW.float(), weight_W)

        return torch.cat(self._threads.run(value, len(parts)))

    def _rounded(self, rows: FlatRows) -> tuple[Body, Body]:
        network = self._network
        return (
            Body.of(network.actor, rows, self._dtype),
            Body.of(network.critic, rows, self._dtype),
        )
