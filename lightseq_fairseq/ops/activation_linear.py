"""Backward of dropout(activation(z)) and the linear layer after it: x = dropout(activation(z)),
y = x weight^T.

dz = (dy weight) * slope / (1 - p);  dweight (+)= dy^T x;  dbias (+)= column sum of dz. dbias is the
gradient of the bias within z. For slope see `linear_activation_fwd`. For relu it is 1 where x > 0,
else 0: dropped elements of x are 0 as well.

Shapes: T = packed tokens (rows), K = inputs, N = outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import FLOATS, check_rows, check_tensor
from .linear import LinearBwd
from .linear_activation import read_slope, slope_dtype
from .numerics import column_sum, store_gradient
from .registry import Written, define


class ActivationLinearBwd(NamedTuple):
    """dz [T, K].

    dy: [T, N]. x: [T, K]. weight: [N, K]. All of one dtype. slope: [T, K] as
    `linear_activation_fwd` returns it, contiguous if it has bytes; or None for relu: then it
    follows from x, and is 1 where x is NaN. p: dropout probability.
    dweight: [N, K] or None, dbias: [K] or None; overwritten or, with accumulate, added to.
    bias: [K], the bias within z, or None. Where bias is NaN, dbias becomes NaN: the kernel of
    forward may have turned that NaN into 0 in x (see `linear.linear_fwd`).
    Raises ValueError on a wrong shape, dtype, device or layout, and on p outside [0, 1).
    """

    dy: Tensor
    x: Tensor
    weight: Tensor
    slope: Tensor | None
    p: float
    dweight: Written | None
    dbias: Written | None
    accumulate: bool
    bias: Tensor | None = None

    def check(self, op: str) -> None:
        dy, x, weight, slope, p, dweight, dbias, _, bias = self
        check_tensor(op, "x", x, ("T", "K"), FLOATS)
        check_tensor(op, "weight", weight, ("N", x.shape[1]), (x.dtype,), x)
        check_tensor(op, "dy", dy, (x.shape[0], weight.shape[0]), (x.dtype,), x)
        for name, operand in (("x", x), ("weight", weight), ("dy", dy)):
            check_rows(op, name, operand)
        self.check_slope(op, slope, x.shape, x.dtype, p, x)
        if dweight is not None:
            check_tensor(op, "dweight", dweight, weight.shape, FLOATS, x)
            check_rows(op, "dweight", dweight)
        if dbias is not None:
            check_tensor(op, "dbias", dbias, x.shape[1:], FLOATS, x)
        if bias is not None:
            check_tensor(op, "bias", bias, x.shape[1:], FLOATS, x)

    @staticmethod
    def check_slope(
        op: str, slope: Tensor | None, shape: Sequence[int], dtype: torch.dtype, p: float,
        like: Tensor,
    ) -> None:  # fmt: skip
        """Raise ValueError on a wrong slope, if x has this shape and dtype, or on a wrong p."""
        if slope is not None:
            check_tensor(op, "slope", slope, shape, (slope_dtype(dtype),), like)
            check_rows(op, "slope", slope)
            if slope.dtype == torch.uint8 and not slope.is_contiguous():
                raise ValueError(
                    f"{op}: slope must be contiguous, its strides are {slope.stride()}"
                )
        if not 0 <= p < 1:
            raise ValueError(f"{op}: p must be in [0, 1), got {p}")

    def shape(self) -> Tensor:
        return self.x.new_empty(self.x.shape)

    def reference(self) -> Tensor:
        dy, x, weight, slope, p, dweight, dbias, accumulate, bias = self
        dz = LinearBwd(dy, x, weight, dweight, None, None, accumulate, need_dx=True).reference()
        self.multiply_by_slope(dz, x, slope, p)
        if dbias is not None:
            store_gradient(dbias, column_sum(dz), accumulate)
            if bias is not None:
                dbias.masked_fill_(bias.isnan(), torch.nan)
        return dz

    @staticmethod
    def multiply_by_slope(dz: Tensor, x: Tensor, slope: Tensor | None, p: float) -> None:
        """Multiply dz [T, K] in place by slope / (1 - p); without slope, it follows from x."""
        if slope is not None:
            dz.mul_(read_slope(slope) / (1 - p))
            return
        torch.ops.aten.threshold_backward(dz, x, 0, grad_input=dz)
        if p > 0:
            dz.mul_(1 / (1 - p))


activation_linear_bwd = define("activation_linear_bwd", ActivationLinearBwd)
