"""Plain PyTorch Transformers on rows without pads: standard modules, and attention from torch.

A translation model reads packed sentences, by FlashAttention-2. It calls the op behind
``torch.nn.attention.varlen`` directly, because that function has no dropout. A language model reads
blocks of one length, by ``scaled_dot_product_attention``; `fastest_backend` chooses its kernels.
RoBERTa reads such blocks, packed samples, or samples padded to one length.

Shapes: T = packed rows, B = sentences or blocks, L = tokens of a block, C = width, H = heads,
M = a fixed number of rows: the masked tokens, then rows without a label.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightseq_fairseq.cli.benchmark.train.batches import Blocks, MaskedRows, Pairs
from lightseq_fairseq.cli.benchmark.train.cases import Case
from lightseq_fairseq.cli.benchmark.train.shapes import DROPOUT, UNUSED_POSITIONS, Shape

PAD = 1
LONGEST = 256  # maximum rows of a packed sentence of a pair
SMOOTHING = 0.1
BACKENDS = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, p: float, causal: bool,
    longest: int = LONGEST,
) -> Tensor:  # fmt: skip
    """Attention within sentences of up to ``longest`` rows: q [T, H, C / H] -> same shape.

    Without a GPU by a dense mask.
    """
    if q.device.type != "cpu":
        flash = torch.ops.aten._flash_attention_forward
        out: Tensor = flash(q, k, v, cu_q, cu_k, longest, longest, p, causal, False)[0]
        return out
    rows_q, rows_k = torch.arange(len(q)), torch.arange(len(k))
    in_q, in_k = (torch.searchsorted(cu[1:], rows, right=True)
                  for cu, rows in ((cu_q, rows_q), (cu_k, rows_k)))  # fmt: skip
    mask = in_q[:, None] == in_k
    mask = mask & (rows_q[:, None] >= rows_k) if causal else mask
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, mask, p)
    return out.transpose(0, 1)


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, p: float, causal: bool = True, mask: Tensor | None = None
) -> Tensor:
    """Attention within blocks: q [B, L, H, C / H] -> same shape.

    mask: bool [B, 1, 1 or L, L], True at keys that are no pads.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, mask, p, causal)
    return out.transpose(1, 2)


def fastest_backend(case: Case, mask: Tensor | None = None) -> SDPBackend:
    """The kernels that run the attention of this case in the least time, forward and backward.

    Kernels that lack its dropout, its sizes or this mask of `block_attention` do not take part.
    """
    milliseconds = {}
    for backend in BACKENDS:
        with sdpa_kernel(backend):
            try:
                milliseconds[backend] = _attention_ms(case, mask)
            except RuntimeError:
                continue
    return min(milliseconds, key=lambda backend: milliseconds[backend])


def _attention_ms(case: Case, mask: Tensor | None, warm_up: int = 3, runs: int = 20) -> float:
    """The time of `block_attention` and its backward pass on a GPU, in milliseconds."""
    shape = case.shape
    sizes = case.blocks, case.longest, 3, shape.heads, shape.width // shape.heads
    qkv = torch.randn(sizes, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(warm_up + runs):
        if number == warm_up:
            begin.record()
        q, k, v = qkv.unbind(2)
        causal = mask is None and not shape.is_masked
        out = block_attention(q, k, v, shape.attention_dropout, causal, mask)
        torch.autograd.grad(out, qkv, out)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / runs


class PackedAttention(nn.Module):
    """Multi-head attention: self-attention, or with ``cross`` on a memory [T, C].

    Without sentence boundaries ``cu``, the rows are blocks [B, L, C].
    """

    def __init__(self, shape: Shape, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        c, self.heads, self.p = shape.width, shape.heads, shape.attention_dropout
        self.causal, self.longest = causal, shape.positions or LONGEST
        self.projections = nn.ModuleList(nn.Linear(c, n * c) for n in ((1, 2) if cross else (3,)))
        self.out = nn.Linear(c, c)

    def forward(
        self, x: Tensor, cu: Tensor | None, memory: Tensor | None = None,
        cu_memory: Tensor | None = None, mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        inputs, cu_k = ((x,), cu) if memory is None else ((x, memory), cu_memory)
        width = self.out.in_features // self.heads
        q, k, v = (
            part
            for projection, rows in zip(self.projections, inputs)
            for part in projection(rows).unflatten(-1, (-1, self.heads, width)).unbind(-3)
        )
        p = self.p if self.training else 0.0
        if cu is None or cu_k is None:
            out = block_attention(q, k, v, p, self.causal, mask)
        else:
            out = packed_attention(q, k, v, cu, cu_k, p, self.causal, self.longest)
        return self.out(out.reshape(x.shape))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.width, shape.ffn)
        self.fc2 = nn.Linear(shape.ffn, shape.width)
        self.p = shape.activation_dropout
        self.activation = getattr(functional, shape.activation)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(self.activation(self.fc1(x)), self.p, self.training)
        return self.fc2(x)


class Layer(nn.Module):
    """A layer: attention, cross attention if it has one, feed-forward."""

    def __init__(self, shape: Shape, causal: bool, cross: bool) -> None:
        super().__init__()
        self.pre = shape.normalize_before
        self.attention = PackedAttention(shape, causal)
        self.cross = PackedAttention(shape, cross=True) if cross else None
        self.feed_forward = FeedForward(shape)
        self.norms = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(2 + cross))

    def forward(
        self, x: Tensor, cu: Tensor | None = None, memory: Tensor | None = None,
        cu_memory: Tensor | None = None, mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        sublayers: list[Callable[[Tensor], Tensor]]
        sublayers = [lambda y: self.attention(y, cu, mask=mask), self.feed_forward]
        if (cross := self.cross) is not None:
            sublayers.insert(1, lambda y: cross(y, cu, memory, cu_memory))
        for norm, sublayer in zip(self.norms, sublayers):
            y = functional.dropout(sublayer(norm(x) if self.pre else x), DROPOUT, self.training)
            x = x + y if self.pre else norm(x + y)
        return x


class Model(nn.Module):
    """What the models of all families have in common: embeddings, positions, layers, loss.

    longest: tokens of the longest sentence or block, for sinusoidal positions.
    """

    positions: Tensor

    def __init__(self, shape: Shape, vocabulary: int, longest: int = LONGEST) -> None:
        super().__init__()
        c = shape.width
        # RoBERTa's embedding is normalised instead of scaled, and its first values are BERT's.
        deviation = 0.02 if shape.is_masked else c**-0.5
        self.scale = 1.0 if shape.is_masked else c**0.5
        self.embedding_norm = nn.LayerNorm(c) if shape.is_masked else nn.Identity()
        self.embedding = _embedding(vocabulary, c, deviation)
        self.output = self.embedding if shape.tied else _embedding(vocabulary, c, deviation)
        self.learned: nn.Embedding | None = None
        if shape.positions:
            self.learned = _embedding(shape.positions + UNUSED_POSITIONS, c, deviation)
        else:
            self.register_buffer("positions", sinusoids(longest, c))
        self.encoder = nn.ModuleList(
            Layer(shape, causal=False, cross=False) for _ in range(shape.encoder_layers)
        )
        self.decoder = nn.ModuleList(
            Layer(shape, causal=True, cross=not shape.is_language_model)
            for _ in range(shape.decoder_layers)
        )
        self.encoder_norm, self.decoder_norm = (
            nn.LayerNorm(c) if shape.normalize_before and layers else nn.Identity()
            for layers in (self.encoder, self.decoder)
        )

    def _table(self) -> Tensor:
        """The embeddings of the positions from 0 on."""
        return self.positions if self.learned is None else self.learned.weight[UNUSED_POSITIONS:]

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding_norm(self.embedding(tokens) * self.scale + positions)
        return functional.dropout(x, DROPOUT, self.training)

    def _loss(
        self, x: Tensor, target: Tensor, smoothing: float, bias: Tensor | None = None
    ) -> Tensor:
        """The loss of rows x [..., C] and targets [...], summed over targets that are no pads."""
        weight = self.output.weight
        vocabulary = len(weight)
        if spare := -vocabulary % 64:  # products with rows of odd sizes are slow
            weight = functional.pad(weight, (0, 0, 0, spare))
            bias = None if bias is None else functional.pad(bias, (0, spare))
        logits = functional.linear(x.flatten(0, -2), weight, bias)[:, :vocabulary]
        return functional.cross_entropy(
            logits.float(), target.flatten(), ignore_index=PAD, reduction="sum",
            label_smoothing=smoothing,
        )  # fmt: skip


class Transformer(Model):
    """Translation model with one shared embedding; computes the label-smoothed loss of a batch."""

    def forward(self, *inputs: Tensor) -> Tensor:
        batch = Pairs(*inputs)
        table = self._table()
        x = self._embed(batch.source, table[batch.source_positions])
        for layer in self.encoder:
            x = layer(x, batch.cu_source)
        memory = self.encoder_norm(x)
        x = self._embed(batch.previous, table[batch.target_positions])
        for layer in self.decoder:
            x = layer(x, batch.cu_target, memory, batch.cu_source)
        return self._loss(self.decoder_norm(x), batch.target, SMOOTHING)


class LanguageModel(Model):
    """Decoder-only language model; computes the loss of blocks of up to ``longest`` tokens."""

    def forward(self, *inputs: Tensor) -> Tensor:
        batch = Blocks(*inputs)
        x = self._embed(batch.tokens, self._table()[: batch.tokens.shape[1]])
        for layer in self.decoder:
            x = layer(x)
        return self._loss(self.decoder_norm(x), batch.target, 0.0)


class MaskedLanguageModel(Model):
    """RoBERTa; computes the loss of the masked tokens of a batch.

    has_pads: samples that are not packed are padded.
    """

    def __init__(self, shape: Shape, vocabulary: int, has_pads: bool) -> None:
        super().__init__(shape, vocabulary)
        self.has_pads = has_pads
        self.dense = nn.Linear(shape.width, shape.width)
        self.head_norm = nn.LayerNorm(shape.width)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.activation = getattr(functional, shape.activation)

    def forward(self, *inputs: Tensor) -> Tensor:
        batch = MaskedRows(*inputs)
        table, tokens, cu, mask = self._table(), batch.tokens, None, None
        if tokens.dim() == 1:
            cu, positions = batch.cu, table[batch.positions]
        else:
            positions = table[: tokens.shape[1]]
            mask = tokens.ne(PAD)[:, None, None] if self.has_pads else None
        x = self._embed(tokens, positions)
        for layer in self.encoder:
            x = layer(x, cu, mask=mask)
        x = x.flatten(0, -2)[batch.rows]
        x = self.head_norm(self.activation(self.dense(x)))
        return self._loss(x, batch.target, 0.0, self.bias)


def build(shape: Shape, vocabulary: int, block: int, has_pads: bool = False) -> Model:
    """The model of a case.

    Args:
        block: tokens of a block of a language model.
        has_pads: see `MaskedLanguageModel`.
    """
    if shape.is_masked:
        return MaskedLanguageModel(shape, vocabulary, has_pads)
    family = LanguageModel if shape.is_language_model else Transformer
    return family(shape, vocabulary, block or LONGEST)


def sinusoids(positions: int, width: int) -> Tensor:
    """fairseq's table [positions, width] of sinusoidal positions."""
    half = width // 2
    frequencies = 10000 ** -(torch.arange(half) / (half - 1))
    angles = torch.arange(UNUSED_POSITIONS, UNUSED_POSITIONS + positions)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), 1)


def _embedding(rows: int, width: int, deviation: float) -> nn.Embedding:
    table = nn.Embedding(rows, width, padding_idx=PAD)
    nn.init.normal_(table.weight, std=deviation)
    return table
