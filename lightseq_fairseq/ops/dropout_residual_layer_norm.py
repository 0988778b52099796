"""The steps between two sublayers, in one pass: bias, dropout, residual and LayerNorm.

sum = residual + dropout(x + bias)
y   = (sum - mean) * rstd * gamma + beta        (Ba et al. 2016; fairseq: eps 1e-5)

Forward saves sum, mean and rstd; backward generates the dropout bits again:
dresidual = LayerNorm'(dy) + dsum,  dx = dresidual * mask / (1 - p),  dbias = column sum of dx.

A cast of y or dx, for the product that reads it, is one of float32 numbers, without a rounding to
bfloat16 between.

Shapes: T = packed tokens (rows), C = model width, P = padded rows.
Dropout: the row id is the token's row, the column is the channel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import Cast, Dropout
from .casting import check_cast, dtypes_for, quantise, quantised_like
from .checks import FLOATS, check_dropout, check_rows, check_tensor, check_vectors
from .numerics import column_sum, layer_norm_backward, store_gradient, work_dtype
from .philox import drop, dropped
from .registry import Written, define

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class DropoutResidualLayerNormFwd(NamedTuple):
    """(sum [T, C], y [T, C], mean [T], rstd [T], values [T, C], transpose [C, P]).

    x, residual: [T, C]. bias, gamma, beta: [C]. All of one dtype; bias, residual and beta may be
        None.
    sum is EMPTY if it equals x (no bias, no residual, p == 0): use x instead.
    gamma None: no LayerNorm; y, mean, rstd are EMPTY.
    cast: of y; x is then bfloat16, and gamma is given. values and transpose are y in
    E4M3. keep_y: False only with a cast; then y is EMPTY.
    """

    x: Tensor
    bias: Tensor | None
    residual: Tensor | None
    gamma: Tensor | None
    beta: Tensor | None
    dropout: Dropout
    eps: float
    keep_y: bool = True
    cast: Cast | None = None

    def check(self, op: str) -> None:
        x, bias, residual, gamma, beta = self[:5]
        check_rows(op, "x", x, ("T", "C"), dtypes_for(self.cast))
        if residual is not None:
            check_rows(op, "residual", residual, x.shape, (x.dtype,), x)
        check_vectors(op, x, (x.dtype,), bias=bias, gamma=gamma, beta=beta)
        if gamma is None and beta is not None:
            raise ValueError(f"{op}: beta needs gamma")
        if gamma is None and self.cast is not None:
            raise ValueError(f"{op}: a cast needs gamma")
        if self.cast is None and not self.keep_y:
            raise ValueError(f"{op}: without a cast, keep_y must be True")
        check_dropout(op, self.dropout, x)
        check_cast(op, self.cast, x)

    @property
    def _is_x(self) -> bool:
        """Whether sum equals x, so that it is not stored."""
        return self.bias is None and self.residual is None and self.dropout.p == 0

    def shape(self) -> Outputs:
        x, rows, dtype = self.x, self.x.shape[0], work_dtype(self.x)
        total = x.new_empty(0) if self._is_x else x.new_empty(x.shape)
        operand = quantised_like(x, self.cast)
        if self.gamma is None:
            nothing = x.new_empty(0, dtype=dtype)
            return total, x.new_empty(0), nothing, nothing.clone(), *operand
        mean, rstd = (x.new_empty(rows, dtype=dtype) for _ in range(2))
        return total, x.new_empty(x.shape if self.keep_y else 0), mean, rstd, *operand

    def reference(self) -> Outputs:
        x, bias, residual, gamma, beta, dropout, eps, keep_y, cast = self
        dtype = work_dtype(x)
        is_x = self._is_x
        total = x.to(dtype, copy=not is_x) if bias is None else torch.add(x.to(dtype), bias)
        drop(total, dropout)
        if residual is not None:
            total.add_(residual)
        stored = x.new_empty(0) if is_x else total.to(x.dtype)
        if gamma is None:
            nothing = x.new_empty(0, dtype=dtype)
            return stored, x.new_empty(0), nothing, nothing.clone(), *quantise(total, None)
        y, mean, rstd = torch.native_layer_norm(
            total, gamma.shape, gamma.to(dtype), None if beta is None else beta.to(dtype), eps
        )
        kept = y.to(x.dtype) if keep_y else x.new_empty(0)
        return stored, kept, mean.view(-1), rstd.view(-1), *quantise(y, cast)


dropout_residual_layer_norm_fwd = define(
    "dropout_residual_layer_norm_fwd",
    DropoutResidualLayerNormFwd,
    "sum y mean rstd values transpose",
)


class DropoutResidualLayerNormBwd(NamedTuple):
    """(dx [T, C], dresidual [T, C], transpose [C, P]).

    With p == 0 dx is EMPTY, since it equals dresidual.

    dy, dsum: [T, C], gradients of forward's y and sum; one of them may be None.
    sum: [T, C], forward's result (x if that is EMPTY); read only with dy. mean, rstd: forward's.
    dgamma, dbeta, dbias: [C].
    cast: of dx, also with p == 0; gradients are then bfloat16. dx is its values in E4M3, and
    transpose is theirs; dbias is summed before the cast.
    """

    dy: Tensor | None
    dsum: Tensor | None
    sum: Tensor
    gamma: Tensor | None
    mean: Tensor
    rstd: Tensor
    dropout: Dropout
    dgamma: Written | None
    dbeta: Written | None
    dbias: Written | None
    accumulate: bool
    cast: Cast | None = None

    def check(self, op: str) -> None:
        dy, dsum, sum, gamma, mean, rstd = self[:6]
        grad = dsum if dy is None else dy
        if grad is None:
            raise ValueError(f"{op}: one of dy and dsum must be given")
        name = "dsum" if dy is None else "dy"
        check_tensor(op, name, grad, ("T", "C"), dtypes_for(self.cast))
        for name, rows in (("dy", dy), ("dsum", dsum)):
            if rows is not None:
                check_rows(op, name, rows, grad.shape, (grad.dtype,), grad)
        if dy is not None:
            if gamma is None:
                raise ValueError(f"{op}: dy needs gamma")
            check_rows(op, "sum", sum, grad.shape, (grad.dtype,), grad)
            check_tensor(op, "gamma", gamma, grad.shape[1:], (grad.dtype,), grad)
            check_tensor(op, "mean", mean, grad.shape[:1], (work_dtype(grad),), grad)
            check_tensor(op, "rstd", rstd, grad.shape[:1], (work_dtype(grad),), grad)
        check_vectors(op, grad, FLOATS, dgamma=self.dgamma, dbeta=self.dbeta, dbias=self.dbias)
        check_dropout(op, self.dropout, grad)
        check_cast(op, self.cast, grad)

    @property
    def grad(self) -> Tensor:
        """dy, or dsum if that is None: the results have its shape and dtype."""
        grad = self.dsum if self.dy is None else self.dy
        assert grad is not None
        return grad

    def shape(self) -> tuple[Tensor, Tensor, Tensor]:
        grad = self.grad
        values, transpose = quantised_like(grad, self.cast)
        has_dx = self.dropout.p > 0
        dx = grad.new_empty(grad.shape if has_dx else 0) if self.cast is None else values
        return dx, grad.new_empty(grad.shape), transpose

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        dy, dsum, total, gamma, mean, rstd, dropout, dgamma, dbeta, dbias, accumulate, cast = self
        if dy is not None and gamma is not None:
            dresidual = layer_norm_backward(dy, total, gamma, mean, rstd, dgamma, dbeta, accumulate)
            if dsum is not None:
                dresidual.add_(dsum)
        else:
            assert dsum is not None
            dresidual = dsum.to(work_dtype(dsum), copy=True)
        has_dx = dropout.p > 0
        dx = dropped(dresidual, dropout) if has_dx else dresidual
        if dbias is not None:
            store_gradient(dbias, column_sum(dx), accumulate)
        dtype = self.grad.dtype
        values, transpose = quantise(dx, cast)
        if cast is None:
            values = dx.to(dtype) if has_dx else dx.new_empty(0, dtype=dtype)
        return values, dresidual.to(dtype), transpose


dropout_residual_layer_norm_bwd = define(
    "dropout_residual_layer_norm_bwd", DropoutResidualLayerNormBwd, "dx dresidual transpose"
)
