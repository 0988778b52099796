"""The steps after a GEMM: y = dropout(activation(x + bias)). Also for dropout by itself.

Backward recomputes x + bias from the GEMM's output x and generates the dropout bits again.
Feed-forward layers use `linear_activation_fwd` and `activation_linear_bwd` instead.

Shapes: T = packed tokens (rows), F = channels.
Dropout: the row id is the token's row, the column is the channel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .arguments import Dropout
from .checks import FLOATS, check_dropout, check_rows, check_vectors
from .numerics import column_sum, store_gradient, work_dtype
from .philox import drop, dropped
from .registry import Written, define

#: fairseq's names: gelu is the erf form, gelu_accurate is the tanh approximation. silu is torch's
#: name: fairseq's, swish, is no value of its --activation-fn. A new activation also changes
#: ``ops/linear_activation.py`` (codes of the slope), all of ``csrc/linear/activation.cuh``, notes
#: in ``scripts/flags.py``, and the tests of these ops.
ACTIVATIONS = ("relu", "gelu", "gelu_accurate", "silu")
_FORMULAS: dict[str, tuple[Callable[..., Tensor], Any, dict[str, str]]] = {
    "gelu": (functional.gelu, torch.ops.aten.gelu_backward, {"approximate": "none"}),
    "gelu_accurate": (functional.gelu, torch.ops.aten.gelu_backward, {"approximate": "tanh"}),
    "silu": (functional.silu, torch.ops.aten.silu_backward, {}),
}
# Above it these activations of x are x, with derivative 1; below -_FAR both are 0.
_FAR = 128.0


def activate(x: Tensor, activation: str, need_slope: bool) -> tuple[Tensor, Tensor]:
    """An activation of x other than relu, and its derivative, which is EMPTY unless need_slope.

    Infinities map to their limits; torch's formulas would multiply them by 0 (NaN).
    """
    function, _, options = _FORMULAS[activation]
    y = torch.where(x > _FAR, x, function(x.clamp(-_FAR, _FAR), **options))
    slope = torch.ones_like(x) if need_slope else x.new_empty(0)
    if need_slope:
        _multiply_by_slope(slope, x, activation)
    return y, slope


def _multiply_by_slope(dy: Tensor, x: Tensor, activation: str) -> None:
    """Multiplies dy by the derivative at x, in place."""
    _, backward, options = _FORMULAS[activation]
    backward(dy, x.clamp(-_FAR, _FAR), **options, grad_input=dy)


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
            y, _ = activate(y, activation, need_slope=False)
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
                _multiply_by_slope(dx, before, activation)
        if dbias is not None:
            store_gradient(dbias, column_sum(dx), accumulate)
        return dx.to(x.dtype)


bias_activation_dropout_bwd = define("bias_activation_dropout_bwd", BiasActivationDropoutBwd)
