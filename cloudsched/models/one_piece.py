"""Many parameters in one tensor: a pass over all of them is then one operation instead of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Weights:
    """The weights that are learned, those of the slow copy, and views of them.

    Parameters stay what they are to their modules, to checkpoints and to autograd, as parts of
    these; gradients are added to `gradient`.
    """

    whole: Tensor
    """What no slow copy has, then ordinary weights of the online network, then fast ones."""
    gradient: Tensor
    slow: Tensor
    num_alone: int
    num_fast: int

    @classmethod
    def of(
        cls,
        alone: Sequence[nn.Parameter],
        online: Sequence[nn.Parameter],
        slow: Sequence[nn.Parameter],
        *,
        num_fast: int,
    ) -> Weights:
        """Move parameters into one piece.

        Args:
            slow: in the order of `online`.
            num_fast: how many of `online`, at the end, are to learn fast.
        """
        learned = [*alone, *online]
        whole = _joined(learned)
        gradient = torch.zeros_like(whole)
        for parameter, part in zip(learned, _parts(gradient, learned), strict=True):
            parameter.grad = part
        fast = online[len(online) - num_fast :]
        return cls(whole, gradient, _joined(slow), _size(alone), _size(fast))

    def groups(self) -> tuple[Tensor, Tensor]:
        """Return the ordinary and the fast weights, with their gradients, for an optimiser."""
        place = len(self.whole) - self.num_fast
        parts = self.whole.tensor_split([place])
        for part, gradient in zip(parts, self.gradient.tensor_split([place]), strict=True):
            part.grad = gradient
        ordinary, fast = parts
        return ordinary, fast

    def clip_gradient(self, largest_norm: float) -> None:
        """Scale the gradient down to a norm if it is larger."""
        norm = float(torch.linalg.vector_norm(self.gradient))
        if norm > largest_norm:
            self.gradient.mul_(largest_norm / norm)

    def update_slow(self, rate: float) -> None:
        """Move the slow copy towards the online network."""
        self.slow.lerp_(self.whole[self.num_alone :], rate)


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Move parameters into one tensor, in this order, and return it."""
    whole = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, part in zip(parameters, _parts(whole, parameters), strict=True):
        parameter.data = part
    return whole


def _parts(whole: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    pieces = torch.split(whole, [parameter.numel() for parameter in parameters])
    return [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]


def _size(parameters: Sequence[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
