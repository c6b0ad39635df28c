"""In which precision networks are trained: bfloat16 matrix products where they are fast.

Only what goes into a matrix product is rounded. Weights, gradients, optimiser, losses,
log-probabilities and values stay float32, and so does all acting outside of training. The choice
follows from the hardware, never from a measurement, so that one machine always gives the same bits.
"""

from __future__ import annotations

import copy
from functools import cache

import torch
from torch import Tensor, nn

from cloudsched.errors import ConfigError

PRECISIONS = ("auto", "float32", "bfloat16")
DEFAULT_PRECISION = "auto"


def check_precision(precision: str) -> str:
    """Return a known precision, and refuse others."""
    if precision not in PRECISIONS:
        raise ConfigError(f"precision={precision!r}: expected one of {', '.join(PRECISIONS)}.")
    return precision


def products_dtype(precision: str, device: torch.device | str) -> torch.dtype:
    """Return the type in which matrix products are to be taken on a device.

    Args:
        precision: `auto` for bfloat16 where the device has instructions for it, else float32.
    """
    if check_precision(precision) == "auto":
        is_rounded = has_fast_bfloat16(torch.device(device).type)
    else:
        is_rounded = precision == "bfloat16"
    return torch.bfloat16 if is_rounded else torch.float32


@cache
def has_fast_bfloat16(device_type: str) -> bool:
    """Say whether a kind of device multiplies bfloat16 faster than float32.

    Without instructions for it a CPU converts back and forth, and is slower than with float32.
    """
    if device_type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device_type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    return False


class Linear(nn.Linear):
    """A linear layer whose product can be taken in another type than its weights have."""

    products: torch.dtype = torch.float32

    def forward(self, input: Tensor) -> Tensor:
        """Return the product in the type in which it was taken."""
        bias = None if self.bias is None else self.bias.to(self.products)
        return nn.functional.linear(input.to(self.products), self.weight.to(self.products), bias)


class Output(nn.Linear):
    """A last layer, always in float32: values differ by less than bfloat16 can tell apart."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the product in float32."""
        return super().forward(input.float())


def take_products_in(dtype: torch.dtype, network: nn.Module) -> None:
    """Let all layers of a network that can take their products in a type do so."""
    for layer in network.modules():
        if isinstance(layer, Linear):
            layer.products = dtype


def rounded_copy(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a network for acting whose weights were rounded once instead of at each product.

    It computes what the network would after `take_products_in(dtype, network)`.
    """
    if dtype == torch.float32:
        return network
    twin = copy.deepcopy(network).requires_grad_(False)
    take_products_in(dtype, twin)
    for layer in twin.modules():
        if isinstance(layer, Linear):
            layer.to(dtype)
    return twin
