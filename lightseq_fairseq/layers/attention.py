"""Attention sublayers: projections, attention, residual and LayerNorm in one autograd node.

Shapes: T = packed tokens, B = sentences, L = longest sentence, S = longest source, C = model width,
H = heads, D = head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightseq_fairseq import ops
from lightseq_fairseq.layers.products import Product, product_for
from lightseq_fairseq.layers.residual_norm import (
    Residual,
    input_gradients,
    residual_norm_bwd,
    residual_norm_fwd,
)
from lightseq_fairseq.layers.second_derivatives import once_differentiable
from lightseq_fairseq.memory.arrival import wait_for
from lightseq_fairseq.memory.gradients import gradients_for
from lightseq_fairseq.memory.packing import Segments
from lightseq_fairseq.memory.parameters import as_one


@dataclass(frozen=True)
class Heads:
    """Settings of an attention call: all arguments that are not differentiated.

    Attributes:
        count: number of heads H; the head width D is C / H.
        queries, keys: segments of the query side and of the key side.
        causal: a token attends only to itself and to earlier tokens.
        p: dropout rate of the attention probabilities.
        rng: int64 [2] (seed, micro-batch), see ``ops.philox``. site: the dropout site.
    """

    count: int
    queries: Segments
    keys: Segments
    causal: bool
    p: float
    rng: Tensor
    site: int

    def arguments(self, width: int) -> dict[str, Any]:
        """The arguments that ``ops.attention_fwd`` and ``_bwd`` share, besides q, k and v."""
        return {
            "cu_q": self.queries.cu_seqlens,
            "cu_k": self.keys.cu_seqlens,
            "max_q": self._most(self.queries),
            "max_k": self._most(self.keys),
            "causal": self.causal,
            "scale": 1.0 / math.sqrt(width // self.count),
            "dropout": ops.Dropout(self.p, self.rng, self.site),
        }

    def _most(self, segments: Segments) -> int:
        # References compute up to this bound, so on a CPU it is the tighter bound of this batch.
        return segments.graph_len if self.rng.is_cuda and segments.graph_len else segments.max_len


class ColumnSlices:
    """One buffer for the gradients of all column slices of a tensor, in the tensor's layout.

    So the backward of the GEMM that made the tensor gets the whole gradient without a copy.

    Args:
        product: the product that made the tensor.
    """

    def __init__(self, product: Product) -> None:
        self.product = product
        self._whole: Tensor | None = None

    def like(self, part: Tensor) -> Tensor:
        """Uninitialised gradient of ``part`` [T, C'], a column slice of a contiguous tensor."""
        if self._whole is None:
            whole = part.as_strided((part.shape[0], part.stride(0)), (part.stride(0), 1), 0)
            self._whole = self.product.gradient_like(whole)
        return self._whole.as_strided(part.shape, part.stride(), part.storage_offset())


def _close_bwd(
    ctx: Any, dstream: Tensor | None, dy: Tensor | None, of_out: Tensor, out_w: Tensor,
    out_b: Tensor, saved: Sequence[Tensor],
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:  # fmt: skip
    """Backward from a sublayer's results to the result of attention.

    Returns the gradients of the latter and of the residual, and of out_w, out_b, gamma and beta.
    """
    dh, dresidual, closing = residual_norm_bwd(dstream, dy, out_b, saved, ctx.residual, ctx.last)
    to = gradients_for(out_w)
    dout = ctx.last.backward(dh, of_out, out_w, to.tensors[0], None, to.accumulate)
    return dout, dresidual, (*to.handed(), *closing)


class _SelfAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Tensor | None, heads: Heads, residual: Residual,
                *weights: Tensor) -> Any:  # fmt: skip
        wait_for(*weights)
        q_w, k_w, v_w, q_b, k_b, v_b, out_w, out_b, gamma, beta = weights
        weight = as_one([q_w, k_w, v_w])
        ctx.first, ctx.last = product_for(weight), product_for(out_w)
        qkv, of_x = ctx.first.forward(x, weight, as_one([q_b, k_b, v_b]))
        q, k, v = qkv.unflatten(1, (3, heads.count, -1)).unbind(1)
        attended, out, lse = ctx.last.attended(q, k, v, **heads.arguments(x.shape[1]))
        h, of_out = ctx.last.forward(attended, out_w, None)
        saved, outputs = residual_norm_fwd(h, out_b, x if stream is None else stream,
                                           gamma, beta, residual)  # fmt: skip
        ctx.save_for_backward(of_x, of_out, qkv, out, lse, *weights[:8], *saved)
        ctx.heads, ctx.residual, ctx.post_norm = heads, residual, stream is None
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstream: Tensor | None, dy: Tensor | None) -> Any:
        of_x, of_out, qkv, out, lse, *saved = ctx.saved_tensors
        q_w, k_w, v_w, q_b, k_b, v_b, out_w, out_b, *saved = saved
        heads = ctx.heads
        dout, dresidual, closing = _close_bwd(ctx, dstream, dy, of_out, out_w, out_b, saved)
        dqkv = ctx.first.gradient_like(qkv)
        q, k, v = qkv.unflatten(1, (3, heads.count, -1)).unbind(1)
        dq, dk, dv = dqkv.unflatten(1, (3, heads.count, -1)).unbind(1)
        ctx.first.attention_gradients(
            ctx.first, dout=dout.view_as(out), q=q, k=k, v=v, out=out, lse=lse,
            dq=dq, dk=dk, dv=dv, **heads.arguments(dout.shape[1]),
        )  # fmt: skip
        weight = as_one([q_w, k_w, v_w])
        to = gradients_for(weight, as_one([q_b, k_b, v_b]))
        dweight, dbias = to.tensors
        dx, dstream = input_gradients(
            ctx.first, ctx.post_norm, dresidual, dqkv, of_x, weight, dweight, dbias, to.accumulate
        )
        projections = to.handed(*dweight.chunk(3), *dbias.chunk(3))
        return dx, dstream, None, None, *projections, *closing


class _CrossAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Tensor | None, memory: Tensor, slices: ColumnSlices,
                heads: Heads, residual: Residual, *weights: Tensor) -> Any:  # fmt: skip
        wait_for(*weights)
        q_w, q_b, out_w, out_b, gamma, beta = weights
        ctx.first, ctx.last = product_for(q_w), product_for(out_w)
        q, of_x = ctx.first.forward(x, q_w, q_b)
        q = q.unflatten(1, (heads.count, -1))
        k, v = memory.unflatten(1, (2, heads.count, -1)).unbind(1)
        attended, out, lse = ctx.last.attended(q, k, v, **heads.arguments(x.shape[1]))
        h, of_out = ctx.last.forward(attended, out_w, None)
        saved, outputs = residual_norm_fwd(h, out_b, x if stream is None else stream,
                                           gamma, beta, residual)  # fmt: skip
        ctx.save_for_backward(of_x, of_out, memory, q, out, lse, *weights[:4], *saved)
        ctx.heads, ctx.residual, ctx.post_norm = heads, residual, stream is None
        ctx.slices = slices
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstream: Tensor | None, dy: Tensor | None) -> Any:
        of_x, of_out, memory, q, out, lse, q_w, q_b, out_w, out_b, *saved = ctx.saved_tensors
        heads = ctx.heads
        dout, dresidual, closing = _close_bwd(ctx, dstream, dy, of_out, out_w, out_b, saved)
        dq, dmemory = ctx.first.gradient_like(q), ctx.slices.like(memory)
        k, v = memory.unflatten(1, (2, heads.count, -1)).unbind(1)
        dk, dv = dmemory.unflatten(1, (2, heads.count, -1)).unbind(1)
        ctx.first.attention_gradients(
            ctx.slices.product, dout=dout.view_as(out), q=q, k=k, v=v, out=out, lse=lse,
            dq=dq, dk=dk, dv=dv, **heads.arguments(dout.shape[1]),
        )  # fmt: skip
        dmemory = ctx.slices.product.to_autograd(dmemory, memory)
        to = gradients_for(q_w, q_b)
        dq_w, dq_b = to.tensors
        dx, dstream = input_gradients(
            ctx.first, ctx.post_norm, dresidual, dq.flatten(1), of_x, q_w, dq_w, dq_b, to.accumulate
        )
        return (dx, dstream, dmemory, None, None, None, *to.handed(), *closing)


class MultiheadAttention(nn.Module):
    """The projections of one attention block, with fairseq's names, shapes and initial values.

    Args:
        embed_dim: width C of the queries and of the output.
        num_heads: H; must divide C.
        key_dim: width of the inputs of the key and value projections (in cross attention the
            encoder's width); default C.
        dropout: rate for the attention probabilities, in training mode.

    Source: ``fairseq.modules.MultiheadAttention``; Vaswani et al. 2017, section 3.2.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, key_dim: int | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        self.num_heads, self.dropout = num_heads, dropout
        key_dim = embed_dim if key_dim is None else key_dim
        # Construct and initialise in fairseq's order, so that the same seed gives the same values.
        self.k_proj = nn.Linear(key_dim, embed_dim)
        self.v_proj = nn.Linear(key_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        gain = 1 / math.sqrt(2) if key_dim == embed_dim else 1.0
        for projection in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(projection.weight, gain=gain)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

    def heads(
        self, queries: Segments, keys: Segments, causal: bool, rng: Tensor, site: int
    ) -> Heads:
        p = self.dropout if self.training else 0.0
        return Heads(self.num_heads, queries, keys, causal, p, rng, site)

    @property
    def self_product(self) -> Product:
        """The product by which ``self_attention`` computes queries, keys and values."""
        return product_for(as_one([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]))

    @property
    def query_product(self) -> Product:
        """The product by which ``cross_attention`` computes queries."""
        return product_for(self.q_proj.weight)

    def self_attention(
        self, x: Tensor, stream: Tensor | None, heads: Heads, residual: Residual
    ) -> tuple[Any, Any]:
        """Self-attention of x [T, C] within sentences; adds the result to ``stream``, normalises.

        ``stream`` is the residual stream; None means that x itself is the residual
        (post-LayerNorm). Returns (new stream, normalised), see ``residual_norm.residual_norm_fwd``.
        """
        q, k, v, o = self.q_proj, self.k_proj, self.v_proj, self.out_proj
        return _SelfAttention.apply(
            x, stream, heads, residual, q.weight, k.weight, v.weight, q.bias, k.bias, v.bias,
            o.weight, o.bias, *residual.parameters,
        )  # fmt: skip

    def cross_attention(
        self, x: Tensor, stream: Tensor | None, memory: Tensor, slices: ColumnSlices,
        heads: Heads, residual: Residual,
    ) -> tuple[Any, Any]:  # fmt: skip
        """As ``self_attention``, with keys and values from ``memory`` [T_src, 2 * C].

        All layers whose memories are column slices of one tensor share one ``slices``.
        """
        q, o = self.q_proj, self.out_proj
        return _CrossAttention.apply(
            x, stream, memory, slices, heads, residual, q.weight, q.bias, o.weight, o.bias,
            *residual.parameters,
        )  # fmt: skip

    def cross_weights(self, x: Tensor, memory: Tensor, heads: Heads) -> Tensor:
        """Attention weights of the queries x [T, C] over ``memory`` [T_src, 2 * C], before dropout.

        For alignments: ``cross_attention`` never stores these weights. Returns float32
        [H, B, L, S], indexed like the padded batches, zero at source pads; differentiable.
        """
        q = F.linear(x, self.q_proj.weight, self.q_proj.bias) * (x.shape[1] // heads.count) ** -0.5
        k = memory[:, : x.shape[1]]
        q, k = (
            side.pad(rows).unflatten(2, (heads.count, -1)).permute(2, 0, 1, 3)
            for side, rows in ((heads.queries, q), (heads.keys, k))
        )
        pads = heads.keys.pad(memory.new_ones(memory.shape[0])) == 0
        scores = (q @ k.transpose(2, 3)).masked_fill(pads[:, None], float("-inf"))
        return torch.softmax(scores, dim=-1, dtype=torch.float32)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Split the stacked ``in_proj`` of checkpoints older than fairseq 0.9."""
        for kind in ("weight", "bias"):
            stacked = state_dict.pop(f"{name}.in_proj_{kind}", None)
            if stacked is not None:
                for projection, rows in zip("qkv", stacked.chunk(3), strict=True):
                    state_dict[f"{name}.{projection}_proj.{kind}"] = rows
