"""The steps after a GEMM: y = dropout(activation(x + bias)). Also for dropout by itself.

Backward recomputes x + bias from the GEMM's output x and generates the dropout bits again.
Feed-forward layers use `linear_activation_fwd` and `activation_linear_bwd` instead.

Shapes: T = packed tokens (rows), F = channels.
Dropout: the row id is the token's row, the column is the channel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .arguments import Dropout
from .checks import FLOATS, check_dropout, check_rows, check_vectors
from .numerics import column_sum, store_gradient, work_dtype
from .philox import drop, dropped
from .registry import Written, define

#: fairseq's names: gelu is the erf form, gelu_accurate is the tanh approximation. A new activation
#: also changes ``ops/linear_activation.py`` (codes of the slope), ``layers/feed_forward.py``, all
#: of ``csrc/linear/activation.cuh``, notes in ``scripts/flags.py``, and the tests of these ops.
ACTIVATIONS = ("relu", "gelu", "gelu_accurate")
_APPROXIMATION = {"gelu": "none", "gelu_accurate": "tanh"}
_FAR = 128.0  # above it gelu(x) is x with derivative 1; below -_FAR both are 0


def gelu(x: Tensor, activation: str, need_slope: bool) -> tuple[Tensor, Tensor]:
    """gelu(x) and its derivative, which is EMPTY unless need_slope.

    Infinities map to their limits; torch's formulas would multiply them by 0 (NaN).
    """
    approximation = _APPROXIMATION[activation]
    near = x.clamp(-_FAR, _FAR)
    y = torch.where(x > _FAR, x, functional.gelu(near, approximate=approximation))
    slope = torch.ones_like(near) if need_slope else near.new_empty(0)
    if need_slope:
        torch.ops.aten.gelu_backward(slope, near, approximate=approximation, grad_input=slope)
    return y, slope


class BiasActivationDropoutFwd(NamedTuple):
    """y [T, F] = dropout(activation(x + bias)), in x's dtype.

    x: [T, F]. bias: [F] of x's dtype, or None. activation: one of ACTIVATIONS, or "identity".
    """

    x: Tensor
    bias: Tensor | None
    activation: str
    dropout: Dropout

    def check(self, op: str) -> None:
        x, bias, activation, dropout = self
        check_rows(op, "x", x, ("T", "F"), FLOATS)
        check_vectors(op, x, (x.dtype,), bias=bias)
        if activation not in (allowed := ("identity", *ACTIVATIONS)):
            raise ValueError(f"{op}: activation must be one of {allowed}, got {activation!r}")
        check_dropout(op, dropout, x)

    def shape(self) -> Tensor:
        return self.x.new_empty(self.x.shape)

    def reference(self) -> Tensor:
        x, bias, activation, dropout = self
        dtype = work_dtype(x)
        y = x.to(dtype, copy=True) if bias is None else torch.add(x.to(dtype), bias)
        if activation == "relu":
            y.relu_()
        elif activation != "identity":
            y, _ = gelu(y, activation, need_slope=False)
        return drop(y, dropout).to(x.dtype)


bias_activation_dropout_fwd = define("bias_activation_dropout_fwd", BiasActivationDropoutFwd)


class BiasActivationDropoutBwd(NamedTuple):
    """dx [T, F]; dbias [F] is its column sum.

    dy: [T, F]. Other arguments as in forward.
    """

    dy: Tensor
    x: Tensor
    bias: Tensor | None
    activation: str
    dropout: Dropout
    dbias: Written | None
    accumulate: bool

    def check(self, op: str) -> None:
        x = self.x
        BiasActivationDropoutFwd(*self[1:5]).check(op)
        check_rows(op, "dy", self.dy, x.shape, (x.dtype,), x)
        check_vectors(op, x, FLOATS, dbias=self.dbias)

    def shape(self) -> Tensor:
        return self.x.new_empty(self.x.shape)

    def reference(self) -> Tensor:
        dy, x, bias, activation, dropout, dbias, accumulate = self
        dtype = work_dtype(x)
        dx = dropped(dy, dropout)
        if activation != "identity":
            before = x.to(dtype) if bias is None else torch.add(x.to(dtype), bias)
            if activation == "relu":
                torch.ops.aten.threshold_backward(dx, before, 0, grad_input=dx)
            else:
                approximation = _APPROXIMATION[activation]
                before = before.clamp(-_FAR, _FAR)
                torch.ops.aten.gelu_backward(dx, before, approximate=approximation, grad_input=dx)
        if dbias is not None:
            store_gradient(dbias, column_sum(dx), accumulate)
        return dx.to(x.dtype)


bias_activation_dropout_bwd = define("bias_activation_dropout_bwd", BiasActivationDropoutBwd)
