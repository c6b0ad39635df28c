"""PPO's gradient of a `FlatNetwork` on a CPU, worked out by hand and in threads.

What autograd and the plain loss give, up to the order of sums: `tests/models/test_flat_gradient.py`
holds the two together. Each thread takes its share of a minibatch from the first product to the
last, so that threads wait for each other once in a step instead of once in an operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor, nn

from cloudsched.models.flat_pass import Body, FlatRows
from cloudsched.models.legal import FEW
from cloudsched.models.networks import FlatNetwork
from cloudsched.models.surrogate import NUM_TERMS, policy_gradient, value_gradient
from cloudsched.models.threads import Threads

Array = NDArray[np.float32]

LATER = ("2.weight", "2.bias", "4.weight", "4.bias")
NAMES = (
    "actor.0.weight",
    "critic.0.weight",
    "actor.0.bias",
    "critic.0.bias",
    *(f"{net}.{end}" for net in ("actor", "critic") for end in LATER),
)
"""The parameters in the order of their gradients: first layers before the others."""


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


class LastLayers(NamedTuple):
    """Weights of the last layers, or their gradients."""

    logits: Array  # (A, W)
    logits_bias: Array  # (A,)
    value: Array  # (1, W)
    value_bias: Array  # (1,)


class Scratch(NamedTuple):
    """Room for what is computed on the way; (A,) each."""

    legal: NDArray[np.int64]
    scores: Array
    ups: Array


class FlatGradient:
    """Writes gradients to the parameters of a network, as parts of one tensor."""

    def __init__(self, network: FlatNetwork) -> None:
        self._network = network
        self._threads = Threads()
        named = dict(network.named_parameters())
        self._parameters = [named[name] for name in NAMES]
        self.whole = torch.zeros(sum(p.numel() for p in self._parameters))
        self._views = _cut(self.whole, [p.shape for p in self._parameters])

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
        nets = (self._network.actor, self._network.critic)
        bodies = [Body.of(net, rows, rows.row_BC.dtype) for net in nets]
        shares = self._threads.shares(chosen_M)
        parts = self._empty_parts(len(shares), rows.row_BC.shape[1])

        def write_part(number: int) -> NDArray[np.float64]:
            return self._write_part(
                rows, columns, shares[number], weights, bodies, 1.0 / len(chosen_M), parts[number]
            )

        terms = self._threads.run(write_part, len(shares))
        combine(
            parts.numpy(),
            rows.places.changing_C.numpy(),
            rows.places.fixed_X.numpy(),
            rows.fixed_X.numpy(),
            2 * len(bodies[0].first_bias_W),
            self.whole.numpy(),
        )
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view
        return torch.from_numpy(np.sum(terms, axis=0)).float()

    def _empty_parts(self, count: int, num_changing: int) -> Tensor:
        """Return (P, S) room for the gradients of P shares, without those of fixed features."""
        num_outputs, num_features = self._parameters[0].shape
        num_fixed = 2 * num_outputs * (num_features - num_changing)
        return torch.empty(count, self.whole.numel() - num_fixed)

    def _write_part(
        self,
        rows: FlatRows,
        columns: PPOColumns,
        chosen_M: Tensor,
        weights: PPOWeights,
        bodies: Sequence[Body],
        share: float,
        out_part_S: Tensor,
    ) -> NDArray[np.float64]:
        """Write the gradients of some rows, and return the terms of their loss."""
        first_at = [(*p.shape[:-1], rows.row_BC.shape[1]) for p in self._parameters[:2]]
        out = _cut(out_part_S, first_at + [p.shape for p in self._parameters[2:]])
        row_MC = rows.row_BC.index_select(0, chosen_M)
        (actor_1, actor_2), (critic_1, critic_2) = (body.hidden(row_MC) for body in bodies)
        actor_up_MW, critic_up_MW = torch.empty(actor_2.shape), torch.empty(critic_2.shape)
        actor_out, critic_out = out[4:8], out[8:12]
        last = (*self._parameters[6:8], *self._parameters[10:12])
        num_actions = columns.mask_BA.shape[1]
        terms = np.zeros(NUM_TERMS)
        head_gradients(
            PPOColumns(*(column.numpy() for column in columns)),  # type: ignore[arg-type]
            chosen_M.numpy(),
            actor_2.float().numpy(),
            critic_2.float().numpy(),
            LastLayers(*(p.detach().numpy() for p in last)),
            weights.clip,
            math.inf if weights.value_clip is None else weights.value_clip,
            weights.value_weight,
            weights.entropy_weight,
            share,
            Scratch(np.empty(num_actions, np.int64), *np.empty((2, num_actions), np.float32)),
            actor_up_MW.numpy(),
            critic_up_MW.numpy(),
            LastLayers(*(gradient.numpy() for gradient in (*actor_out[2:], *critic_out[2:]))),
            terms,
        )
        _write_body(bodies[0], row_MC, actor_1, actor_up_MW, out[0], out[2], *actor_out[:2])
        _write_body(bodies[1], row_MC, critic_1, critic_up_MW, out[1], out[3], *critic_out[:2])
        return terms


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


# Sums may be taken in any order, always the same one: without it they are not vectorised.
@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
def head_gradients(
    columns: Any,
    chosen: NDArray[np.int64],
    actor_hidden: Array,
    critic_hidden: Array,
    layers: LastLayers,
    clip: float,
    value_clip: float,
    value_weight: float,
    entropy_weight: float,
    share: float,
    scratch: Scratch,
    out_actor_hidden: Array,
    out_critic_hidden: Array,
    out_layers: LastLayers,
    out_terms: NDArray[np.float64],
) -> None:
    """Write the gradients of last layers and of the rectifiers before them, and the loss's terms.

    Args:
        columns: a `PPOColumns` of arrays, of which some rows are chosen.
        chosen: (M,) these.
        actor_hidden: (M, W) what the actor's rectifier gave.
        critic_hidden: (M, W) what the critic's gave.
        share: what a row counts: one over the number of rows in the minibatch.
        out_actor_hidden: (M, W) overwritten, and so are all that follow.
    """
    num_actions, width = layers.logits.shape
    legal, scores, ups = scratch
    out_layers.logits[:] = 0.0
    out_layers.logits_bias[:] = 0.0
    out_layers.value[:] = 0.0
    out_layers.value_bias[:] = 0.0
    out_terms[:] = 0.0
    value_towards, out_value_towards = layers.value[0], out_layers.value[0]
    for m in range(chosen.shape[0]):
        b = chosen[m]
        row, out_row = actor_hidden[m], out_actor_hidden[m]
        num_legal = 0
        for a in range(num_actions):
            if columns.mask_BA[b, a] != 0:
                legal[num_legal] = a
                num_legal += 1
                towards = layers.logits[a]
                score = layers.logits_bias[a]
                for i in range(width):
                    score += row[i] * towards[i]
                scores[a] = score
        policy_gradient(
            scores,
            legal[:num_legal],
            columns.action_B[b],
            columns.old_log_prob_B[b],
            columns.advantage_B[b],
            clip,
            entropy_weight,
            share,
            ups,
            out_terms,
        )
        out_row[:] = 0.0
        for j in range(num_legal):
            a = legal[j]
            up = ups[a]
            out_layers.logits_bias[a] += up
            towards, out_towards = layers.logits[a], out_layers.logits[a]
            for i in range(width):
                out_row[i] += up * towards[i]
                out_towards[i] += up * row[i]
        for i in range(width):
            out_row[i] = out_row[i] if row[i] > 0.0 else np.float32(0.0)

        row, out_row = critic_hidden[m], out_critic_hidden[m]
        value = layers.value_bias[0]
        for i in range(width):
            value += row[i] * value_towards[i]
        up = np.float32(
            value_gradient(
                value,
                columns.old_value_B[b],
                columns.return_B[b],
                value_clip,
                value_weight,
                share,
                out_terms,
            )
        )
        out_layers.value_bias[0] += up
        for i in range(width):
            out_row[i] = up * value_towards[i] if row[i] > 0.0 else np.float32(0.0)
            out_value_towards[i] += up * row[i]
    out_terms[0] = out_terms[1] + value_weight * out_terms[2] - entropy_weight * out_terms[3]


@njit(cache=True, nogil=True, error_model="numpy")
def combine(
    parts: Array,
    changing: NDArray[np.int64],
    fixed_at: NDArray[np.int64],
    fixed: Array,
    num_outputs: int,
    out_whole: Array,
) -> None:
    """Add up the gradients of shares, and put those of fixed features between the others.

    Args:
        parts: (P, S) weights of O outputs by C changing features, their O biases, and the rest.
        changing: (C,) places of the features.
        fixed_at: (X,) places of those that are the same in all rows.
        fixed: (X,) these.
        out_whole: overwritten; as a part, with weights by all features.
    """
    num_changing = changing.shape[0]
    num_features = num_changing + fixed_at.shape[0]
    num_first, num_full = num_outputs * num_changing, num_outputs * num_features
    out_rest = out_whole[num_full:]
    out_rest[:] = parts[0, num_first:]
    for p in range(1, parts.shape[0]):
        rest = parts[p, num_first:]
        for i in range(rest.shape[0]):
            out_rest[i] += rest[i]
    for o in range(num_outputs):
        out_row = out_whole[o * num_features : (o + 1) * num_features]
        for c in range(num_changing):
            total = np.float32(0.0)
            for p in range(parts.shape[0]):
                total += parts[p, o * num_changing + c]
            out_row[changing[c]] = total
        for x in range(fixed_at.shape[0]):
            out_row[fixed_at[x]] = out_rest[o] * fixed[x]
