"""Rules that all references follow: their working precision, and how they store gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def work_dtype(x: Tensor) -> torch.dtype:
    """The precision of statistics and accumulations: float64 for float64, otherwise float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def column_sum(x: Tensor) -> Tensor:
    """Sum over the rows of x [T, C], accumulated in the working precision."""
    return x.sum(0, dtype=work_dtype(x))


def store_gradient(target: Tensor | None, value: Tensor, accumulate: bool) -> None:
    """Overwrite the caller's gradient with value, or add value to it; round once, to its dtype."""
    if target is None:
        return
    if accumulate:
        target.add_(value)
    else:
        target.copy_(value)
