"""The head of a masked language model: from features of tokens to logits of the vocabulary.

Shapes: T = rows (masked tokens), C = model width, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightseq_fairseq import ops
from lightseq_fairseq.layers.linear import vocabulary_logits
from lightseq_fairseq.layers.residual_norm import layer_norm
from lightseq_fairseq.layers.second_derivatives import once_differentiable
from lightseq_fairseq.memory.arrival import wait_for
from lightseq_fairseq.memory.gradients import gradients_for


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, activation: str,
                rng: Tensor) -> Tensor:  # fmt: skip
        wait_for(weight, bias)
        h = ops.linear_fwd(x, weight, None)
        ctx.save_for_backward(x, h, weight, bias, rng)
        ctx.activation = activation
        return ops.bias_activation_dropout_fwd(h, bias, activation, ops.Dropout(0.0, rng, 0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, h, weight, bias, rng = ctx.saved_tensors
        to = gradients_for(weight, bias)
        dweight, dbias = to.tensors
        dh = ops.bias_activation_dropout_bwd(
            dy.contiguous(), h, bias, ctx.activation, ops.Dropout(0.0, rng, 0), dbias, to.accumulate
        )
        need_dx = ctx.needs_input_grad[0]
        dx = ops.linear_bwd(dh, x, weight, dweight, None, to.accumulate, need_dx)
        return (dx if need_dx else None, *to.handed(), None, None)


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
    x = _Dense.apply(x, dense.weight, dense.bias, activation, rng)
    return vocabulary_logits(layer_norm(x, norm, rng)[1], weight, bias)
