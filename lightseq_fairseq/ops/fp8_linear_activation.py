"""As linear_activation and activation_linear, with operands and results in E4M3.

Forward: y = dropout(activation(z)) with z = x weight^T + bias; the next product reads y. Backward:
dz = (dy weight) * slope / (1 - p), with the weight of that next product; the gradient of its weight
is `fp8_linear_bwd`'s. Sums and results are in float32 until they are cast; on GPUs other than
Hopper's, and for a few tokens, z and dy weight are rounded to bfloat16 between.

The slope of gelu is stored in a byte, see `linear_activation`. That of relu follows from y: it is 1
where y > 0 or y is NaN, else 0. y is read in E4M3, where a positive number of at most 2^-10 scales
is 0 too.

Shapes: T = packed tokens (rows), P = padded rows, C = inputs, F = feed-forward width, N = outputs
of the next product; all widths are multiples of 16.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from .activation_linear import ActivationLinearBwd
from .arguments import Cast, Dropout
from .casting import CASTABLE, check_cast, padded, quantise
from .checks import check_tensor
from .fp8_linear import Fp8LinearFwd, check_operand, product
from .fp8_quantise import Quantised
from .linear_activation import LinearActivationFwd, activate, store_slope
from .numerics import column_sum, store_gradient
from .registry import Written, define


class Fp8LinearActivationFwd(NamedTuple):
    """values [T, F] and transpose [F, P] of y in E4M3; and slope: uint8 [T, F], EMPTY (numel 0) for
    relu, or if need_slope is False.

    x, x_scale, weight, weight_scale: as in `fp8_linear_fwd`. bias: bfloat16 [F]. activation, p,
    rng, site: as in `linear_activation_fwd`. scale, amax, saturated: of y, see `fp8_quantise`.
    Raises ValueError on an unknown activation, a wrong shape, dtype, device or layout, and on a CPU
    on a wrong scale.
    """

    x: Tensor
    x_scale: Tensor
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor
    activation: str
    p: float
    rng: Tensor
    site: int
    need_slope: bool
    scale: Tensor
    amax: Written
    saturated: Written

    def check(self, op: str) -> None:
        Fp8LinearFwd(*self[:5]).check(op)
        LinearActivationFwd.check_activation(op, self.activation, Dropout(*self[6:9]), self.x)
        check_cast(op, Cast(*self[10:]), self.weight.t())

    def shape(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns = self.x.shape[0], self.weight.shape[0]
        has_slope = self.need_slope and self.activation != "relu"
        return (
            self.x.new_empty((rows, columns)),
            self.x.new_empty((columns, padded(rows))),
            self.x.new_empty((rows, columns) if has_slope else 0, dtype=torch.uint8),
        )

    def reference(
        self,
    ) -> tuple[
        Annotated[Tensor, "values"], Annotated[Tensor, "transpose"], Annotated[Tensor, "slope"]
    ]:
        bias, activation, p, rng, site, need_slope = self[4:10]
        z = product(*self[:4]).add_(bias)
        y, slope = activate(z, activation, Dropout(p, rng, site), need_slope)
        return *quantise(y, Cast(*self[10:])), store_slope(slope, torch.bfloat16)


fp8_linear_activation_fwd = define("fp8_linear_activation_fwd", Fp8LinearActivationFwd)


class Fp8ActivationLinearBwd(NamedTuple):
    """values [T, F] and transpose [F, P] of dz in E4M3.

    dy: [T, N], weight_transpose: [F, N], y_transpose: [F, P], all E4M3. dy_scale, weight_scale: as
    in `fp8_linear_fwd`. slope: uint8 [T, F], contiguous, or None for relu. p: dropout probability.
    dbias: [F] or None: the column sum of dz before the cast is written to it or, with accumulate,
    added to it. scale, amax, saturated: of dz, see `fp8_quantise`.
    Raises ValueError on a wrong shape, dtype, device or layout, on p outside [0, 1), and on a CPU
    on a wrong scale.
    """

    dy: Tensor
    dy_scale: Tensor
    weight_transpose: Tensor
    weight_scale: Tensor
    y_transpose: Tensor
    slope: Tensor | None
    p: float
    dbias: Written | None
    accumulate: bool
    scale: Tensor
    amax: Written
    saturated: Written

    def check(self, op: str) -> None:
        dy, dy_scale, weight_transpose, weight_scale, y_transpose, slope, p, dbias = self[:8]
        Fp8LinearFwd(dy, dy_scale, weight_transpose, weight_scale, None).check(op)
        rows, columns = dy.shape[0], weight_transpose.shape[0]
        check_operand(op, "y_transpose", y_transpose, (columns, padded(rows)), dy)
        ActivationLinearBwd.check_slope(op, slope, (rows, columns), torch.bfloat16, p, dy)
        if dbias is not None:
            check_tensor(op, "dbias", dbias, (columns,), CASTABLE, dy)
        check_cast(op, Cast(*self[9:]), weight_transpose.t())

    def shape(self) -> Quantised:
        rows, columns = self.dy.shape[0], self.weight_transpose.shape[0]
        return self.dy.new_empty((rows, columns)), self.dy.new_empty((columns, padded(rows)))

    def reference(self) -> Quantised:
        y_transpose, slope, p, dbias, accumulate = self[4:9]
        dz = product(*self[:4])
        y = y_transpose[:, : len(dz)].t().float().contiguous()
        ActivationLinearBwd.multiply_by_slope(dz, y, slope, p)
        if dbias is not None:
            store_gradient(dbias, column_sum(dz), accumulate)
        return quantise(dz, Cast(*self[9:]))


fp8_activation_linear_bwd = define("fp8_activation_linear_bwd", Fp8ActivationLinearBwd)
