"""Matrix products with a weight: y = x weight^T + bias, or relu of that.

Backward: dx (+)= dy weight,  dweight (+)= dy^T x,  dbias (+)= column sum of dy. The products write
into the caller's buffers themselves, also where they accumulate.

T packed tokens (rows), K inputs, N outputs.
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
        product_bias = None if bias is None else _operand(bias)
        y = functional.linear(_operand(x), _operand(weight), product_bias)
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
        grad = _operand(dy)
        if dbias is not None:
            store_gradient(dbias, column_sum(grad), accumulate)
        if dweight is not None:
            columns, rows = grad.t(), _operand(x)
            if dweight.dtype != grad.dtype:
                store_gradient(dweight, columns @ rows, accumulate)
            elif accumulate:
                dweight.addmm_(columns, rows)
            else:
                torch.mm(columns, rows, out=dweight)
        if onto is not None:
            onto.copy_(torch.addmm(_operand(onto), grad, _operand(weight)))
        return (grad @ _operand(weight)).to(x.dtype) if need_dx else x.new_empty(0)


_FWD = define("linear_fwd", LinearFwd)
_BWD = define("linear_bwd", LinearBwd)


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool = False) -> Tensor:
    """y [T, N] = x weight^T + bias, with relu its positive part.

    x: [T, K]. weight: [N, K]. bias: [N] or None. One dtype.
    relu: a NaN may become 0 on a GPU, see csrc/common/nan.cuh. Its derivative is 1 where y > 0,
    else 0.
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

    dy: [T, N]. x, weight: forward's. dweight: [N, K], dbias: [N], either or both None; overwritten,
    or added to with accumulate. onto: [T, K], another gradient of x: dx is added to it, by the
    product itself, and not returned (need_dx must be False).
    Raises ValueError on a wrong shape, dtype, device or layout.
    """
    return _BWD(dy, x, weight, dweight, dbias, onto, accumulate, need_dx)


def _operand(x: Tensor) -> Tensor:
    """A CPU multiplies 16-bit numbers in float32; a GPU's product accumulates in it by itself."""
    return x if x.is_cuda else x.to(work_dtype(x))


def _check(op: str, x: Tensor, weight: Tensor) -> None:
    check_tensor(op, "x", x, ("T", "K"), FLOATS)
    check_rows(op, "x", x)
    check_tensor(op, "weight", weight, ("N", x.shape[1]), (x.dtype,), x)
    check_rows(op, "weight", weight)
