"""The end of a sublayer and the product that reads it, in one kernel: for few rows of a search.

sum = x + bias + residual
y   = activation(LayerNorm(sum) weight^T + weight_bias)

The numbers are those of `dropout_residual_layer_norm_fwd` without dropout, and of `linear_fwd` or
`linear_activation_fwd`. On a GPU, gamma * sum is rounded in place of LayerNorm(sum), and mean and
deviation correct the product, see csrc/linear/few_rows.cu.

Shapes: T = rows, K = inputs, N = outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import Dropout
from .bias_activation_dropout import ACTIVATIONS, BiasActivationDropoutFwd
from .checks import check_rows, check_tensor, check_vectors
from .dropout_residual_layer_norm import DropoutResidualLayerNormFwd
from .linear import product
from .registry import define

# The kernel multiplies 8 rows; gamma and beta are two of them.
_MOST_ROWS, _MOST_COLUMNS = 6, 2048
# The kernel rounds gamma * sum, which could be too large for float16.
_DTYPES = (torch.bfloat16,)


def takes_rows(x: Tensor) -> bool:
    """Whether `norm_linear_fwd` takes rows x [T, K]."""
    rows, columns = x.shape
    return (
        rows <= _MOST_ROWS and columns <= _MOST_COLUMNS and columns % 8 == 0 and x.dtype in _DTYPES
    )


class NormLinearFwd(NamedTuple):
    """(kept [T, K], y [T, N]).

    kept is LayerNorm(sum) with keep_result, else sum; EMPTY if that equals x (no bias, no
    residual).

    x, residual: [T, K]. bias, gamma, beta: [K]. weight: [N, K]. weight_bias: [N]. All bfloat16;
        bias, residual, beta and weight_bias may be None. T is at most 6; K at most 2048 and a
        multiple of 8. activation: one of ACTIVATIONS, or "identity".
    """

    x: Tensor
    bias: Tensor | None
    residual: Tensor | None
    gamma: Tensor
    beta: Tensor | None
    eps: float
    weight: Tensor
    weight_bias: Tensor | None
    activation: str
    keep_result: bool

    def check(self, op: str) -> None:
        x, bias, residual, gamma, beta, _, weight, weight_bias, activation, _ = self
        check_rows(op, "x", x, ("T", "K"), _DTYPES)
        if not takes_rows(x):
            raise ValueError(
                f"{op}: x must have at most {_MOST_ROWS} rows, of at most {_MOST_COLUMNS} numbers, "
                f"a multiple of 8, got {list(x.shape)}"
            )
        if residual is not None:
            check_rows(op, "residual", residual, x.shape, (x.dtype,), x)
        check_tensor(op, "gamma", gamma, x.shape[1:], (x.dtype,), x)
        check_vectors(op, x, (x.dtype,), bias=bias, beta=beta)
        check_rows(op, "weight", weight, ("N", x.shape[1]), (x.dtype,), x)
        if weight_bias is not None:
            check_tensor(op, "weight_bias", weight_bias, weight.shape[:1], (x.dtype,), x)
        if activation not in (allowed := ("identity", *ACTIVATIONS)):
            raise ValueError(f"{op}: activation must be one of {allowed}, got {activation!r}")

    @property
    def _keeps(self) -> bool:
        return self.keep_result or self.bias is not None or self.residual is not None

    def shape(self) -> tuple[Tensor, Tensor]:
        x, weight = self.x, self.weight
        kept = x.new_empty(x.shape if self._keeps else 0)
        return kept, x.new_empty(len(x), len(weight))

    def reference(self) -> tuple[Tensor, Tensor]:
        x, bias, residual, gamma, beta, eps, weight, weight_bias, activation, keep_result = self
        no_dropout = Dropout(0.0, x, 0)
        total, result, *_ = DropoutResidualLayerNormFwd(
            x, bias, residual, gamma, beta, no_dropout, eps
        ).reference()
        z = product(result, weight, weight_bias)
        y = BiasActivationDropoutFwd(z, None, activation, no_dropout).reference()
        return result if keep_result else total, y.to(x.dtype)


norm_linear_fwd = define("norm_linear_fwd", NormLinearFwd, "kept y")
