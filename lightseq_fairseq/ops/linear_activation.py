"""A linear layer with activation and dropout: y = dropout(activation(x weight^T + bias)).

Forward also returns the slope: the derivative of the activation at z = x weight^T + bias, or 0
where y is dropped. Then backward needs neither z nor the dropout bits: it multiplies by the slope
and by 1 / (1 - p), see `activation_linear_bwd`.

The slope of gelu lies between -0.13 and 1.13. For bfloat16, a byte stores it as the code
round(200 slope) + 28, so that 0 and 1 are exact and the error is at most 1/400; bfloat16 would have
up to 1/256. Other dtypes store the slope as it is.

Shapes: T = packed tokens (rows), C = inputs, F = outputs.
Dropout: the row id is the row of x, the column is the index in F.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .arguments import Dropout
from .bias_activation_dropout import gelu
from .checks import check_dropout
from .linear import LinearFwd, operand
from .numerics import work_dtype
from .philox import dropout_factors
from .registry import define

_ACTIVATIONS = ("relu", "gelu", "gelu_accurate")
_STEPS, _ZERO, _NAN = 200, 28, 255


def slope_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the slope if x has this one."""
    return torch.uint8 if dtype == torch.bfloat16 else dtype


def store_slope(slope: Tensor, dtype: torch.dtype) -> Tensor:
    """The slope as forward returns it if x has this dtype. NaN has the code 255."""
    if slope_dtype(dtype) == dtype:
        return slope.to(dtype)
    codes = (slope * _STEPS).round_().add_(_ZERO)
    return codes.nan_to_num_(nan=_NAN).to(torch.uint8)


def read_slope(stored: Tensor) -> Tensor:
    """The numbers of a slope that forward has returned."""
    if stored.dtype != torch.uint8:
        return stored
    return (stored.to(torch.float32) - _ZERO) / _STEPS


def activate(
    z: Tensor, activation: str, dropout: Dropout, need_slope: bool
) -> tuple[Tensor, Tensor]:
    """dropout(activation(z)) and the slope, which is EMPTY for relu, or unless need_slope. z [T, F]
    is overwritten."""
    slope = z.new_empty(0)
    if activation == "relu":
        y = z.relu_()
    else:
        y, slope = gelu(z, activation, need_slope)
    if dropout.p > 0:
        for part, factor in dropout_factors(dropout, y.shape, y.dtype):
            y[part].mul_(factor)
            if slope.numel():
                slope[part].mul_(factor > 0)
    return y, slope


class LinearActivationFwd(NamedTuple):
    """y [T, F] in x's dtype: dropout(activation(z)), with z = x weight^T + bias; and the slope
    [T, F] in `slope_dtype`.

    x: [T, C]. weight: [F, C]. bias: [F]. All of one dtype. activation: relu, gelu (erf) or
    gelu_accurate (tanh). p, rng, site: dropout, see `philox.keep_mask`.
    slope is EMPTY (numel 0) if need_slope is False, and for relu, since it follows from y there.
    NaN: relu may turn it into 0 on a GPU, see csrc/linear/nan.cuh. A NaN in z is in y, even where y
    is dropped.
    Raises ValueError on an unknown activation, a wrong shape, dtype, device or layout.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor
    activation: str
    p: float
    rng: Tensor
    site: int
    need_slope: bool

    def check(self, op: str) -> None:
        x, weight, bias, activation, p, rng, site, _ = self
        LinearFwd(x, weight, bias, relu=False).check(op)
        self.check_activation(op, activation, Dropout(p, rng, site), x)

    @staticmethod
    def check_activation(op: str, activation: str, dropout: Dropout, like: Tensor) -> None:
        if activation not in _ACTIVATIONS:
            raise ValueError(f"{op}: activation must be one of {_ACTIVATIONS}, got {activation!r}")
        check_dropout(op, dropout, like)

    def shape(self) -> tuple[Tensor, Tensor]:
        shape = self.x.shape[0], self.weight.shape[0]
        has_slope = self.need_slope and self.activation != "relu"
        slope = self.x.new_empty(shape if has_slope else 0, dtype=slope_dtype(self.x.dtype))
        return self.x.new_empty(shape), slope

    def reference(self) -> tuple[Annotated[Tensor, "y"], Annotated[Tensor, "slope"]]:
        x, weight, bias, activation, p, rng, site, need_slope = self
        z = functional.linear(operand(x), operand(weight), operand(bias)).to(work_dtype(x))
        y, slope = activate(z, activation, Dropout(p, rng, site), need_slope)
        return y.to(x.dtype), store_slope(slope, x.dtype)


linear_activation_fwd = define("linear_activation_fwd", LinearActivationFwd)
