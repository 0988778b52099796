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
    """last(dropout(activation(first(x)))).

    Attributes:
        first_bias: of the first product; the op behind it adds it.
        activation: one of ``ops.bias_activation_dropout.ACTIVATIONS``.
        inner_dropout: behind the activation.
        trains: backward follows, which needs the slope of the activation.

    Source: Vaswani et al. 2017, section 3.3; ``fairseq.modules.transformer_layer``.
    """

    first_bias: Tensor
    activation: str
    inner_dropout: Dropout
    trains: bool

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return *super().parameters, self.first_bias

    @property
    def _has_adapters(self) -> bool:
        """Then no op has the activation and a product in one, since adapters add in between."""
        return bool(self.first.adapters or self.last.adapters)

    def forward(self, x: Input, memory: Tensor | None) -> tuple[Tensor, Any]:
        if self._has_adapters:
            z, of_x = self.first.multiply(x)
            h = ops.bias_activation_dropout_fwd(
                z, self.first_bias, self.activation, self.inner_dropout
            )
            y, of_h = self.last.multiply(Input(h))
            return y, (of_x, of_h, z)
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
        if self._has_adapters:  # then it is z
            dy = self.last.backward(dh, of_h, to)
            with to.of([self.first_bias]) as ((dbias,), accumulate):
                dz = ops.bias_activation_dropout_bwd(
                    dy, slope, self.first_bias, self.activation, self.inner_dropout, dbias,
                    accumulate,
                )  # fmt: skip
            return self.first.backward(dz, of_x, to, onto=onto)
        cast = self.first.gradient_cast
        with to.of([self.first_bias], self.last.weights) as ((dbias, dweight), accumulate):
            dz, transpose = ops.activation_linear_bwd(
                self.last.gradient(dh), self.last.kept_operand(of_h, dh), self.last.matrix, slope,
                self.inner_dropout.p, dweight, dbias, accumulate, self.first_bias, cast,
            )  # fmt: skip
        gradient = dz if cast is None else Quantised(dz, transpose, cast.scale)
        return self.first.backward(gradient, of_x, to, onto=onto)
