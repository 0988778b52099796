"""Backward of dropout(activation(z)) and the linear layer after it: x = dropout(activation(z)),
y = x weight^T.

dz = (dy weight) * slope / (1 - p);  dweight (+)= dy^T x;  dbias (+)= column sum of dz. dbias is the
gradient of the bias within z. For slope see `linear_activation_fwd`. For relu it is 1 where x > 0,
else 0: dropped elements of x are 0 as well.

In fp8 (see `linear`), dz is cast to E4M3, since the product before the activation reads it. It is
in float32 until then; on GPUs other than Hopper's, and for a few tokens, dy weight is rounded to
bfloat16 before. The slope of relu follows from x in E4M3, where a positive number of at most 2^-10
scales is 0 too.

Shapes: T = packed tokens (rows), P = padded rows, K = inputs, N = outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import Cast, Operand, Quantised
from .casting import CASTABLE, check_cast, quantise, quantised_like
from .checks import FLOATS, check_contiguous, check_rows, check_tensor
from .linear import (
    LinearBwd,
    check_backward,
    check_dweight,
    empty_product,
    matrix,
    product,
    result_dtype,
)
from .linear_activation import check_kind, read_slope, slope_dtype
from .numerics import column_sum, store_gradient
from .registry import Written, define


class ActivationLinearBwd(NamedTuple):
    """dz [T, K], and an EMPTY transpose.

    With a cast, dz is its values in E4M3, and transpose [K, P] is theirs. dy, x and weight are then
    `Quantised`.

    dy: [T, N]. x: [T, K]. weight: [N, K]. As in `linear_bwd`. slope: [T, K] as
    `linear_activation_fwd` returns it, contiguous if it has bytes; or None for relu: then it
    follows from x, and is 1 where x is NaN. p: dropout probability.
    dweight: [N, K]. dbias: [K].
    bias: [K], the bias within z, or None. Where bias is NaN, dbias becomes NaN: the kernel of
    forward may have turned that NaN into 0 in x (see csrc/linear/nan.cuh). With a cast it is not
    read.
    """

    dy: Operand
    x: Operand
    weight: Operand
    slope: Tensor | None
    p: float
    dweight: Written | None
    dbias: Written | None
    accumulate: bool
    bias: Tensor | None = None
    cast: Cast | None = None

    def check(self, op: str) -> None:
        dy, x, weight, slope, p, dweight, dbias, _, bias, cast = self
        rows, inputs, outputs = check_backward(op, dy, x, weight)
        like = matrix(dy)
        if slope is not None:
            dtype = slope_dtype(result_dtype(x))
            check_rows(op, "slope", slope, (rows, inputs), (dtype,), like)
            if dtype == torch.uint8:
                check_contiguous(op, "slope", slope, (rows, inputs), (dtype,), like)
        if not 0 <= p < 1:
            raise ValueError(f"{op}: p must be in [0, 1), got {p}")
        check_dweight(op, dweight, (outputs, inputs), like)
        if dbias is not None:
            dtypes = FLOATS if cast is None else CASTABLE
            check_tensor(op, "dbias", dbias, (inputs,), dtypes, like)
        if bias is not None:
            check_tensor(op, "bias", bias, (inputs,), FLOATS, like)
        check_kind(op, x, cast)
        check_cast(op, cast, matrix(weight.t()).t())

    def shape(self) -> tuple[Tensor, Tensor]:
        dz = empty_product(self.dy, self.weight.t())
        values, transpose = quantised_like(dz, self.cast)
        return dz if self.cast is None else values, transpose

    def reference(self) -> tuple[Tensor, Tensor]:
        dy, x, weight, slope, p, dweight, dbias, accumulate, bias, cast = self
        LinearBwd(dy, x, weight, dweight, None, None, accumulate, need_dx=False).reference()
        dz = product(dy, weight.t())
        if isinstance(x, Tensor):
            dz = dz.to(x.dtype)
        if slope is not None:
            dz.mul_(read_slope(slope) / (1 - p))
        else:
            if isinstance(x, Quantised):  # their scale does not matter here
                x = matrix(x.t())[:, : len(dz)].t().float().contiguous()
            torch.ops.aten.threshold_backward(dz, x, 0, grad_input=dz)
            if p > 0:
                dz.mul_(1 / (1 - p))
        if dbias is not None:
            store_gradient(dbias, column_sum(dz), accumulate)
            if bias is not None and cast is None:
                dbias.masked_fill_(bias.isnan(), torch.nan)
        values, transpose = quantise(dz, cast)
        return dz if cast is None else values, transpose


activation_linear_bwd = define("activation_linear_bwd", ActivationLinearBwd, "dz transpose")
