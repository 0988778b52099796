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


def layer_norm_backward(
    dy: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor,
    dgamma: Tensor | None, dbeta: Tensor | None, accumulate: bool,
) -> Tensor:  # fmt: skip
    """The gradient of LayerNorm's input x [T, C], in the working precision; stores the others."""
    dtype = work_dtype(dy)
    weight = gamma.to(dtype)
    dx: Tensor
    dx, of_gamma, of_beta = torch.ops.aten.native_layer_norm_backward(
        dy.to(dtype), x.to(dtype), gamma.shape, mean.view(-1, 1), rstd.view(-1, 1), weight, weight,
        (True, dgamma is not None, dbeta is not None),
    )  # fmt: skip
    store_gradient(dgamma, of_gamma, accumulate)
    store_gradient(dbeta, of_beta, accumulate)
    return dx


def store_gradient(target: Tensor | None, value: Tensor, accumulate: bool) -> None:
    """Overwrite the caller's gradient with value, or add value to it; round once, to its dtype."""
    if target is None:
        return
    if accumulate:
        target.add_(value)
    else:
        target.copy_(value)
