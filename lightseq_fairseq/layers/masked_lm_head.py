"""The head of a masked language model: from features of tokens to logits of the vocabulary.

Shapes: T = rows (masked tokens), C = model width, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightseq_fairseq import ops
from lightseq_fairseq.layers.linear import vocabulary_logits
from lightseq_fairseq.layers.node import Input, Pair, apply
from lightseq_fairseq.layers.residual_norm import layer_norm
from lightseq_fairseq.layers.weight import Weight
from lightseq_fairseq.memory.gradients import Gradients
from lightseq_fairseq.ops import Dropout


class _Dense(Pair):
    """activation(x weight^T + bias)."""

    def __init__(self, dense: nn.Linear, activation: str, rng: Tensor) -> None:
        self.weight, self.bias, self.activation = Weight.of(dense), dense.bias, activation
        self.dropout = Dropout(0.0, rng, 0)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self.weight.parameters

    def forward(self, x: Input) -> tuple[list[Input], list[Any]]:
        self.weight.wait()
        h = ops.linear_fwd(x.x, self.weight.matrix, None)
        y = ops.bias_activation_dropout_fwd(h, self.bias, self.activation, self.dropout)
        return [Input(y)], [x.x, h]

    def backward(
        self, kept: list[Any], to: Gradients, needed: Sequence[bool], dy: Tensor
    ) -> list[Tensor | None]:
        h, x = kept.pop(), kept.pop()
        with to.of(*([p] for p in self.parameters)) as ((dweight, dbias), accumulate):
            dh = ops.bias_activation_dropout_bwd(
                dy.contiguous(), h, self.bias, self.activation, self.dropout, dbias, accumulate
            )
            dx = ops.linear_bwd(dh, x, self.weight.matrix, dweight, None, accumulate, needed[0])
        return [dx if needed[0] else None]


def masked_lm_logits(
    x: Tensor, dense: nn.Linear, activation: str, norm: nn.LayerNorm, weight: Tensor, bias: Tensor,
    rng: Tensor,
) -> Tensor:  # fmt: skip
    """norm(activation(dense(x))) weight^T + bias: features [T, C] -> logits [T, V], differentiable.

    Args:
        activation: relu, gelu (erf) or gelu_accurate (tanh).
        weight: [V, C], the token embedding or a matrix of its own.
        rng: int64 [2]; its value is not used, since there is no dropout.

    Source: Devlin et al. 2019; ``fairseq.models.roberta.RobertaLMHead``.
    """
    x = apply(_Dense(dense, activation, rng), Input(x))[0].x
    return vocabulary_logits(layer_norm(x, norm, rng), weight, bias)
