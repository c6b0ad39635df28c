"""`FlatNetwork` on a CPU without autograd: its rows, and its weights as products take them.

The fleet is always the same, so that what never changes about the servers adds as much to every
row: it is taken out of the rows and becomes a part of the first bias. Weights are rounded once for
all products that follow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from cloudsched.models.networks import FlatNetwork, Observation, joined
from cloudsched.models.precision import Linear, Output, rectified_product


class Places(NamedTuple):
    """Where features stand in a row of all, (F,)."""

    changing_C: Tensor
    fixed_X: Tensor


class FlatRows(NamedTuple):
    """B observations as the products read them."""

    row_BC: Tensor
    fixed_X: Tensor  # what is the same in all rows, and not in them
    places: Places

    @classmethod
    def of(cls, network: FlatNetwork, observation: Observation, dtype: torch.dtype) -> FlatRows:
        """Take rows apart, for products of a type; of several fleets, nothing is taken out."""
        row_BF = joined(observation)
        places = _places(network.is_fixed_F)
        fixed_BX = row_BF.index_select(1, places.fixed_X)
        if not torch.equal(fixed_BX, fixed_BX[:1].expand_as(fixed_BX)):
            places = _places(torch.zeros_like(network.is_fixed_F))
        return cls(
            row_BF.index_select(1, places.changing_C).to(dtype),
            row_BF[0, places.fixed_X],
            places,
        )


def _places(is_fixed_F: Tensor) -> Places:
    return Places((~is_fixed_F).nonzero().squeeze(1), is_fixed_F.nonzero().squeeze(1))


class Body(NamedTuple):
    """The hidden layers of a perceptron; matrices are rounded, biases are not."""

    first_WC: Tensor
    first_bias_W: Tensor
    second_WW: Tensor
    second_bias_W: Tensor

    @classmethod
    def of(cls, net: nn.Sequential, rows: FlatRows, dtype: torch.dtype) -> Body:
        """Round the weights, and add what is the same in all rows to the first bias."""
        first, second = net[0], net[2]
        assert isinstance(first, Linear)
        assert isinstance(second, Linear)
        weight_WF = first.weight.detach()
        fixed_WX = weight_WF.index_select(1, rows.places.fixed_X)
        return cls(
            weight_WF.index_select(1, rows.places.changing_C).to(dtype),
            torch.addmv(first.bias.detach(), fixed_WX, rows.fixed_X),
            second.weight.detach().to(dtype),
            second.bias.detach(),
        )

    def hidden(self, row_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, W) what both layers give."""
        first_BW = rectified_product(row_BC, self.first_WC, self.first_bias_W)
        return first_BW, rectified_product(first_BW, self.second_WW, self.second_bias_W)


def last_layer(net: nn.Sequential) -> Output:
    """Return what comes after the hidden layers."""
    last = net[-1]
    assert isinstance(last, Output)
    return last
