"""Rotary position embedding: pairs of columns of queries and keys, rotated in place.

y[j] = x[j] cos[j] - x[j + D/2] sin[j],  y[j + D/2] = x[j + D/2] cos[j] + x[j] sin[j],  j < D/2

Source: Su et al. 2021 (RoFormer); the pairs are those of GPT-NeoX and of transformers. Backward is
the same op with `transposed`: the rotation by the opposite angles.

Shapes: T = packed tokens (rows), H = heads, D = head width, an even number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import FLOATS, check_contiguous, check_rows
from .numerics import work_dtype
from .registry import Written, define


class RotaryEmbedding(NamedTuple):
    """Rotate the heads of x [T, H, D] in place.

    x: rows and heads may be strided, as those of queries and keys in a product's result.
    cos, sin: float32 [T, D / 2], of the angles of the rows' positions, perhaps times a factor.
    transposed: multiply by the transpose instead, which makes the gradient.
    """

    x: Written
    cos: Tensor
    sin: Tensor
    transposed: bool

    def check(self, op: str) -> None:
        x, cos, sin, _ = self
        check_rows(op, "x", x, ("T", "H", "D"), FLOATS)
        rows, _, width = x.shape
        if width % 2:
            raise ValueError(f"{op}: the head width must be even, got {width}")
        for name, table in (("cos", cos), ("sin", sin)):
            check_contiguous(op, name, table, (rows, width // 2), (torch.float32,), x)

    def reference(self) -> None:
        x, dtype = self.x, work_dtype(self.x)
        cos, sin = (table.to(dtype)[:, None] for table in (self.cos, self.sin))
        if self.transposed:
            sin = -sin
        left, right = x.to(dtype).chunk(2, -1)
        x.copy_(torch.cat((left * cos - right * sin, right * cos + left * sin), -1))


rotary_embedding = define("rotary_embedding", RotaryEmbedding)
