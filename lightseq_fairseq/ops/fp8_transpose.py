"""The transpose in E4M3 of a tensor, or of its LayerNorm, for a product in backward.

Forward casts an input x of a product to E4M3 (`fp8_quantise`); backward multiplies the transpose of
it. If backward has x, or what x was computed from, the transpose is made only there. So it occupies
no memory between.

Shapes: T = rows, C = columns, a multiple of 16, P = padded rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_rows, check_tensor
from .fp8_quantise import check_scale, check_width, empty_like, quantise
from .registry import define


class Fp8Transpose(NamedTuple):
    """transpose [C, P]: x^T or, with gamma, LayerNorm(x)^T, in E4M3 as `fp8_quantise` casts it.

    x: [T, C], bfloat16. scale: as in `fp8_quantise`. mean, rstd: float32 [T], gamma, beta: bfloat16
    [C], as in `dropout_residual_layer_norm_fwd`: y = (x - mean) * rstd * gamma + beta, in float32.
    All four or none. Statistics are not noted, as the cast in forward has noted them. y is that of
    forward but for roundings: forward computes it from the sum before it is rounded to bfloat16.
    Raises ValueError on a wrong shape, dtype, device or layout, and on a CPU on a wrong scale.
    """

    x: Tensor
    scale: Tensor
    mean: Tensor | None = None
    rstd: Tensor | None = None
    gamma: Tensor | None = None
    beta: Tensor | None = None

    def check(self, op: str) -> None:
        x, scale, *norm = self
        check_tensor(op, "x", x, ("T", "C"), (torch.bfloat16,))
        check_rows(op, "x", x)
        check_width(op, x)
        check_scale(op, "scale", scale, x)
        if len({tensor is None for tensor in norm}) > 1:
            raise ValueError(f"{op}: give all of mean, rstd, gamma and beta, or none")
        rows, columns = x.shape
        for name, tensor, size, dtype in zip(
            ("mean", "rstd", "gamma", "beta"),
            norm,
            (rows, rows, columns, columns),
            (torch.float32, torch.float32, x.dtype, x.dtype),
            strict=True,
        ):
            if tensor is not None:
                check_tensor(op, name, tensor, (size,), (dtype,), x)

    def shape(self) -> Tensor:
        return empty_like(self.x)[1]

    def reference(self) -> Tensor:
        x, scale, mean, rstd, gamma, beta = self
        y = x.float()
        if mean is not None and rstd is not None and gamma is not None and beta is not None:
            y = (y - mean[:, None]) * rstd[:, None] * gamma.float() + beta.float()
        ignored = torch.zeros_like(scale)
        return quantise(y, scale, ignored, ignored.long())[1]


fp8_transpose = define("fp8_transpose", Fp8Transpose)
