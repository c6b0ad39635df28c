"""PPO's gradient of a `FlatNetwork` on a CPU, worked out by hand and in threads.

What autograd and the plain loss give, up to the order of sums: `tests/models/test_flat_gradient.py`
holds the two together. Actor and critic share nothing, so each has a thread that takes it from
rounding its weights to its gradient, and with more threads shares of the rows have one each.
Threads wait for each other once in a step instead of once in an operation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cloudsched.models.flat_kernels import (
    Array,
    LastLayer,
    Scratch,
    actor_gradients,
    combine,
    critic_gradients,
)
from cloudsched.models.flat_pass import Body, FlatRows
from cloudsched.models.legal import FEW
from cloudsched.models.networks import FlatNetwork
from cloudsched.models.surrogate import NUM_TERMS
from cloudsched.models.threads import Threads


class PPOColumns(NamedTuple):
    """What is known of B decisions beside what was observed; as `ppo_loss` has it."""

    mask_BA: Tensor
    action_B: Tensor
    old_log_prob_B: Tensor
    old_value_B: Tensor
    advantage_B: Tensor
    return_B: Tensor


class PPOWeights(NamedTuple):
    """The numbers of PPO's loss; as `ppo_loss` has them."""

    clip: float
    value_clip: float | None
    value_weight: float
    entropy_weight: float


class FlatGradient:
    """Writes gradients to the parameters of a network, as parts of one tensor."""

    def __init__(self, network: FlatNetwork) -> None:
        self._threads = Threads()
        sizes = [sum(p.numel() for p in net.parameters()) for net in network.children()]
        self.whole = torch.zeros(sum(sizes))
        actor, critic = torch.split(self.whole, sizes)
        self._nets = (
            _ActorGradient(network.actor, actor),
            _CriticGradient(network.critic, critic),
        )

    @staticmethod
    def suits(network: nn.Module, mask_BA: Tensor) -> bool:
        """Say whether a network is one whose gradients can be taken here, and fast."""
        is_flat = type(network) is FlatNetwork and mask_BA.device.type == "cpu"
        return is_flat and bool(mask_BA.count_nonzero() <= FEW * mask_BA.numel())

    def write(
        self, rows: FlatRows, columns: PPOColumns, chosen_M: Tensor, weights: PPOWeights
    ) -> Tensor:
        """Make the gradient of the loss over the chosen rows that of the parameters.

        To be called in `one_thread`.

        Returns:
            (6,) the terms of the loss, in the order of `PPOLoss`.
        """
        nets = self._nets
        shares = self._threads.shares(chosen_M, most=self._threads.count // len(nets))
        for net in nets:
            net.make_room(len(shares), rows)

        def write_part(number: int) -> NDArray[np.float64]:
            which, share = divmod(number, len(shares))
            task = _Task(rows, columns, shares[share], weights, 1.0 / len(chosen_M))
            terms = nets[which].write_part(task, share)
            if len(shares) == 1:
                add_up(which)
            return terms

        def add_up(which: int) -> None:
            nets[which].add_up(rows)

        terms = np.sum(self._threads.run(write_part, len(nets) * len(shares)), axis=0)
        if len(shares) > 1:
            self._threads.run(add_up, len(nets))
        for net in nets:
            net.hand_over()
        terms[0] = terms[1] + weights.value_weight * terms[2] - weights.entropy_weight * terms[3]
        return torch.from_numpy(terms).float()


class _Task(NamedTuple):
    """The rows of which a thread takes the gradient."""

    rows: FlatRows
    columns: PPOColumns
    chosen_M: Tensor
    weights: PPOWeights
    share: float  # what a row counts: one over the number of rows in the minibatch


class _Outputs(NamedTuple):
    """What is written of a last layer."""

    up: Array  # (M, W) the gradient by what goes into the rectifier before it
    layer: LastLayer
    terms: NDArray[np.float64]  # (6,) of the loss


class _NetGradient(ABC):
    """Writes the gradient of one of the two perceptrons.

    Args:
        gradient: where to.
    """

    def __init__(self, net: nn.Sequential, gradient: Tensor) -> None:
        self._net = net
        self._gradient = gradient
        self._parameters = list(net.parameters())
        self._views = _cut(gradient, [parameter.shape for parameter in self._parameters])
        self._parts_PS = torch.empty(0, 0)
        self._pieces: list[list[Tensor]] = []

    def make_room(self, count: int, rows: FlatRows) -> None:
        """Have (P, S) room for the gradients of P shares, without those of fixed features."""
        first, *later = self._parameters
        num_changing = rows.row_BC.shape[1]
        num_fixed = first.numel() - len(first) * num_changing
        shape = (count, self._gradient.numel() - num_fixed)
        if self._parts_PS.shape != shape:  # else that of the last minibatch will do
            self._parts_PS = torch.empty(shape)
            shapes = [(len(first), num_changing), *(parameter.shape for parameter in later)]
            self._pieces = [_cut(part_S, shapes) for part_S in self._parts_PS]

    def write_part(self, task: _Task, number: int) -> NDArray[np.float64]:
        """Write the gradient over a share of the rows, and return the terms of their loss."""
        row_BC, out = task.rows.row_BC, self._pieces[number]
        body = Body.of(self._net, task.rows, row_BC.dtype)
        row_MC = row_BC.index_select(0, task.chosen_M)
        first_MW, second_MW = body.hidden(row_MC)
        up_MW, terms = torch.empty(second_MW.shape), np.zeros(NUM_TERMS)
        out_last = LastLayer(*(gradient.numpy() for gradient in out[4:]))
        last = LastLayer(*(parameter.detach().numpy() for parameter in self._parameters[4:]))
        outputs = _Outputs(up_MW.numpy(), out_last, terms)
        self._write_last(task, second_MW.float().numpy(), last, outputs)
        _write_body(body, row_MC, first_MW, up_MW, *out[:4])
        return terms

    @abstractmethod
    def _write_last(self, task: _Task, hidden: Array, layer: LastLayer, out: _Outputs) -> None:
        """Write the gradient of the last layer, given (M, W) what goes into it."""

    def add_up(self, rows: FlatRows) -> None:
        """Write the gradient over all rows, given those over shares."""
        combine(
            self._parts_PS.numpy(),
            rows.places.changing_C.numpy(),
            rows.places.fixed_X.numpy(),
            rows.fixed_X.numpy(),
            len(self._parameters[0]),
            self._gradient.numpy(),
        )

    def hand_over(self) -> None:
        """Make what was written the gradient of the parameters."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view


class _ActorGradient(_NetGradient):
    def _write_last(self, task: _Task, hidden: Array, layer: LastLayer, out: _Outputs) -> None:
        columns, num_actions = task.columns, len(layer.bias)
        actor_gradients(
            columns.mask_BA.numpy(),
            columns.action_B.numpy(),
            columns.old_log_prob_B.numpy(),
            columns.advantage_B.numpy(),
            task.chosen_M.numpy(),
            hidden,
            layer,
            task.weights.clip,
            task.weights.entropy_weight,
            task.share,
            Scratch(np.empty(num_actions, np.int64), *np.empty((2, num_actions), np.float32)),
            *out,
        )


class _CriticGradient(_NetGradient):
    def _write_last(self, task: _Task, hidden: Array, layer: LastLayer, out: _Outputs) -> None:
        columns, weights = task.columns, task.weights
        critic_gradients(
            columns.old_value_B.numpy(),
            columns.return_B.numpy(),
            task.chosen_M.numpy(),
            hidden,
            layer,
            math.inf if weights.value_clip is None else weights.value_clip,
            weights.value_weight,
            task.share,
            *out,
        )


def _write_body(
    body: Body,
    row_MC: Tensor,
    first_MW: Tensor,
    up_MW: Tensor,
    out_first_WC: Tensor,
    out_first_bias_W: Tensor,
    out_second_WW: Tensor,
    out_second_bias_W: Tensor,
) -> None:
    """Write the gradients of hidden layers, given that of what goes into the second rectifier."""
    torch.sum(up_MW, dim=0, out=out_second_bias_W)
    up_MW = up_MW.to(first_MW.dtype)
    out_second_WW.copy_(up_MW.t() @ first_MW)
    down_MW = torch.ops.aten.threshold_backward(up_MW @ body.second_WW, first_MW, 0.0)
    torch.sum(down_MW, dim=0, dtype=torch.float32, out=out_first_bias_W)
    out_first_WC.copy_(down_MW.t() @ row_MC)


def _cut(whole: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    pieces = torch.split(whole, [math.prod(shape) for shape in shapes])
    return [piece.view(*shape) for piece, shape in zip(pieces, shapes, strict=True)]
