"""Linear layer: y = x weight^T + bias, optionally with relu.

Backward: dx (+)= dy weight,  dweight (+)= dy^T x,  dbias (+)= column sum of dy. The GEMMs write
into the caller's buffers directly, also when they accumulate.

Shapes: T = packed tokens (rows), K = inputs, N = outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .checks import FLOATS, check_rows, check_tensor
from .numerics import column_sum, store_gradient, work_dtype
from .registry import Written, define


class LinearFwd(NamedTuple):
    """Arguments of lightseq::linear_fwd; see `linear_fwd`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    relu: bool

    def check(self, op: str) -> None:
        x, weight, bias, _ = self
        _check(op, x, weight)
        if bias is not None:
            check_tensor(op, "bias", bias, weight.shape[:1], (x.dtype,), x)

    def shape(self) -> Tensor:
        return self.x.new_empty((self.x.shape[0], self.weight.shape[0]))

    def reference(self) -> Tensor:
        x, weight, bias, relu = self
        product_bias = None if bias is None else operand(bias)
        y = functional.linear(operand(x), operand(weight), product_bias)
        return (y.relu_() if relu else y).to(x.dtype)


class LinearBwd(NamedTuple):
    """Arguments of lightseq::linear_bwd; see `linear_bwd`."""

    dy: Tensor
    x: Tensor
    weight: Tensor
    dweight: Written | None
    dbias: Written | None
    onto: Written | None
    accumulate: bool
    need_dx: bool

    def check(self, op: str) -> None:
        dy, x, weight, dweight, dbias, onto, _, need_dx = self
        _check(op, x, weight)
        check_tensor(op, "dy", dy, (x.shape[0], weight.shape[0]), (x.dtype,), x)
        check_rows(op, "dy", dy)
        if dweight is not None:
            check_tensor(op, "dweight", dweight, weight.shape, FLOATS, x)
            check_rows(op, "dweight", dweight)
        if dbias is not None:
            check_tensor(op, "dbias", dbias, weight.shape[:1], FLOATS, x)
        if onto is not None:
            check_tensor(op, "onto", onto, x.shape, (x.dtype,), x)
            check_rows(op, "onto", onto)
            if need_dx:
                raise ValueError(f"{op}: dx is either returned or added to onto, not both")

    def shape(self) -> Tensor:
        return self.x.new_empty(self.x.shape if self.need_dx else 0)

    def reference(self) -> Tensor:
        dy, x, weight, dweight, dbias, onto, accumulate, need_dx = self
        grad = operand(dy)
        if dbias is not None:
            store_gradient(dbias, column_sum(grad), accumulate)
        if dweight is not None:
            columns, rows = grad.t(), operand(x)
            if dweight.dtype != grad.dtype:
                store_gradient(dweight, columns @ rows, accumulate)
            elif accumulate:
                dweight.addmm_(columns, rows)
            else:
                torch.mm(columns, rows, out=dweight)
        if onto is not None:
            onto.copy_(torch.addmm(operand(onto), grad, operand(weight)))
        return (grad @ operand(weight)).to(x.dtype) if need_dx else x.new_empty(0)


_FWD = define("linear_fwd", LinearFwd)
_BWD = define("linear_bwd", LinearBwd)


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool = False) -> Tensor:
    """y [T, N] = x weight^T + bias, or relu of that.

    x: [T, K]. weight: [N, K]. bias: [N] or None. All of one dtype.
    relu: its derivative is 1 where y > 0, else 0. A NaN may become 0 on a GPU, see
    csrc/linear/nan.cuh.
    Raises ValueError on a wrong shape, dtype, device or layout.
    """
    return _FWD(x, weight, bias, relu)


def linear_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
    accumulate: bool,
    need_dx: bool,
    onto: Tensor | None = None,
) -> Tensor:
    """dx [T, K], EMPTY (numel 0) unless need_dx.

    dy: [T, N]. x, weight: as in forward. dweight: [N, K] or None, dbias: [N] or None; overwritten
    or, with accumulate, added to. onto: [T, K], another gradient of x: the GEMM adds dx to it in
    place, and dx is not returned (need_dx must be False).
    Raises ValueError on a wrong shape, dtype, device or layout.
    """
    return _BWD(dy, x, weight, dweight, dbias, onto, accumulate, need_dx)


def operand(x: Tensor) -> Tensor:
    """x in the GEMM's dtype: 16-bit x becomes float32 on a CPU; GPU GEMMs accumulate in float32."""
    return x if x.is_cuda else x.to(work_dtype(x))


def _check(op: str, x: Tensor, weight: Tensor) -> None:
    check_tensor(op, "x", x, ("T", "K"), FLOATS)
    check_rows(op, "x", x)
    check_tensor(op, "weight", weight, ("N", x.shape[1]), (x.dtype,), x)
    check_rows(op, "weight", weight)
