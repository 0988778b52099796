"""The cast of a matrix to E4M3, for a product that reads it: see `casting`.

Shapes: T = rows, C = columns, P = padded rows.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from .arguments import Cast
from .casting import CASTABLE, check_cast, quantise, quantised_like
from .checks import check_rows, check_tensor
from .numerics import column_sum, store_gradient
from .registry import Written, define

Quantised = tuple[Annotated[Tensor, "values"], Annotated[Tensor, "transpose"]]


class Fp8Quantise(NamedTuple):
    """values [T, C] and transpose [C, P] of x in E4M3, see `casting`.

    x: [T, C], float16, bfloat16 or float32; C is a multiple of 16.
    scale: float32 0-dim, a power of two from 2^-60 to 2^60.
    amax: float32 0-dim, raised to the largest finite |x|.
    saturated: int64 0-dim, to which the number of finite |x / scale| above 448 is added.
    sums: [C] or None: the column sums of x are written to it or, with accumulate, added to it.
    Raises ValueError on a wrong shape, dtype, device or layout, and on a CPU on a wrong scale.
    """

    x: Tensor
    scale: Tensor
    amax: Written
    saturated: Written
    sums: Written | None = None
    accumulate: bool = False

    def check(self, op: str) -> None:
        x, scale, amax, saturated, sums, _ = self
        check_tensor(op, "x", x, ("T", "C"), CASTABLE)
        check_rows(op, "x", x)
        check_cast(op, Cast(scale, amax, saturated), x)
        if sums is not None:
            check_tensor(op, "sums", sums, x.shape[1:], CASTABLE, x)

    def shape(self) -> Quantised:
        return quantised_like(self.x, Cast(*self[1:4]))

    def reference(self) -> Quantised:
        x, scale, amax, saturated, sums, accumulate = self
        if sums is not None:
            store_gradient(sums, column_sum(x), accumulate)
        return quantise(x, Cast(scale, amax, saturated))


fp8_quantise = define("fp8_quantise", Fp8Quantise)
