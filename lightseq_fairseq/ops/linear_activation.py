"""A linear layer with activation and dropout: y = dropout(activation(x weight^T + bias)).

Forward also returns the slope: the derivative of y with respect to z = x weight^T + bias. Then
backward needs neither z nor the dropout bits: it multiplies by the slope, see
`activation_linear_bwd`.

Shapes: T = packed tokens (rows), C = inputs, F = outputs.
Dropout: the row id is the row of x, the column is the index in F.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor
from torch.nn import functional

from .bias_activation_dropout import gelu
from .checks import check_dropout
from .linear import LinearFwd, operand
from .numerics import work_dtype
from .philox import dropout_factors
from .registry import define

_ACTIVATIONS = ("relu", "gelu", "gelu_accurate")


class LinearActivationFwd(NamedTuple):
    """y and slope [T, F] in x's dtype: dropout(activation(z)) and its derivative by z, with
    z = x weight^T + bias.

    x: [T, C]. weight: [F, C]. bias: [F]. All of one dtype. activation: relu, gelu (erf) or
    gelu_accurate (tanh). p, rng, site: dropout, see `philox.keep_mask`.
    slope is EMPTY (numel 0) if need_slope is False, and for relu, since it follows from y there.
    NaN: relu may turn it into 0 on a GPU, see csrc/common/nan.cuh.
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
        x, weight, bias, activation, p, rng, _, _ = self
        LinearFwd(x, weight, bias, relu=False).check(op)
        if activation not in _ACTIVATIONS:
            raise ValueError(f"{op}: activation must be one of {_ACTIVATIONS}, got {activation!r}")
        check_dropout(op, p, rng, x)

    def shape(self) -> tuple[Tensor, Tensor]:
        shape = self.x.shape[0], self.weight.shape[0]
        has_slope = self.need_slope and self.activation != "relu"
        return self.x.new_empty(shape), self.x.new_empty(shape if has_slope else 0)

    def reference(self) -> tuple[Annotated[Tensor, "y"], Annotated[Tensor, "slope"]]:
        x, weight, bias, activation, p, rng, site, need_slope = self
        z = functional.linear(operand(x), operand(weight), operand(bias)).to(work_dtype(x))
        slope = z.new_empty(0)
        if activation == "relu":
            y = z.relu_()
        else:
            y, slope = gelu(z, activation, need_slope)
        if p > 0:
            for part, factor in dropout_factors(rng, site, y.shape, p, y.dtype):
                y[part].mul_(factor)
                if slope.numel():
                    slope[part].mul_(factor)
        return y.to(x.dtype), slope.to(x.dtype)


linear_activation_fwd = define("linear_activation_fwd", LinearActivationFwd)
