"""Attention sublayers: projections and attention.

Shapes: T = packed tokens, B = sentences, L = longest sentence, S = longest source, C = model width,
H = heads, D = head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightseq_fairseq import ops
from lightseq_fairseq.layers.adapter import adapter_of
from lightseq_fairseq.layers.node import Input
from lightseq_fairseq.layers.residual_norm import Norm
from lightseq_fairseq.layers.stack import Sublayer
from lightseq_fairseq.layers.weight import Projection, Weight
from lightseq_fairseq.memory.gradients import Gradients
from lightseq_fairseq.memory.packing import Segments
from lightseq_fairseq.ops import Dropout
from lightseq_fairseq.ops.arguments import Operand


@dataclass(frozen=True, kw_only=True)
class Attention(Sublayer):
    """Self-attention, whose ``first`` makes queries, keys and values; or cross attention, whose
    ``first`` makes queries.

    Attributes:
        heads: their number H.
        rotation: cos and sin, by which queries and keys are rotated, see ``ops.rotary_embedding``.
        arguments: see `MultiheadAttention.arguments`.
        keys_values: in cross attention, makes the memory of all layers of a stack.
        of_columns: those of its parameters that make the columns of this layer.
    """

    heads: int
    arguments: dict[str, Any]
    rotation: tuple[Tensor, Tensor] | None = None
    keys_values: Weight | None = None
    of_columns: tuple[Tensor, ...] = ()

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return *super().parameters, *self.of_columns

    def forward(self, x: Input, memory: Tensor | None) -> tuple[Tensor, Any]:
        y, of_x = self.first.multiply(x)
        self._rotate(y)
        q, k, v = self._split(y, memory)
        cast = self.last.input_cast
        out, lse, values = ops.attention_fwd(q, k, v, **self.arguments, cast=cast)
        h, of_out = self.last.multiply(Input(out.flatten(1), values, None, cast))
        return h, (of_x, y, memory, out, lse, of_out)

    def backward(
        self, dh: Operand, kept: Any, to: Gradients, onto: Tensor | None, dmemory: Tensor | None
    ) -> Tensor:
        of_x, y, memory, out, lse, of_out = kept
        dout = self.last.backward(dh, of_out, to)
        casts = self.first.gradient_cast, (self.keys_values or self.first).gradient_cast
        dy = self.first.gradient_like(y)
        if self.rotation is not None:  # it is rotated before it is cast
            casts, dy = (None, None), torch.empty_like(y)
        (q, k, v), (dq, dk, dv) = self._split(y, memory), self._split(dy, dmemory)
        ops.attention_bwd(
            dout.view_as(out), q, k, v, out, lse, **self.arguments, dq=dq, dk=dk, dv=dv,
            q_cast=casts[0], k_cast=casts[1],
        )  # fmt: skip
        self._rotate(dy, transposed=True)
        return self.first.backward(dy, of_x, to, onto=onto)

    def _rotate(self, y: Tensor, transposed: bool = False) -> None:
        """Rotate queries and keys of self-attention, or their gradients, in place."""
        if self.rotation is not None:
            both = y.unflatten(1, (3 * self.heads, -1))[:, : 2 * self.heads]
            ops.rotary_embedding(both, *self.rotation, transposed)

    def _split(self, y: Tensor, memory: Tensor | None) -> tuple[Tensor, ...]:
        """Queries, keys and values, [T, H, D] each, or their gradients."""
        if memory is None:
            return y.unflatten(1, (3, self.heads, -1)).unbind(1)
        keys, values = memory.unflatten(1, (2, self.heads, -1)).unbind(1)
        return y.unflatten(1, (self.heads, -1)), keys, values


class AttentionParts:
    """The projections of one attention block, in fairseq's modules or in another library's.

    Attributes:
        q_proj, k_proj, v_proj, out_proj: its projections.
        num_heads: H.
        dropout: rate for the attention probabilities, if ``training``.
        window: tokens on each side of a token to which it attends; 0: all.
        rotation: see `Attention`.
    """

    q_proj: Projection
    k_proj: Projection
    v_proj: Projection
    out_proj: Projection
    num_heads: int
    dropout: float
    training: bool
    window: int = 0
    rotation: tuple[Tensor, Tensor] | None = None

    def arguments(
        self, queries: Segments, keys: Segments, causal: bool, rng: Tensor, site: int
    ) -> dict[str, Any]:
        """The arguments that ``ops.attention_fwd`` and ``_bwd`` share, besides q, k and v.

        causal: a token attends only to itself and to earlier tokens.
        site: of the dropout of the attention probabilities.
        """
        # References compute up to this bound, so on a CPU it is the tighter bound of this batch.
        max_q, max_k = (
            side.graph_len if rng.is_cuda and side.graph_len else side.max_len
            for side in (queries, keys)
        )
        return {
            "cu_q": queries.cu_seqlens,
            "cu_k": keys.cu_seqlens,
            "max_q": max_q,
            "max_k": max_k,
            "causal": causal,
            "window": self.window,
            "scale": 1.0 / math.sqrt(self.q_proj.out_features // self.num_heads),
            "dropout": Dropout(self.dropout if self.training else 0.0, rng, site),
        }

    def sublayer(
        self, arguments: dict[str, Any], norm: Norm | None, dropout: Dropout,
        memory: Weight | None = None, place: int = 0,
    ) -> Attention:  # fmt: skip
        """Self-attention, or with ``memory`` cross attention of the layer ``place`` of a stack.

        arguments: see `arguments`. dropout: of the result. memory: makes keys and values of all
        layers, see ``decoder.memory_weight``.
        """
        width = 2 * self.k_proj.out_features
        sources = [self.k_proj, self.v_proj]
        read = [self.q_proj, *(sources if memory is None else [])]
        return Attention(
            norm=norm, first=Weight.of(*read, rng=dropout.rng),
            last=Weight.of(self.out_proj, bias=False, rng=dropout.rng),
            bias=self.out_proj.bias, dropout=dropout,
            columns=None if memory is None else slice(place * width, (place + 1) * width),
            heads=self.num_heads, arguments=arguments, keys_values=memory, rotation=self.rotation,
            of_columns=() if memory is None else Weight.of(*sources).parameters,
        )  # fmt: skip


class MultiheadAttention(AttentionParts, nn.Module):
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

    def cross_weights(self, x: Tensor, memory: Tensor, queries: Segments, keys: Segments) -> Tensor:
        """Attention weights of the queries x [T, C] over ``memory`` [T_src, 2 * C], before dropout.

        For alignments: the cross attention never stores these weights. Returns float32
        [H, B, L, S], indexed like the padded batches, zero at source pads; differentiable.
        """
        heads = self.num_heads
        q = F.linear(x, self.q_proj.weight, self.q_proj.bias)
        if (adapter := adapter_of(self.q_proj)) is not None:
            q = q + adapter(x)
        q = q * (x.shape[1] // heads) ** -0.5
        k = memory[:, : x.shape[1]]
        q, k = (
            side.pad(rows).unflatten(2, (heads, -1)).permute(2, 0, 1, 3)
            for side, rows in ((queries, q), (keys, k))
        )
        pads = keys.pad(memory.new_ones(memory.shape[0])) == 0
        scores = (q @ k.transpose(2, 3)).masked_fill(pads[:, None], float("-inf"))
        return torch.softmax(scores, dim=-1, dtype=torch.float32)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Split the stacked ``in_proj`` of checkpoints older than fairseq 0.9."""
        for kind in ("weight", "bias"):
            stacked = state_dict.pop(f"{name}.in_proj_{kind}", None)
            if stacked is not None:
                for projection, rows in zip("qkv", stacked.chunk(3), strict=True):
                    state_dict[f"{name}.{projection}_proj.{kind}"] = rows
