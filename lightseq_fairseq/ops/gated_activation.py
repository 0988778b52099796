"""A gated activation (GLU) and dropout: y = dropout(activation(a) * b), with x = [a, b].

With gelu it is GEGLU, with silu SwiGLU (Shazeer 2020). Backward reads x, computes the activation
again and generates the dropout bits again; so nothing is saved but x, the product's result.

Shapes: T = packed tokens (rows), F = channels of y.
Dropout: the row id is the token's row, the column is the channel of y.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import Dropout
from .bias_activation_dropout import ACTIVATIONS, activate
from .checks import FLOATS, check_dropout, check_rows
from .numerics import work_dtype
from .philox import drop, dropped
from .registry import define


class GatedActivationFwd(NamedTuple):
    """y [T, F] = dropout(activation(a) * b), in x's dtype.

    x: [T, 2 F], a and then b. activation: relu, gelu (erf), gelu_accurate (tanh) or silu.
    """

    x: Tensor
    activation: str
    dropout: Dropout

    def check(self, op: str) -> None:
        x, activation, dropout = self
        check_rows(op, "x", x, ("T", "2 F"), FLOATS)
        if x.shape[1] % 2:
            raise ValueError(f"{op}: x must have an even number of columns, got {x.shape[1]}")
        if activation not in ACTIVATIONS:
            raise ValueError(f"{op}: activation must be one of {ACTIVATIONS}, got {activation!r}")
        check_dropout(op, dropout, x)

    def shape(self) -> Tensor:
        rows, columns = self.x.shape
        return self.x.new_empty((rows, columns // 2))

    def parts(self, need_slope: bool) -> tuple[Tensor, Tensor, Tensor]:
        """activation(a), its derivative if it is needed, and b, in the working precision."""
        a, b = self.x.to(work_dtype(self.x)).chunk(2, 1)
        if self.activation == "relu":
            return a.relu(), (~(a <= 0)).to(a.dtype), b
        return *activate(a, self.activation, need_slope), b

    def reference(self) -> Tensor:
        activated, _, b = self.parts(need_slope=False)
        return drop(activated * b, self.dropout).to(self.x.dtype)


gated_activation_fwd = define("gated_activation_fwd", GatedActivationFwd)


class GatedActivationBwd(NamedTuple):
    """dx [T, 2 F], for dy [T, F]; other arguments as in forward."""

    dy: Tensor
    x: Tensor
    activation: str
    dropout: Dropout

    @property
    def forward(self) -> GatedActivationFwd:
        return GatedActivationFwd(*self[1:])

    def check(self, op: str) -> None:
        self.forward.check(op)
        x = self.x
        check_rows(op, "dy", self.dy, (len(x), x.shape[1] // 2), (x.dtype,), x)

    def shape(self) -> Tensor:
        return self.x.new_empty(self.x.shape)

    def reference(self) -> Tensor:
        activated, slope, b = self.forward.parts(need_slope=True)
        gradient = dropped(self.dy, self.dropout)
        return torch.cat((gradient * b * slope, gradient * activated), 1).to(self.x.dtype)


gated_activation_bwd = define("gated_activation_bwd", GatedActivationBwd)
