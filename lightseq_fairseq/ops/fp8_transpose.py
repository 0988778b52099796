"""The transpose in E4M3 of a tensor or of values, for a product in backward.

Forward casts an input x of a product to E4M3 (`fp8_quantise`); backward multiplies the transpose of
it. If backward has x in any case, the transpose is made only there. So it occupies no memory
between. Attention's backward writes its gradients in E4M3, but not their transpose.

Shapes: T = rows, C = columns, a multiple of 16, P = padded rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import Cast
from .casting import CASTABLE, E4M3, check_scale, check_width, padded, quantise
from .checks import check_rows, check_vectors
from .numerics import column_sum, store_gradient
from .registry import Written, define


class Fp8Transpose(NamedTuple):
    """transpose [C, P]: x^T in E4M3, as `fp8_quantise` casts it.

    x: [T, C], bfloat16; or E4M3, values that a cast by this scale has given. scale: as in
    `fp8_quantise`. Statistics are not noted, as the cast in forward has noted them.
    sums: [C], a gradient, only if x is E4M3: the column sums of scale * x.
    """

    x: Tensor
    scale: Tensor
    sums: Written | None = None
    accumulate: bool = False

    def check(self, op: str) -> None:
        x, scale, sums, _ = self
        check_rows(op, "x", x, ("T", "C"), (torch.bfloat16, E4M3))
        check_width(op, x)
        check_scale(op, "scale", scale, x)
        check_vectors(op, x, CASTABLE, sums=sums)
        if sums is not None and x.dtype != E4M3:
            raise ValueError(f"{op}: x must be {E4M3} for sums, got {x.dtype}")

    def shape(self) -> Tensor:
        rows, columns = self.x.shape
        return self.x.new_empty((columns, padded(rows)), dtype=E4M3)

    def reference(self) -> Tensor:
        x, scale, sums, accumulate = self
        y = x.float()
        if x.dtype == E4M3:
            y *= scale
            if sums is not None:
                store_gradient(sums, column_sum(y), accumulate)
        ignored = torch.zeros_like(scale)
        return quantise(y, Cast(scale, ignored, ignored.long()))[1]


fp8_transpose = define("fp8_transpose", Fp8Transpose)
