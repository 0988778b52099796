"""The end of every sublayer as one op: add bias, dropout, add the residual, LayerNorm.

Shapes: T = packed tokens, C = model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightseq_fairseq import ops
from lightseq_fairseq.layers.products import PLAIN, Product
from lightseq_fairseq.layers.second_derivatives import once_differentiable
from lightseq_fairseq.memory.arrival import wait_for
from lightseq_fairseq.memory.gradients import gradients_for


@dataclass(frozen=True)
class Residual:
    """Settings for the end of one sublayer.

    Attributes:
        norm: the LayerNorm applied to the new residual stream: the sublayer's own (post-norm) or
            the next sublayer's (pre-norm); None if no LayerNorm follows.
        keep_stream: also return the sum as the new residual stream (pre-norm).
        p, rng, site: dropout of the sublayer's output, see ``ops.philox``.
        reader: the product that reads the normalised result; the only reader, if keep_stream.
    """

    norm: nn.LayerNorm | None
    keep_stream: bool
    p: float
    rng: Tensor
    site: int
    reader: Product = PLAIN

    @property
    def parameters(self) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.norm is None else (self.norm.weight, self.norm.bias)


def residual_norm_fwd(
    h: Tensor, bias: Tensor, stream: Tensor, gamma: Tensor | None, beta: Tensor | None,
    residual: Residual,
) -> tuple[list[Tensor], tuple[Tensor | None, Tensor | None]]:  # fmt: skip
    """Finish a sublayer: h [T, C] is the output of its last GEMM without bias.

    Returns the tensors that backward needs, and (new stream [T, C] or None, normalised [T, C] or
    None). The rng is one of the saved tensors: if it has changed when backward draws the masks
    again, torch raises an error.
    """
    rng = residual.rng
    dropout = ops.Dropout(residual.p, rng, residual.site)
    if residual.norm is None or gamma is None or beta is None:
        total, _, mean, rstd, _, _ = ops.dropout_residual_layer_norm_fwd(
            h, bias, stream, None, None, dropout, eps=0.0
        )
        return [total, mean, rstd, rng], (total if residual.keep_stream else None, None)
    total, y, mean, rstd = residual.reader.normalised(
        h, bias, stream, gamma, beta, dropout, eps=residual.norm.eps,
        is_only_reader=residual.keep_stream,
    )  # fmt: skip
    return [total, mean, rstd, rng], (total if residual.keep_stream else None, y)


def residual_norm_bwd(
    dstream: Tensor | None, dy: Tensor | None, bias: Tensor, saved: Sequence[Tensor],
    residual: Residual, product: Product,
) -> tuple[Any, Tensor, tuple[Tensor | None, ...]]:  # fmt: skip
    """Gradients (dh, dstream, (dbias, dgamma, dbeta)) of ``residual_norm_fwd``.

    product: that GEMM; its ``backward`` takes dh.
    """
    total, mean, rstd, rng = saved
    dy, dstream = (None if g is None else g.contiguous() for g in (dy, dstream))
    gamma, beta = residual.parameters
    to = gradients_for(*(p for p in (bias, gamma, beta) if p is not None))
    dbias, dgamma, dbeta = (*to.tensors, None, None)[:3]
    dh, dresidual = product.before_residual(
        dy, dstream, total, gamma, mean, rstd, ops.Dropout(residual.p, rng, residual.site),
        dgamma=dgamma, dbeta=dbeta, dbias=dbias, accumulate=to.accumulate,
    )  # fmt: skip
    return dh, dresidual, (*to.handed(), None, None)[:3]


def input_gradients(
    product: Product, post_norm: bool, dresidual: Tensor, dy: Any, kept: Tensor, weight: Tensor,
    dweight: Tensor, dbias: Tensor | None, accumulate: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Backward of a sublayer's first product, from dy to x [T, K]; see ``Product.backward``.

    Returns the gradients of x and of the residual stream. With post-LayerNorm, x is the residual,
    so the product adds its result to ``dresidual``, and the second gradient is None.
    """
    onto = dresidual if post_norm else None
    dx = product.backward(dy, kept, weight, dweight, dbias, accumulate, not post_norm, onto)
    return (dresidual, None) if post_norm else (dx, dresidual)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, eps: float, rng: Tensor, reader: Product
    ) -> tuple[Tensor, Tensor]:
        wait_for(gamma, beta)
        _, y, mean, rstd = reader.normalised(
            x, None, None, gamma, beta, ops.Dropout(0.0, rng, 0), eps=eps, is_only_reader=True
        )
        ctx.save_for_backward(x, gamma, beta, mean, rstd, rng)
        ctx.set_materialize_grads(False)
        return x, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstream: Tensor | None, dy: Tensor) -> Any:
        x, gamma, beta, mean, rstd, rng = ctx.saved_tensors
        to = gradients_for(gamma, beta)
        dgamma, dbeta = to.tensors
        dstream = None if dstream is None else dstream.contiguous()
        _, dx, _ = ops.dropout_residual_layer_norm_bwd(
            dy.contiguous(), dstream, x, gamma, mean, rstd, ops.Dropout(0.0, rng, 0),
            dgamma=dgamma, dbeta=dbeta, dbias=None, accumulate=to.accumulate,
        )  # fmt: skip
        return dx, *to.handed(), None, None, None


def layer_norm(
    x: Tensor, norm: nn.LayerNorm, rng: Tensor, reader: Product = PLAIN
) -> tuple[Tensor, Tensor]:
    """Return x [T, C] itself as the residual stream, and its LayerNorm.

    For places without a residual before them, such as the start of a pre-norm stack. The backward
    kernel sums the gradients of both results. rng: its value is not used, since there is no
    dropout. reader: the product that reads the LayerNorm; the only reader.
    """
    stream, y = _LayerNorm.apply(x, norm.weight, norm.bias, norm.eps, rng, reader)
    return stream, y
