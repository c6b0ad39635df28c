"""In which precision networks are trained: bfloat16 matrix products where they are fast.

Only what goes into a matrix product is rounded. Weights, gradients, optimiser, losses,
log-probabilities and values stay float32, and so does all acting outside of training. The choice
follows from the hardware, never from a measurement, so that one machine always gives the same bits.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

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
        return self.first(input, self.out_features)

    def first(self, input: Tensor, count: int) -> Tensor:
        """Return the first outputs only."""
        bias = None if self.bias is None else self.bias[:count].to(self.products)
        weight = self.weight[:count].to(self.products)
        return nn.functional.linear(input.to(self.products), weight, bias)


class Output(nn.Linear):
    """A last layer: float32, as values differ by less than bfloat16 can tell apart.

    Only its gradients are products of what is rounded anyway.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the product in float32."""
        if input.dtype == torch.float32:
            return super().forward(input)
        product: Tensor = _LastProduct.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return product


class _LastProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_BI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(input_BI, weight_OI)
        return nn.functional.linear(input_BI.float(), weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, gradient_BO: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        input_BI, weight_OI = ctx.saved_tensors
        rounded_BO = gradient_BO.to(input_BI.dtype)
        return (
            rounded_BO @ weight_OI.to(input_BI.dtype),
            (rounded_BO.t() @ input_BI).float(),
            gradient_BO.sum(dim=0),
        )


def rectified_product(input_BI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
    """Return the positive part of a product of two tensors of one type, without gradients.

    Args:
        bias_O: of that type or, on a CPU, float32.
    """
    is_rounded = input_BI.dtype == torch.bfloat16 and input_BI.device.type == "cpu"
    if is_rounded and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        # Bias and rectifier as parts of the product, instead of two more passes over its result.
        found_BO: Tensor = torch.ops.mkldnn._linear_pointwise(
            input_BI, weight_OI, bias_O, "relu", [], ""
        )
        return found_BO
    return nn.functional.linear(input_BI, weight_OI, bias_O.to(input_BI.dtype)).relu_()


def take_products_in(dtype: torch.dtype, network: nn.Module) -> None:
    """Let all layers of a network that can take their products in a type do so."""
    for layer in network.modules():
        if isinstance(layer, Linear):
            layer.products = dtype


class RoundedCopy:
    """A network for acting whose weights were rounded once instead of at each product.

    It computes what the network would after `take_products_in(dtype, network)`.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        self._network = network
        self._twin = copy.deepcopy(network).requires_grad_(False)
        take_products_in(dtype, self._twin)
        for layer in self._twin.modules():
            if isinstance(layer, Linear):
                layer.to(dtype)

    def updated(self) -> nn.Module:
        """Return the copy, with the weights that the network has now."""
        with torch.no_grad():
            for rounded, weight in zip(
                self._twin.parameters(), self._network.parameters(), strict=True
            ):
                rounded.copy_(weight)
        return self._twin
