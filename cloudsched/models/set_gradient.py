"""PPO's gradient of a `SetNetwork` on a CPU, worked out by hand and in threads.

What autograd and the plain loss give, up to the order of sums: `tests/models/test_set_gradient.py`
holds the two together. Each thread takes its share of a minibatch all the way, in parts that fit
its cache, so that threads wait for each other once in a step instead of once in an operation.
"""

from __future__ import annotations

import math
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cloudsched.models.flat_gradient import PPOColumns, PPOWeights
from cloudsched.models.networks import Observation, SetNetwork
from cloudsched.models.set_learning_kernels import embed_gradients, score_gradients
from cloudsched.models.set_pass import (
    LAYERS,
    PERCEPTRONS,
    Layers,
    Passed,
    Perceptrons,
    Room,
    Seen,
    SetWeights,
    pooled,
)
from cloudsched.models.surrogate import NUM_TERMS
from cloudsched.models.threads import Threads

NAMES = (*LAYERS, *chain.from_iterable(PERCEPTRONS))
"""The parameters in the order of their gradients."""


class SetGradient:
    """Writes gradients to the parameters of a network, as parts of one tensor."""

    def __init__(self, network: SetNetwork) -> None:
        self._network = network
        self._threads = Threads()
        named = dict(network.named_parameters())
        self._parameters = [named[name] for name in NAMES]
        self.whole = torch.zeros(sum(p.numel() for p in self._parameters))
        sizes = [p.numel() for p in self._parameters]
        self._views = [
            piece.view_as(p)
            for piece, p in zip(torch.split(self.whole, sizes), self._parameters, strict=True)
        ]
        self._rooms: list[Room] = []

    @staticmethod
    def suits(network: nn.Module, mask_BA: Tensor) -> bool:
        """Say whether a network is one whose gradients can be taken here."""
        return type(network) is SetNetwork and mask_BA.device.type == "cpu"

    def read(self, observation: Observation) -> Seen:
        """Return observations as `write` takes them; to be called in `one_thread`."""
        return Seen.of(self._network, observation, self._threads)

    def write(
        self, seen: Seen, columns: PPOColumns, chosen_M: Tensor, weights: PPOWeights
    ) -> Tensor:
        """Make the gradient of the loss over the chosen rows that of the parameters.

        To be called in `one_thread`.

        Returns:
            (6,) the terms of the loss, in the order of `PPOLoss`.
        """
        of_network = SetWeights.of(self._network)
        shares = self._threads.shares(chosen_M)
        parts = torch.zeros(len(shares), self.whole.numel())
        self._make_room(of_network.layers, seen, len(shares))

        def write_share(number: int) -> NDArray[np.float64]:
            terms = np.zeros(NUM_TERMS)
            out = gradient_views(of_network, parts[number])
            for part_M in torch.split(shares[number], seen.rows_per_part):
                self._write_part(
                    seen,
                    columns,
                    part_M,
                    weights,
                    1.0 / len(chosen_M),
                    of_network,
                    self._rooms[number],
                    out,
                    terms,
                )
            return terms

        terms = np.sum(self._threads.run(write_share, len(shares)), axis=0)
        terms[0] = terms[1] + weights.value_weight * terms[2] - weights.entropy_weight * terms[3]
        torch.sum(parts, dim=0, out=self.whole)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view
        return torch.from_numpy(terms).float()

    def _make_room(self, layers: Layers, seen: Seen, num_shares: int) -> None:
        """Keep room for each share, as long as it is of the right size."""
        num_servers, num_jobs = seen.rows_per_part * seen.servers.shape[1], seen.jobs.shape[1]
        sizes = (num_servers, seen.rows_per_part * num_jobs)
        if not self._rooms or (len(self._rooms[0].server), len(self._rooms[0].job)) != sizes:
            self._rooms.clear()
        while len(self._rooms) < num_shares:
            self._rooms.append(Room.of(layers, seen, seen.rows_per_part))

    def _write_part(
        self,
        seen: Seen,
        columns: PPOColumns,
        chosen_M: Tensor,
        weights: PPOWeights,
        share: float,
        of_network: SetWeights,
        room: Room,
        out: SetWeights,
        out_terms: NDArray[np.float64],
    ) -> None:
        """Add the gradients of some rows, and the terms of their loss."""
        w, layers = of_network.perceptrons, of_network.layers
        pooled_MF = pooled(layers, seen, chosen_M, room)
        passed = Passed.of(w, pooled_MF)
        up_value_M, up_to_each_MW = (
            torch.empty(t.shape) for t in (passed.value_M, passed.to_each_MW)
        )
        score_gradients(
            layers,
            seen,
            PPOColumns(*(column.numpy() for column in columns)),  # type: ignore[arg-type]
            chosen_M.numpy(),
            passed.value_M.numpy(),
            passed.to_each_MW.numpy(),
            self._network.num_resources,
            self._network.is_balanced,
            weights._replace(
                value_clip=math.inf if weights.value_clip is None else weights.value_clip
            ),
            share,
            room,
            out.layers,
            up_value_M.numpy(),
            up_to_each_MW.numpy(),
            out_terms,
        )
        up_pooled_MF = _add_gradients(
            w, pooled_MF, passed, up_value_M, up_to_each_MW, seen.context.shape[1], out.perceptrons
        )
        embed_gradients(
            up_pooled_MF.numpy(), pooled_MF.numpy(), seen.servers.shape[1], room, out.layers
        )


def gradient_views(of_network: SetWeights, whole: Tensor) -> SetWeights:
    """Cut a tensor into gradients of all weights, in the order of `NAMES`."""
    shapes = [tuple(array.shape) for group in of_network for array in group]
    pieces = [
        piece.view(shape)
        for piece, shape in zip(
            torch.split(whole, [math.prod(s) for s in shapes]), shapes, strict=True
        )
    ]
    count = len(Layers._fields)
    return SetWeights(
        Layers(*(piece.numpy() for piece in pieces[:count])), Perceptrons(*pieces[count:])
    )


def _add_gradients(
    w: Perceptrons,
    pooled_MF: Tensor,
    passed: Passed,
    up_value_M: Tensor,
    up_to_each_MW: Tensor,
    num_context: int,
    out: Perceptrons,
) -> Tensor:
    """Add the gradients of the perceptrons; return that by what was pooled, without the context."""
    backward = torch.ops.aten.threshold_backward
    first_MH, cluster_MC, critic_MC, *_ = passed
    width = len(w.actor_bias)
    out.to_each.addmm_(up_to_each_MW.t(), cluster_MC)
    out.to_each_bias.add_(up_to_each_MW.sum(dim=0))
    actor_up_MC = backward(up_to_each_MW @ w.to_each, cluster_MC, 0.0)
    out.value[0].addmv_(critic_MC.t(), up_value_M)
    out.value_bias.add_(up_value_M.sum())
    critic_up_MC = backward(up_value_M[:, None] * w.value, critic_MC, 0.0)
    out.actor.addmm_(actor_up_MC.t(), first_MH[:, :width])
    out.actor_bias.add_(actor_up_MC.sum(dim=0))
    out.critic.addmm_(critic_up_MC.t(), first_MH[:, width:])
    out.critic_bias.add_(critic_up_MC.sum(dim=0))
    up_MH = torch.empty(first_MH.shape)
    torch.mm(actor_up_MC, w.actor, out=up_MH[:, :width])
    torch.mm(critic_up_MC, w.critic, out=up_MH[:, width:])
    up_MH = backward(up_MH, first_MH, 0.0)
    out.first.addmm_(up_MH.t(), pooled_MF)
    out.first_bias.add_(up_MH.sum(dim=0))
    return torch.mm(up_MH, w.first[:, num_context:])
