"""The position-wise feed-forward sublayer as one autograd node.

Shapes: T = packed tokens, C = model width, F = feed-forward width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightseq_fairseq.layers.products import Activation, product_for
from lightseq_fairseq.layers.residual_norm import (
    Residual,
    input_gradients,
    residual_norm_bwd,
    residual_norm_fwd,
)
from lightseq_fairseq.layers.second_derivatives import once_differentiable
from lightseq_fairseq.memory.arrival import wait_for
from lightseq_fairseq.memory.gradients import gradients_for


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Tensor | None, activation: Activation,
                need_slope: bool, residual: Residual, *weights: Tensor) -> Any:  # fmt: skip
        wait_for(*weights)
        w1, b1, w2, b2, gamma, beta = weights
        ctx.first, ctx.second = first, second = product_for(w1), product_for(w2)
        h, of_x, of_activation = first.activated(x, w1, b1, activation, need_slope, second)
        h3, of_h = second.forward(h, w2, None)
        saved, outputs = residual_norm_fwd(h3, b2, x if stream is None else stream,
                                           gamma, beta, residual)  # fmt: skip
        ctx.save_for_backward(of_x, of_h, of_activation, w1, b1, w2, b2, *saved)
        ctx.activation, ctx.residual, ctx.post_norm = activation, residual, stream is None
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstream: Tensor | None, dy: Tensor | None) -> Any:
        of_x, of_h, of_activation, w1, b1, w2, b2, *saved = ctx.saved_tensors
        dh3, dresidual, closing = residual_norm_bwd(
            dstream, dy, b2, saved, ctx.residual, ctx.second
        )
        to_w1, to_others = gradients_for(w1), gradients_for(b1, w2)
        db1, dw2 = to_others.tensors
        dz = ctx.second.before_activation(
            dh3, of_h, w2, dw2, ctx.activation, of_activation, b1, db1, to_others.accumulate,
            ctx.first,
        )  # fmt: skip
        dx, dstream = input_gradients(ctx.first, ctx.post_norm, dresidual, dz, of_x, w1,
                                      to_w1.tensors[0], None, to_w1.accumulate)  # fmt: skip
        return dx, dstream, None, None, None, *to_w1.handed(), *to_others.handed(), *closing


def feed_forward(
    x: Tensor, stream: Tensor | None, fc1: nn.Linear, fc2: nn.Linear,
    activation: Activation, residual: Residual,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """fc2(dropout(act(fc1(x)))), then residual and LayerNorm; x [T, C], differentiable.

    stream: [T, C], the residual stream of a pre-norm stack; None means that x is the residual
    (post-LayerNorm).
    Returns (new stream, normalised), see ``residual_norm.residual_norm_fwd``.

    Source: Vaswani et al. 2017, section 3.3; ``fairseq.modules.transformer_layer``.
    """
    return _FeedForward.apply(
        x, stream, activation, torch.is_grad_enabled(), residual,
        fc1.weight, fc1.bias, fc2.weight, fc2.bias, *residual.parameters,
    )  # fmt: skip
