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

import torch
from torch import Tensor

from .arguments import Cast
from .checks import FLOATS, Dtypes, check_power_of_two, check_tensor

E4M3 = torch.float8_e4m3fn
MOST = 448.0  # the largest number of E4M3
MOST_EXPONENT = 60  # scales are powers of two from 2^-60 to 2^60
#: Rows of operands are multiples of it: GPUs read 16 bytes at a time.
ALIGNMENT = 16
#: dtypes that are cast
CASTABLE = (torch.float16, torch.bfloat16, torch.float32)


def dtypes_for(cast: Cast | None) -> Dtypes:
    """The dtypes of the inputs of an op whose result is cast, or not."""
    return FLOATS if cast is None else (torch.bfloat16,)


def check_cast(op: str, cast: Cast | None, x: Tensor) -> None:
    """Raise ValueError unless x [T, C] can be cast, or there is no cast."""
    if cast is not None:
        check_width(op, x)
        check_scale(op, "scale", cast.scale, x)
        check_tensor(op, "amax", cast.amax, (), (torch.float32,), x)
        check_tensor(op, "saturated", cast.saturated, (), (torch.int64,), x)


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


def quantised_like(x: Tensor, cast: Cast | None) -> tuple[Tensor, Tensor]:
    """Uninitialised values and transpose of x [T, C]; EMPTY without a cast."""
    if cast is None:
        return x.new_empty(0, dtype=E4M3), x.new_empty(0, dtype=E4M3)
    rows, columns = x.shape
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty((columns, padded(rows)), dtype=E4M3)


def quantise(x: Tensor, cast: Cast | None) -> tuple[Tensor, Tensor]:
    """Values and transpose of x [T, C] by the rule above; EMPTY without a cast."""
    if cast is None:
        return quantised_like(x, None)
    scale, amax, saturated = cast
    x = x.float()
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
