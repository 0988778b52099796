"""The head of a masked language model: from features of tokens to logits of the vocabulary.

Shapes: T = rows (masked tokens), C = model width, V = vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from lightseq_fairseq.layers.dropout import activated
from lightseq_fairseq.layers.linear import linear, vocabulary_logits
from lightseq_fairseq.layers.residual_norm import Norm
from lightseq_fairseq.layers.stack import layer_norm


def masked_lm_logits(
    x: Tensor, dense: nn.Linear, activation: str, norm: Norm, weight: Tensor, bias: Tensor,
    rng: Tensor,
) -> Tensor:  # fmt: skip
    """norm(activation(dense(x))) weight^T + bias: features [T, C] -> logits [T, V], differentiable.

    Args:
        activation: relu, gelu (erf) or gelu_accurate (tanh).
        weight: [V, C], the token embedding or a matrix of its own.
        rng: int64 [2]; its value is not used, since there is no dropout.

    Source: Devlin et al. 2019; ``fairseq.models.roberta.RobertaLMHead``.
    """
    x = activated(linear(x, dense.weight), dense.bias, activation, rng)
    return vocabulary_logits(layer_norm(x, norm, rng), weight, bias)
