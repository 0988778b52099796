"""Tensors in E4M3: x = scale * values, with one float32 scale, a power of two.

Rule of the cast, the same bits on every device:

1. x is taken in float32. NaN and infinity become NaN (0x7f), so that they reach the gradient norm.
2. x / scale is exact, since scale is a power of two. Numbers beyond +-448 become +-448.
3. The result is rounded to nearest, ties to even. The sign of zero stays. The smallest positive
   number is 2^-9.

A GPU multiplies fp8 matrices only if both have the inner dimension of the product adjacent in
memory. So a cast returns the values and their transpose. Where a product sums over the rows T, both
operands are transposes. Their rows have P numbers: T rounded up to a multiple of 16, with zeros at
the end. A transpose that is needed only later is made then (`fp8_transpose`).

Shapes: T = rows, C = columns, P = padded rows.
Source: Micikevicius et al. 2022, "FP8 formats for deep learning".
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from .checks import check_power_of_two, check_rows, check_tensor
from .numerics import column_sum, store_gradient
from .registry import Written, define

E4M3 = torch.float8_e4m3fn
MOST = 448.0  # the largest number of E4M3
MOST_EXPONENT = 60  # scales are powers of two from 2^-60 to 2^60
#: Rows of operands are multiples of it: GPUs read 16 bytes at a time.
ALIGNMENT = 16
#: dtypes that are cast
CASTABLE = (torch.float16, torch.bfloat16, torch.float32)

Quantised = tuple[Annotated[Tensor, "values"], Annotated[Tensor, "transpose"]]


class Fp8Quantise(NamedTuple):
    """values [T, C] and transpose [C, P] of x in E4M3, see the module's rule.

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
        check_statistics(op, x, scale, amax, saturated)
        if sums is not None:
            check_tensor(op, "sums", sums, x.shape[1:], CASTABLE, x)

    def shape(self) -> Quantised:
        return empty_like(self.x)

    def reference(self) -> Quantised:
        x, scale, amax, saturated, sums, accumulate = self
        if sums is not None:
            store_gradient(sums, column_sum(x), accumulate)
        return quantise(x.float(), scale, amax, saturated)


fp8_quantise = define("fp8_quantise", Fp8Quantise)


def check_statistics(op: str, x: Tensor, scale: Tensor, amax: Tensor, saturated: Tensor) -> None:
    """Raise ValueError unless x [T, C], still to be cast, and the scalars of the cast are valid."""
    check_width(op, x)
    check_scale(op, "scale", scale, x)
    check_tensor(op, "amax", amax, (), (torch.float32,), x)
    check_tensor(op, "saturated", saturated, (), (torch.int64,), x)


def check_width(op: str, x: Tensor) -> None:
    """Raise ValueError unless the rows of x [T, C] can be those of an operand."""
    if x.shape[1] % ALIGNMENT:
        raise ValueError(
            f"{op}: fp8 needs rows of a multiple of {ALIGNMENT} numbers, got {x.shape[1]}"
        )


def check_scale(op: str, name: str, scale: Tensor, like: Tensor) -> None:
    """Raise ValueError unless scale is float32 0-dim; on a CPU also unless it is a valid scale."""
    check_tensor(op, name, scale, (), (torch.float32,), like)
    check_power_of_two(op, name, scale, MOST_EXPONENT)


def padded(rows: int) -> int:
    """P: rows, rounded up to a multiple of 16."""
    return -(-rows // ALIGNMENT) * ALIGNMENT


def empty_like(x: Tensor) -> Quantised:
    """Uninitialised values and transpose of x [T, C]."""
    rows, columns = x.shape
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty((columns, padded(rows)), dtype=E4M3)


def quantise(x: Tensor, scale: Tensor, amax: Tensor, saturated: Tensor) -> Quantised:
    """Cast float32 x [T, C]; see `Fp8Quantise`. The references of other ops end with it."""
    is_finite = x.isfinite()
    size = x.abs().masked_fill_(~is_finite, 0)
    if x.numel():
        torch.maximum(amax, size.amax(), out=amax)
    saturated.add_((size / scale > MOST).sum())
    # Clamped first: whether torch's own cast saturates depends on its version.
    values = (x / scale).clamp_(-MOST, MOST).masked_fill_(~is_finite, torch.nan).to(E4M3)
    rows, columns = x.shape
    transpose = torch.zeros((columns, padded(rows)), dtype=torch.uint8, device=x.device)
    transpose[:, :rows] = values.view(torch.uint8).t()
    return values, transpose.view(E4M3)
