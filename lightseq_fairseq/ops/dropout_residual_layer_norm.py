"""The steps between two sublayers, in one pass: bias, dropout, residual and LayerNorm.

sum = residual + dropout(x + bias)
y   = (sum - mean) * rstd * gamma + beta        (Ba et al. 2016; fairseq: eps 1e-5)

Forward saves sum, mean and rstd; backward generates the dropout bits again:
dresidual = LayerNorm'(dy) + dsum,  dx = dresidual * mask / (1 - p),  dbias = column sum of dx.

Shapes: T = packed tokens (rows), C = model width.
Dropout: the row id is the token's row, the column is the channel.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from .checks import FLOATS, check_dropout, check_rows, check_tensor
from .numerics import column_sum, store_gradient, work_dtype
from .philox import dropout_factors
from .registry import Written, define

Outputs = tuple[
    Annotated[Tensor, "sum"],
    Annotated[Tensor, "y"],
    Annotated[Tensor, "mean"],
    Annotated[Tensor, "rstd"],
]
Gradients = tuple[Annotated[Tensor, "dx"], Annotated[Tensor, "dresidual"]]


class DropoutResidualLayerNormFwd(NamedTuple):
    """(sum [T, C], y [T, C], mean [T], rstd [T]).

    x, residual: [T, C]. bias, gamma, beta: [C]. All of one dtype; bias, residual may be None.
    sum is EMPTY (numel 0) if it equals x (no bias, no residual, p == 0): use x instead.
    gamma and beta None: no LayerNorm; y, mean, rstd are EMPTY.
    mean and rstd are float32 (float64 for float64). p, rng, site: dropout, see `philox.keep_mask`.
    Raises ValueError on a wrong shape, dtype, device or layout.
    """

    x: Tensor
    bias: Tensor | None
    residual: Tensor | None
    gamma: Tensor | None
    beta: Tensor | None
    p: float
    rng: Tensor
    site: int
    eps: float

    def check(self, op: str) -> None:
        x, bias, residual, gamma, beta = self[:5]
        check_tensor(op, "x", x, ("T", "C"), FLOATS)
        check_rows(op, "x", x)
        if residual is not None:
            check_tensor(op, "residual", residual, x.shape, (x.dtype,), x)
            check_rows(op, "residual", residual)
        for name, vector in (("bias", bias), ("gamma", gamma), ("beta", beta)):
            if vector is not None:
                check_tensor(op, name, vector, x.shape[1:], (x.dtype,), x)
        if (gamma is None) != (beta is None):
            raise ValueError(f"{op}: give both gamma and beta, or neither")
        check_dropout(op, self.p, self.rng, x)

    @property
    def _is_x(self) -> bool:
        """Whether sum equals x, so that it is not stored."""
        return self.bias is None and self.residual is None and self.p == 0

    def shape(self) -> Outputs:
        x, rows, dtype = self.x, self.x.shape[0], work_dtype(self.x)
        total = x.new_empty(0) if self._is_x else x.new_empty(x.shape)
        if self.gamma is None:
            nothing = x.new_empty(0, dtype=dtype)
            return total, x.new_empty(0), nothing, nothing.clone()
        statistics = [x.new_empty(rows, dtype=dtype) for _ in range(2)]
        return total, x.new_empty(x.shape), statistics[0], statistics[1]

    def reference(self) -> Outputs:
        total, y, mean, rstd = self.compute()
        return total, y.to(self.x.dtype), mean, rstd

    def compute(self) -> Outputs:
        """The results, with y in the working precision."""
        x, bias, residual, gamma, beta, p, rng, site, eps = self
        dtype = work_dtype(x)
        empty = x.new_empty(0)
        is_x = self._is_x
        total = x.to(dtype, copy=not is_x) if bias is None else torch.add(x.to(dtype), bias)
        if p > 0:
            for part, factor in dropout_factors(rng, site, x.shape, p, dtype):
                total[part].mul_(factor)
        if residual is not None:
            total.add_(residual)
        stored = empty if is_x else total.to(x.dtype)
        if gamma is None or beta is None:
            nothing = x.new_empty(0, dtype=dtype)
            return stored, empty, nothing, nothing.clone()
        y, mean, rstd = torch.native_layer_norm(
            total, gamma.shape, gamma.to(dtype), beta.to(dtype), eps
        )
        return stored, y, mean.view(-1), rstd.view(-1)


dropout_residual_layer_norm_fwd = define(
    "dropout_residual_layer_norm_fwd", DropoutResidualLayerNormFwd
)


class DropoutResidualLayerNormBwd(NamedTuple):
    """(dx [T, C], dresidual [T, C]); with p == 0 dx is EMPTY, since it equals dresidual.

    dy, dsum: [T, C], gradients of forward's y and sum; one of them may be None.
    sum: [T, C], forward's result (x if that is EMPTY); read only with dy. mean, rstd: forward's.
    dgamma, dbeta, dbias: [C] or None; overwritten or, with accumulate, added to.
    Raises ValueError on a wrong shape, dtype, device or layout.
    """

    dy: Tensor | None
    dsum: Tensor | None
    sum: Tensor
    gamma: Tensor | None
    mean: Tensor
    rstd: Tensor
    p: float
    rng: Tensor
    site: int
    dgamma: Written | None
    dbeta: Written | None
    dbias: Written | None
    accumulate: bool

    def check(self, op: str) -> None:
        dy, dsum, sum, gamma, mean, rstd = self[:6]
        grad = dsum if dy is None else dy
        if grad is None:
            raise ValueError(f"{op}: one of dy and dsum must be given")
        check_tensor(op, "dy" if dsum is None else "dsum", grad, ("T", "C"), FLOATS)
        for name, rows in (("dy", dy), ("dsum", dsum)):
            if rows is not None:
                check_tensor(op, name, rows, grad.shape, (grad.dtype,), grad)
                check_rows(op, name, rows)
        if dy is not None:
            if gamma is None:
                raise ValueError(f"{op}: dy needs gamma")
            check_tensor(op, "sum", sum, grad.shape, (grad.dtype,), grad)
            check_rows(op, "sum", sum)
            check_tensor(op, "gamma", gamma, grad.shape[1:], (grad.dtype,), grad)
            check_tensor(op, "mean", mean, grad.shape[:1], (work_dtype(grad),), grad)
            check_tensor(op, "rstd", rstd, grad.shape[:1], (work_dtype(grad),), grad)
        vectors = (("dgamma", self.dgamma), ("dbeta", self.dbeta), ("dbias", self.dbias))
        for name, vector in vectors:
            if vector is not None:
                check_tensor(op, name, vector, grad.shape[1:], FLOATS, grad)
        check_dropout(op, self.p, self.rng, grad)

    @property
    def grad(self) -> Tensor:
        """dy, or dsum if that is None: the results have its shape and dtype."""
        grad = self.dsum if self.dy is None else self.dy
        assert grad is not None
        return grad

    def shape(self) -> Gradients:
        grad = self.grad
        return grad.new_empty(grad.shape if self.p > 0 else 0), grad.new_empty(grad.shape)

    def reference(self) -> Gradients:
        dx, dresidual = self.compute()
        grad = self.grad
        dx = dx.to(grad.dtype) if self.p > 0 else grad.new_empty(0)
        return dx, dresidual.to(grad.dtype)

    def compute(self) -> Gradients:
        """dx, also with p == 0, and dresidual in the working precision; writes the sums."""
        dy, dsum, total, gamma, mean, rstd, p, rng, site, dgamma, dbeta, dbias, accumulate = self
        if dy is not None and gamma is not None:
            dtype = work_dtype(dy)
            weight = gamma.to(dtype)
            dresidual, gamma_grad, beta_grad = torch.ops.aten.native_layer_norm_backward(
                dy.to(dtype),
                total.to(dtype),
                gamma.shape,
                mean.view(-1, 1),
                rstd.view(-1, 1),
                weight,
                weight,
                (True, dgamma is not None, dbeta is not None),
            )
            store_gradient(dgamma, gamma_grad, accumulate)
            store_gradient(dbeta, beta_grad, accumulate)
            if dsum is not None:
                dresidual.add_(dsum)
        else:
            assert dsum is not None
            dresidual = dsum.to(work_dtype(dsum), copy=True)
        dx = dresidual
        if p > 0:
            dx = torch.empty_like(dresidual)
            for part, factor in dropout_factors(rng, site, dx.shape, p, dx.dtype):
                torch.mul(dresidual[part], factor, out=dx[part])
        if dbias is not None:
            store_gradient(dbias, column_sum(dx), accumulate)
        return dx, dresidual


dropout_residual_layer_norm_bwd = define(
    "dropout_residual_layer_norm_bwd", DropoutResidualLayerNormBwd
)
