"""As dropout_residual_layer_norm, with operands of the products before and after it in E4M3.

They are computed in float32 and cast from it, without a rounding to bfloat16 between.

Shapes: T = packed tokens (rows), P = padded rows, C = model width, a multiple of 16.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from .checks import check_tensor
from .dropout_residual_layer_norm import DropoutResidualLayerNormBwd, DropoutResidualLayerNormFwd
from .fp8_quantise import check_statistics, empty_like, quantise
from .registry import Written, define

Outputs = tuple[
    Annotated[Tensor, "sum"],
    Annotated[Tensor, "y"],
    Annotated[Tensor, "mean"],
    Annotated[Tensor, "rstd"],
    Annotated[Tensor, "values"],
    Annotated[Tensor, "transpose"],
]
Gradients = tuple[
    Annotated[Tensor, "values"], Annotated[Tensor, "transpose"], Annotated[Tensor, "dresidual"]
]


class Fp8DropoutResidualLayerNormFwd(NamedTuple):
    """(sum, y, mean, rstd, values, transpose): values [T, C] and transpose [C, P] are y in E4M3.

    x: [T, C], bfloat16. Other arguments up to eps and the first four results: as in
    `dropout_residual_layer_norm_fwd`; without keep_y, y is EMPTY (numel 0).
    scale, amax, saturated: of y, as in `fp8_quantise`.
    Raises ValueError on a wrong shape, dtype, device or layout, and on a CPU on a wrong scale.
    """

    x: Tensor
    bias: Tensor | None
    residual: Tensor | None
    gamma: Tensor
    beta: Tensor
    p: float
    rng: Tensor
    site: int
    eps: float
    keep_y: bool
    scale: Tensor
    amax: Written
    saturated: Written

    def check(self, op: str) -> None:
        check_tensor(op, "x", self.x, ("T", "C"), (torch.bfloat16,))
        DropoutResidualLayerNormFwd(*self[:9]).check(op)
        check_statistics(op, self.x, *self[10:])

    def shape(self) -> Outputs:
        total, y, mean, rstd = DropoutResidualLayerNormFwd(*self[:9]).shape()
        kept = y if self.keep_y else y.new_empty(0)
        return total, kept, mean, rstd, *empty_like(self.x)

    def reference(self) -> Outputs:
        x = self.x
        total, y, mean, rstd = DropoutResidualLayerNormFwd(*self[:9]).compute()
        kept = y.to(x.dtype) if self.keep_y else x.new_empty(0)
        return total, kept, mean, rstd, *quantise(y, *self[10:])


fp8_dropout_residual_layer_norm_fwd = define(
    "fp8_dropout_residual_layer_norm_fwd", Fp8DropoutResidualLayerNormFwd
)


class Fp8DropoutResidualLayerNormBwd(NamedTuple):
    """(values, transpose, dresidual): values [T, C] and transpose [C, P] are dx in E4M3.

    With p == 0 they are dresidual in E4M3.

    dy, dsum: bfloat16. Other arguments up to accumulate: as in `dropout_residual_layer_norm_bwd`;
    dbias is summed before the cast. scale, amax, saturated: of dx, as in `fp8_quantise`.
    Raises ValueError on a wrong shape, dtype, device or layout, and on a CPU on a wrong scale.
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
    scale: Tensor
    amax: Written
    saturated: Written

    def check(self, op: str) -> None:
        self._plain.check(op)
        grad = self._plain.grad
        name = "dsum" if self.dy is None else "dy"
        check_tensor(op, name, grad, ("T", "C"), (torch.bfloat16,))
        check_statistics(op, grad, *self[13:])

    @property
    def _plain(self) -> DropoutResidualLayerNormBwd:
        return DropoutResidualLayerNormBwd(*self[:13])

    def shape(self) -> Gradients:
        grad = self._plain.grad
        return *empty_like(grad), grad.new_empty(grad.shape)

    def reference(self) -> Gradients:
        dx, dresidual = self._plain.compute()
        stored = dresidual.to(self._plain.grad.dtype)  # first: the cast may overwrite dx
        return *quantise(dx, *self[13:]), stored


fp8_dropout_residual_layer_norm_bwd = define(
    "fp8_dropout_residual_layer_norm_bwd", Fp8DropoutResidualLayerNormBwd
)
