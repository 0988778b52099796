"""The cast of a matrix to E4M3, for a product that reads it: see `casting`.

Shapes: T = rows, C = columns, P = padded rows.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .arguments import Cast
from .casting import CASTABLE, check_cast, quantise, quantised_like
from .checks import check_rows, check_vectors
from .numerics import column_sum, store_gradient
from .registry import Written, define


class Fp8Quantise(NamedTuple):
    """values [T, C] and transpose [C, P] of x in E4M3, see `casting`.

    x: [T, C], float16, bfloat16 or float32; C is a multiple of 16.
    sums: [C], a gradient: the column sums of x.
    """

    x: Tensor
    cast: Cast
    sums: Written | None = None
    accumulate: bool = False

    def check(self, op: str) -> None:
        x, cast, sums, _ = self
        check_rows(op, "x", x, ("T", "C"), CASTABLE)
        check_cast(op, cast, x)
        check_vectors(op, x, CASTABLE, sums=sums)

    def shape(self) -> tuple[Tensor, Tensor]:
        return quantised_like(self.x, self.cast)

    def reference(self) -> tuple[Tensor, Tensor]:
        x, cast, sums, accumulate = self
        if sums is not None:
            store_gradient(sums, column_sum(x), accumulate)
        return quantise(x, cast)


fp8_quantise = define("fp8_quantise", Fp8Quantise, "values transpose")
