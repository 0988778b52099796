"""The head of a masked language model: from features of tokens to logits of the vocabulary.

Shapes: T = rows (masked tokens), C = model width, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightseq_fairseq import ops
from lightseq_fairseq.layers.linear import linear
from lightseq_fairseq.layers.residual_norm import layer_norm
from lightseq_fairseq.parameters import gradients_for, with_spare_rows


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, activation: str,
                rng: Tensor) -> Tensor:  # fmt: skip
        h = ops.linear_fwd(x, weight, None)
        ctx.save_for_backward(x, h, weight, bias, rng)
        ctx.activation = activation
        return ops.bias_activation_dropout_fwd(h, bias, activation, 0.0, rng, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, h, weight, bias, rng = ctx.saved_tensors
        to = gradients_for(weight, bias)
        dweight, dbias = to.tensors
        dh = ops.bias_activation_dropout_bwd(
            dy.contiguous(), h, bias, ctx.activation, p=0.0, rng=rng, site=0,
            dbias=dbias, accumulate=to.accumulate,
        )  # fmt: skip
        need_dx = ctx.needs_input_grad[0]
        dx = ops.linear_bwd(dh, x, weight, dweight, None, to.accumulate, need_dx)
        return (dx if need_dx else None, *to.handed(), None, None)


class _Projection(torch.autograd.Function):
    """x weight^T + bias with the spare rows of both, whose logits are zero and are cut off.

    A product with 50 265 columns would be computed elsewhere and copied, see csrc/linear.cu. The
    spare columns of the logits stay zero when the loss overwrites the others with their gradient,
    so backward may read them as well.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, whole_weight: Tensor,
                whole_bias: Tensor) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, bias, whole_weight, whole_bias)
        ctx.logits = whole = ops.linear_fwd(x, whole_weight, whole_bias)
        # Not a view, since autograd forbids the loss to overwrite a view that a Function returns.
        return whole.new_empty(0).set_(
            whole.untyped_storage(), whole.storage_offset(), (len(x), len(weight)), whole.stride()
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias, whole_weight, whole_bias = ctx.saved_tensors
        logits, ctx.logits = ctx.logits, None
        if dy.data_ptr() == logits.data_ptr() and dy.stride() == logits.stride():
            dy = logits
        else:
            dy = nn.functional.pad(dy, (0, len(whole_bias) - len(bias)))
        to = gradients_for(whole_weight, whole_bias)
        dweight, dbias = to.tensors
        dx = ops.linear_bwd(dy, x, whole_weight, dweight, dbias, to.accumulate, True)
        return dx, *to.handed(dweight[: len(weight)], dbias[: len(bias)]), None, None


def vocabulary_logits(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [T, C], weight [V, C], bias [V] -> logits [T, V], differentiable.

    If V is no multiple of 8 and weight and bias have spare rows (``parameters.with_spare_rows``),
    rows of the logits lie further apart than V.
    """
    wholes = with_spare_rows(weight), with_spare_rows(bias)
    if len(weight) % 8 == 0 or wholes[0] is None or wholes[1] is None:
        return linear(x, weight, bias)
    return _Projection.apply(x, weight, bias, *wholes)


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
