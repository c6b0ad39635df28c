"""A `FlatNetwork` as it acts in a rollout: weights rounded once, the critic asked at the end."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cloudsched.models.acting_kernels import Array, choose, keep
from cloudsched.models.flat_pass import Body, FlatRows, last_layer
from cloudsched.models.legal import legal_scores
from cloudsched.models.networks import FlatNetwork, Observation
from cloudsched.models.threads import Threads

NAMES = ("servers", "jobs", "context", "action_mask")
"""The parts of an observation, in the order in which kernels take them."""


class FlatActing:
    """Computes what the network would, on a CPU, without gradients; to be called in `one_thread`.

    Args:
        dtype: of the products.
    """

    def __init__(self, network: FlatNetwork, dtype: torch.dtype) -> None:
        self._network = network
        self._dtype = dtype
        self._threads = Threads()

    def updated(self) -> FlatActing:
        """Return this; weights are read when a rollout begins."""
        return self

    def __call__(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Return masked logits (B, A) and values (B,)."""
        rows = FlatRows.of(self._network, observation, self._dtype)
        _, hidden_BW = Body.of(self._network.actor, rows, self._dtype).hidden(rows.row_BC)
        last = last_layer(self._network.actor)
        return legal_scores(hidden_BW, last, observation["action_mask"]), self._values(rows)

    def values(self, observation: Observation) -> Tensor:
        """Return (B,) values."""
        return self._values(FlatRows.of(self._network, observation, self._dtype))

    def _values(self, rows: FlatRows) -> Tensor:
        body = Body.of(self._network.critic, rows, self._dtype)
        last = last_layer(self._network.critic)
        weight_W, bias = last.weight.detach()[0], last.bias.detach()
        parts = self._threads.shares(rows.row_BC)

        def value(number: int) -> Tensor:
            _, hidden_BW = body.hidden(parts[number])
            return torch.addmv(bias, hidden_BW.float(), weight_W)

        return torch.cat(self._threads.run(value, len(parts)))

    def begin(self, live: dict[str, Tensor], tables: dict[str, Tensor]) -> FlatRollout:
        """Return what acts for T steps in E clusters of one fleet, with the weights of now.

        Args:
            live: what they look like, now and after each step.
            tables: (T, E, ...) where this is to be kept.
        """
        return FlatRollout(self, live, tables)


class FlatRollout:
    """Acts with the same weights for T steps; see `FlatActing.begin`."""

    def __init__(
        self, acting: FlatActing, live: dict[str, Tensor], tables: dict[str, Tensor]
    ) -> None:
        network, dtype = acting._network, acting._dtype
        self._acting = acting
        self._first = FlatRows.of(network, live, dtype)
        self._body = Body.of(network.actor, self._first, dtype)
        last = last_layer(network.actor)
        self._last = last.weight.detach().numpy(), last.bias.detach().numpy()
        mask = tables["action_mask"]
        num_steps, num_envs, _ = mask.shape
        changing_C = self._first.places.changing_C
        self._mask = mask.numpy()
        self._row_EC = torch.empty(num_envs, len(changing_C))
        self._row_TEC = torch.empty(num_steps, num_envs, len(changing_C), dtype=dtype)
        self._kept = (
            *(live[name].numpy() for name in NAMES),
            changing_C.numpy(),
            *(tables[name].numpy() for name in NAMES),
            self._row_EC.numpy(),
        )
        # In double precision, so that unlikely actions are drawn as often as they should be.
        self._uniform = torch.rand(num_steps, num_envs, dtype=torch.float64).numpy()
        self._scratch = np.empty(len(last.bias))

    def act(self, t: int, out_action: NDArray[np.int64], out_log_prob: Array) -> None:
        """Keep what step t sees, and write its actions and their log-probabilities, (T, E)."""
        keep(t, *self._kept)
        _, hidden_EW = self._body.hidden(self._row_TEC[t].copy_(self._row_EC))
        choose(
            t,
            hidden_EW.float().numpy(),
            *self._last,
            self._mask,
            self._uniform,
            self._scratch,
            out_action,
            out_log_prob,
        )

    def values(self) -> Tensor:
        """Return (T * E,) values of what was seen."""
        return self._acting._values(self._first._replace(row_BC=self._row_TEC.flatten(0, 1)))
