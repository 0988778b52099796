"""As bias_activation_dropout, with results in E4M3: the operands of the next products.

Results are computed in float32 and cast from it, without a rounding to x's dtype between.

Shapes: T = packed tokens (rows), P = padded rows, F = ffn width, a multiple of 16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .bias_activation_dropout import BiasActivationDropoutBwd, BiasActivationDropoutFwd
from .checks import check_rows, check_tensor
from .fp8_quantise import (
    CASTABLE,
    E4M3,
    Quantised,
    check_statistics,
    empty_like,
    padded,
    quantise,
)
from .numerics import column_sum, store_gradient
from .registry import Written, define


class Fp8BiasActivationDropoutFwd(NamedTuple):
    """values [T, F] and transpose [F, P] of y = dropout(activation(x + bias)) in E4M3.

    x: [T, F], float16, bfloat16 or float32. bias, activation, p, rng, site: as in
    `bias_activation_dropout_fwd`. scale, amax, saturated: of y, as in `fp8_quantise`.
    Raises ValueError on an unknown activation, a wrong shape, dtype, device or layout, and on a CPU
    on a wrong scale.
    """

    x: Tensor
    bias: Tensor | None
    activation: str
    p: float
    rng: Tensor
    site: int
    scale: Tensor
    amax: Written
    saturated: Written

    def check(self, op: str) -> None:
        check_tensor(op, "x", self.x, ("T", "F"), CASTABLE)
        BiasActivationDropoutFwd(*self[:6]).check(op)
        check_statistics(op, self.x, *self[6:])

    def shape(self) -> Quantised:
        return empty_like(self.x)

    def reference(self) -> Quantised:
        return quantise(BiasActivationDropoutFwd(*self[:6]).compute(), *self[6:])


fp8_bias_activation_dropout_fwd = define(
    "fp8_bias_activation_dropout_fwd", Fp8BiasActivationDropoutFwd
)


class Fp8BiasActivationDropoutBwd(NamedTuple):
    """values [T, F] and transpose [F, P] of dx in E4M3.

    The column sum of dx, before the cast, is written to dbias [F] or, with accumulate, added to it.
    dy: [T, F], x's dtype. scale, amax, saturated: of dx. Other arguments and errors as in forward.
    """

    dy: Tensor
    x: Tensor
    bias: Tensor | None
    activation: str
    p: float
    rng: Tensor
    site: int
    dbias: Written | None
    accumulate: bool
    scale: Tensor
    amax: Written
    saturated: Written

    def check(self, op: str) -> None:
        check_tensor(op, "x", self.x, ("T", "F"), CASTABLE)
        BiasActivationDropoutBwd(*self[:9]).check(op)
        check_statistics(op, self.x, *self[9:])

    def shape(self) -> Quantised:
        return empty_like(self.x)

    def reference(self) -> Quantised:
        return quantise(BiasActivationDropoutBwd(*self[:9]).compute(), *self[9:])


fp8_bias_activation_dropout_bwd = define(
    "fp8_bias_activation_dropout_bwd", Fp8BiasActivationDropoutBwd
)


class Fp8ReluDropoutBwd(NamedTuple):
    """values [T, F] and transpose [F, P] of dz in E4M3; forward was y = dropout(relu(z)).

    dz = dy / (1 - p) where y > 0 or y is NaN, else 0. y is read in E4M3, where a positive number of
    at most 2^-10 scales is 0 too: so dz is 0 there.
    The column sum of dz, before the cast, is written to dbias or, with accumulate, added to it.

    dy: [T, F], float16, bfloat16 or float32. y_transpose: [F, P], E4M3. p: dropout probability.
    dbias: [F] or None. scale, amax, saturated: of dz, as in `fp8_quantise`.
    Raises ValueError on a wrong shape, dtype, device or layout, on p outside [0, 1), and on a CPU
    on a wrong scale.
    """

    dy: Tensor
    y_transpose: Tensor
    p: float
    dbias: Written | None
    accumulate: bool
    scale: Tensor
    amax: Written
    saturated: Written

    def check(self, op: str) -> None:
        dy, y_transpose, p, dbias = self[:4]
        check_tensor(op, "dy", dy, ("T", "F"), CASTABLE)
        check_rows(op, "dy", dy)
        rows, columns = dy.shape
        check_tensor(op, "y_transpose", y_transpose, (columns, padded(rows)), (E4M3,), dy)
        check_rows(op, "y_transpose", y_transpose)
        if not 0 <= p < 1:
            raise ValueError(f"{op}: p must be at least 0 and below 1, got {p}")
        if dbias is not None:
            check_tensor(op, "dbias", dbias, (columns,), CASTABLE, dy)
        check_statistics(op, dy, *self[5:])

    def shape(self) -> Quantised:
        return empty_like(self.dy)

    def reference(self) -> Quantised:
        dy, y_transpose, p, dbias, accumulate = self[:5]
        y = y_transpose[:, : len(dy)].t().float().contiguous()
        dz = torch.ops.aten.threshold_backward(dy.float(), y, 0)
        if p > 0:
            dz.mul_(1 / (1 - p))
        if dbias is not None:
            store_gradient(dbias, column_sum(dz), accumulate)
        return quantise(dz, *self[5:])


fp8_relu_dropout_bwd = define("fp8_relu_dropout_bwd", Fp8ReluDropoutBwd)
