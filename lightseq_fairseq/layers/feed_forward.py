"""The position-wise feed-forward sublayer.

Shapes: T = packed tokens, C = model width, F = feed-forward width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.layers.node import Input
from lightseq_fairseq.layers.stack import Sublayer
from lightseq_fairseq.memory.gradients import Gradients
from lightseq_fairseq.ops import Dropout, Quantised
from lightseq_fairseq.ops.arguments import Operand


@dataclass(frozen=True, kw_only=True)
class FeedForward(Sublayer):
    """last(dropout(activation(first(x)))); or, if it is gated, of the first product's two halves
    last(dropout(activation(a) * b)).

    Attributes:
        first_bias: of the first product, if the op behind it adds it; else the product does.
        activation: one of ``ops.bias_activation_dropout.ACTIVATIONS``.
        is_gated: see above (GLU).
        inner_dropout: behind the activation.
        trains: backward follows, which needs the slope of the activation.

    Source: Vaswani et al. 2017, section 3.3; ``fairseq.modules.transformer_layer``; Shazeer 2020.
    """

    first_bias: Tensor | None
    activation: str
    is_gated: bool
    inner_dropout: Dropout
    trains: bool

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return *super().parameters, *self._first_biases

    @property
    def _first_biases(self) -> tuple[Tensor, ...]:
        return () if self.first_bias is None else (self.first_bias,)

    @property
    def _is_apart(self) -> bool:
        """Whether no op has the activation and a product in one: adapters add in between, and there
        is no such op that is gated or has no bias."""
        return self.first_bias is None or bool(self.first.adapters or self.last.adapters)

    def _activated(self, z: Tensor) -> Tensor:
        if self.is_gated:
            return ops.gated_activation_fwd(z, self.activation, self.inner_dropout)
        return ops.bias_activation_dropout_fwd(
            z, self.first_bias, self.activation, self.inner_dropout
        )

    def _before_activation(self, dy: Tensor, z: Tensor, to: Gradients) -> Tensor:
        """The gradient of z for that of `_activated`."""
        if self.is_gated:
            return ops.gated_activation_bwd(dy, z, self.activation, self.inner_dropout)
        with to.of(self._first_biases) as ((dbias,), accumulate):
            return ops.bias_activation_dropout_bwd(
                dy, z, self.first_bias, self.activation, self.inner_dropout, dbias, accumulate
            )

    def forward(self, x: Input, memory: Tensor | None) -> tuple[Tensor, Any]:
        if self._is_apart:
            z, of_x = self.first.multiply(x)
            y, of_h = self.last.multiply(Input(self._activated(z)))
            return y, (of_x, of_h, z)
        assert self.first_bias is not None
        operand, of_x = self.first.operand(x)
        cast = self.last.input_cast
        h, transpose, slope = ops.linear_activation_fwd(
            operand, self.first.matrix, self.first_bias, self.activation, self.inner_dropout,
            self.trains, cast,
        )  # fmt: skip
        # The slope of relu follows from h.
        keep = self.activation == "relu"
        y, of_h = self.last.multiply(Input(h, h, transpose, cast), keep=keep)
        return y, (of_x, of_h, None if self.activation == "relu" else slope)

    def backward(
        self, dh: Operand, kept: Any, to: Gradients, onto: Tensor | None, dmemory: Tensor | None
    ) -> Tensor:
        of_x, of_h, slope = kept
        if self._is_apart:  # then it is z
            dz = self._before_activation(self.last.backward(dh, of_h, to), slope, to)
            return self.first.backward(dz, of_x, to, onto=onto)
        assert self.first_bias is not None
        cast = self.first.gradient_cast
        with to.of([self.first_bias], self.last.weights) as ((dbias, dweight), accumulate):
            dz, transpose = ops.activation_linear_bwd(
                self.last.gradient(dh), self.last.kept_operand(of_h, dh), self.last.matrix, slope,
                self.inner_dropout.p, dweight, dbias, accumulate, self.first_bias, cast,
            )  # fmt: skip
        gradient = dz if cast is None else Quantised(dz, transpose, cast.scale)
        return self.first.backward(gradient, of_x, to, onto=onto)
