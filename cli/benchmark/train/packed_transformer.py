"""A plain PyTorch Transformer on packed tokens: standard modules, and FlashAttention-2 from torch.

It calls the op behind ``torch.nn.attention.varlen`` directly, because that function has no dropout.

Shapes: T = packed rows, B = sentences, C = width, H = heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightseq_fairseq.cli.benchmark.train.cases import DROPOUT, Shape

PAD = 1
LONGEST = 256  # maximum rows of a sentence
SMOOTHING = 0.1


class Batch(NamedTuple):
    """Packed batch: int64 [T] tokens and positions, int32 [B + 1] sentence boundaries."""

    source: Tensor
    source_positions: Tensor
    cu_source: Tensor
    previous: Tensor
    target_positions: Tensor
    cu_target: Tensor
    target: Tensor


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, p: float, causal: bool
) -> Tensor:
    """Attention within sentences: q [T, H, C / H] -> same shape; without a GPU by a dense mask."""
    if q.device.type != "cpu":
        flash = torch.ops.aten._flash_attention_forward
        out: Tensor = flash(q, k, v, cu_q, cu_k, LONGEST, LONGEST, p, causal, False)[0]
        return out
    rows_q, rows_k = torch.arange(len(q)), torch.arange(len(k))
    in_q, in_k = (torch.searchsorted(cu[1:], rows, right=True)
                  for cu, rows in ((cu_q, rows_q), (cu_k, rows_k)))  # fmt: skip
    mask = in_q[:, None] == in_k
    mask = mask & (rows_q[:, None] >= rows_k) if causal else mask
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, mask, p)
    return out.transpose(0, 1)


class PackedAttention(nn.Module):
    """Multi-head attention; self-attention if no memory [T, C] is given."""

    def __init__(self, shape: Shape, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        c, self.heads, self.p = shape.width, shape.heads, shape.attention_dropout
        self.causal = causal
        self.projections = nn.ModuleList(nn.Linear(c, n * c) for n in ((1, 2) if cross else (3,)))
        self.out = nn.Linear(c, c)

    def forward(self, x: Tensor, memory: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        inputs = (x, memory) if len(self.projections) == 2 else (x,)
        width = self.out.in_features // self.heads
        q, k, v = (
            part
            for projection, rows in zip(self.projections, inputs)
            for part in projection(rows).view(len(rows), -1, self.heads, width).unbind(1)
        )
        out = packed_attention(q, k, v, cu_q, cu_k, self.p if self.training else 0.0, self.causal)
        return self.out(out.reshape(x.shape))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.width, shape.ffn)
        self.fc2 = nn.Linear(shape.ffn, shape.width)
        self.p = shape.activation_dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.dropout(functional.relu(self.fc1(x)), self.p, self.training))


class Layer(nn.Module):
    """An encoder layer, or a decoder layer: attention, cross attention, feed-forward."""

    def __init__(self, shape: Shape, decoder: bool) -> None:
        super().__init__()
        self.pre = shape.normalize_before
        self.attention = PackedAttention(shape, causal=decoder)
        self.cross = PackedAttention(shape, cross=True) if decoder else None
        self.feed_forward = FeedForward(shape)
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(3 if decoder else 2))

    def forward(self, x: Tensor, cu: Tensor, memory: Tensor, cu_memory: Tensor) -> Tensor:
        def attend(y: Tensor) -> Tensor:
            return self.attention(y, y, cu, cu)

        def cross(y: Tensor) -> Tensor:
            assert self.cross is not None
            return self.cross(y, memory, cu, cu_memory)

        sublayers: Sequence[Callable[[Tensor], Tensor]] = (
            (attend, self.feed_forward)
            if self.cross is None
            else (attend, cross, self.feed_forward)
        )
        for norm, sublayer in zip(self.norms, sublayers):
            y = functional.dropout(sublayer(norm(x) if self.pre else x), DROPOUT, self.training)
            x = x + y if self.pre else norm(x + y)
        return x


class Transformer(nn.Module):
    """Transformer with one shared embedding; computes the summed label-smoothed loss of a batch."""

    positions: Tensor

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, shape.width, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=shape.width**-0.5)
        angles = torch.arange(LONGEST)[:, None] / 10000 ** (
            torch.arange(shape.width // 2) / (shape.width // 2)
        )
        self.register_buffer("positions", torch.cat((angles.sin(), angles.cos()), 1))
        self.encoder = nn.ModuleList(Layer(shape, False) for _ in range(shape.encoder_layers))
        self.decoder = nn.ModuleList(Layer(shape, True) for _ in range(shape.decoder_layers))
        last = [
            nn.LayerNorm(shape.width) if shape.normalize_before else nn.Identity() for _ in "ed"
        ]
        self.last_norms = nn.ModuleList(last)

    def forward(self, *inputs: Tensor) -> Tensor:
        batch = Batch(*inputs)
        x = self._embed(batch.source, batch.source_positions)
        for layer in self.encoder:
            x = layer(x, batch.cu_source, x, batch.cu_source)
        memory = self.last_norms[0](x)
        x = self._embed(batch.previous, batch.target_positions)
        for layer in self.decoder:
            x = layer(x, batch.cu_target, memory, batch.cu_source)
        logits = functional.linear(self.last_norms[1](x), self.embedding.weight)
        return functional.cross_entropy(
            logits.float(), batch.target, ignore_index=PAD, reduction="sum",
            label_smoothing=SMOOTHING,
        )  # fmt: skip

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.embedding.embedding_dim**0.5 + self.positions[positions]
        return functional.dropout(x, DROPOUT, self.training)
