"""A linear layer with activation and dropout: y = dropout(activation(x weight^T + bias)).

Forward also returns the slope: the derivative of the activation at z = x weight^T + bias, or 0
where y is dropped. Then backward needs neither z nor the dropout bits: it multiplies by the slope
and by 1 / (1 - p), see `activation_linear_bwd`.

The slope of gelu and silu lies between -0.13 and 1.13. For bfloat16, a byte stores it as the code
round(200 slope) + 28, so that 0 and 1 are exact and the error is at most 1/400; bfloat16 would have
up to 1/256. Other dtypes store the slope as it is.

In fp8 (see `linear`), y is cast to E4M3, since the next product reads it. z and y are in float32
until then; on GPUs other than Hopper's, and for a few tokens, z is rounded to bfloat16 before.

Shapes: T = packed tokens (rows), P = padded rows, C = inputs, F = outputs.
Dropout: the row id is the row of x, the column is the index in F.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import Cast, Dropout, Operand, Quantised
from .bias_activation_dropout import ACTIVATIONS, activate
from .casting import check_cast, quantise, quantised_like
from .checks import check_dropout
from .linear import LinearFwd, empty_product, matrix, product, result_dtype
from .numerics import work_dtype
from .philox import dropout_factors
from .registry import define

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


class LinearActivationFwd(NamedTuple):
    """(y [T, F] in x's dtype, an EMPTY transpose, the slope [T, F] in `slope_dtype`).

    y = dropout(activation(z)), with z = x weight^T + bias.

    With a cast, y is its values in E4M3, and transpose [F, P] is theirs. x and weight are then
    `Quantised`, and the slope is that of bfloat16.

    x, weight: as in `linear_fwd`. bias: [F]. activation: relu, gelu (erf), gelu_accurate
    (tanh) or silu.
    slope is EMPTY if need_slope is False, and for relu, since it follows from y there.
    NaN: relu may turn it into 0 on a GPU without a cast, see csrc/linear/nan.cuh. A NaN in z is in
    y, even where y is dropped.
    """

    x: Operand
    weight: Operand
    bias: Tensor
    activation: str
    dropout: Dropout
    need_slope: bool
    cast: Cast | None = None

    def check(self, op: str) -> None:
        x, weight, bias, activation, dropout, _, cast = self
        LinearFwd(x, weight, bias).check(op)
        if activation not in ACTIVATIONS:
            raise ValueError(f"{op}: activation must be one of {ACTIVATIONS}, got {activation!r}")
        check_dropout(op, dropout, bias)
        check_kind(op, x, cast)
        check_cast(op, cast, matrix(weight).t())

    def shape(self) -> tuple[Tensor, Tensor, Tensor]:
        y = empty_product(self.x, self.weight)
        has_slope = self.need_slope and self.activation != "relu"
        slope = y.new_empty(y.shape if has_slope else 0, dtype=slope_dtype(y.dtype))
        values, transpose = quantised_like(y, self.cast)
        return y if self.cast is None else values, transpose, slope

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, bias, activation, dropout, need_slope, cast = self
        dtype = result_dtype(x)
        z = product(x, weight, bias).to(work_dtype(bias))
        slope = z.new_empty(0)
        if activation == "relu":
            y = z.relu_()
        else:
            y, slope = activate(z, activation, need_slope)
        if dropout.p > 0:
            for part, factor in dropout_factors(dropout, y.shape, y.dtype):
                y[part].mul_(factor)
                if slope.numel():
                    slope[part].mul_(factor > 0)
        values, transpose = quantise(y, cast)
        return y.to(dtype) if cast is None else values, transpose, store_slope(slope, dtype)


linear_activation_fwd = define("linear_activation_fwd", LinearActivationFwd, "y transpose slope")


def check_kind(op: str, x: Operand, cast: Cast | None) -> None:
    """Raise ValueError unless there is a cast exactly if x is Quantised."""
    if isinstance(x, Quantised) != (cast is not None):
        raise ValueError(f"{op}: the result is cast exactly if operands are Quantised")
