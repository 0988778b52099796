"""Cases of ops/decode_attention.py: one step of beam search with N hypotheses.

own: no two hypotheses share a position, so self-attention must read the maximum. shared: the
hypotheses of a sentence share all positions except the newest eight. Eager gathers keys and values
by the ancestry (in place of fairseq's reordered copy) and calls scaled_dot_product_attention. For
cross-attention, eager's keys and values are padded before the timing and not replicated for the
beam.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops
from lightseq_fairseq.memory.packing import Segments

from .batch import sentence_lengths
from .case import Case, Formula, Make, Sizes, without_autograd

SENTENCES = (1, 64, 1024)
STEP = 28  # position of the newest token
OWN = 8  # positions that hypotheses do not share in the case "shared"


def decode_attention(sizes: Sizes, make: Make) -> Iterator[Case]:
    for sentences in SENTENCES:
        yield _self_attention(sizes, sentences, STEP, make)
        yield _self_attention(sizes, sentences, OWN, make)
        yield _cross_attention(sizes, sentences, make)


def _self_attention(sizes: Sizes, sentences: int, own: int, make: Make) -> Case:
    beam, width, heads = sizes.beam, sizes.width, sizes.heads
    rows = sentences * beam
    scale = (width // heads) ** -0.5
    qkv = make.rows(rows, 3 * width)
    keys, values = make.rows(2, STEP + 1, rows, width).unbind(0)
    ancestry = torch.arange(rows, dtype=torch.int32, device=make.device).repeat(STEP + 1, 1)
    ancestry[: STEP - own] -= ancestry[: STEP - own] % beam
    steps = torch.full((rows,), STEP, dtype=torch.int32, device=make.device)
    positions = torch.arange(STEP + 1, device=make.device)[:, None]

    def formula(qkv: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor]:
        q, k, v = qkv.chunk(3, dim=1)
        keys[STEP], values[STEP] = k, v
        past = (x[positions, ancestry].unflatten(2, (heads, -1)) for x in (keys, values))
        k, v = (x.permute(1, 2, 0, 3) for x in past)  # [N, H, positions, D]
        q = q.unflatten(1, (heads, 1, -1))
        return (functional.scaled_dot_product_attention(q, k, v, scale=scale).flatten(1),)

    def ours() -> tuple[Tensor]:
        return (ops.decode_self_attention(qkv, keys, values, ancestry, steps, heads, scale, beam),)

    fwd, _ = Formula(formula, (qkv, keys, values), ()).systems()
    # Rows of `width` per hypothesis: past keys and values; q, k, v; cached k and v; result.
    past = own + (STEP - own) / beam
    moved = 2 * past + 3 + 2 + 1
    return Case(
        f"decode_self_attention.{'own' if own == STEP else 'shared'}/N{rows}",
        int(rows * (moved * width * qkv.itemsize + STEP * ancestry.itemsize)),
        {"ours": without_autograd(ours), **fwd},
    )


def _cross_attention(sizes: Sizes, sentences: int, make: Make) -> Case:
    beam, width, heads = sizes.beam, sizes.width, sizes.heads
    rows, scale = sentences * beam, (width // heads) ** -0.5
    _, lengths = sentence_lengths(40 * sentences + 40)  # enough tokens for all sentences
    source = Segments.from_lengths(lengths[:sentences].to(make.device))
    q = make.rows(rows, width)
    tokens = len(source.index)
    keys, values = make.rows(tokens, 2 * sizes.decoder_layers * width)[:, : 2 * width].chunk(2, 1)
    numbers = torch.arange(sentences, dtype=torch.int32, device=make.device)
    k, v = (source.pad(x.unflatten(1, (heads, -1))).transpose(1, 2) for x in (keys, values))
    shown = torch.arange(source.max_len, device=make.device) < source.cu_seqlens.diff()[:, None]

    def formula(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        queries = q.view(sentences, beam, heads, -1).transpose(1, 2)
        out = functional.scaled_dot_product_attention(
            queries, k, v, attn_mask=shown[:, None, None], scale=scale
        )
        return (out.transpose(1, 2).reshape(rows, width),)

    def ours() -> tuple[Tensor]:
        return (
            ops.decode_cross_attention(
                q, keys, values, source.cu_seqlens, numbers, beam, heads, scale
            ),
        )

    fwd, _ = Formula(formula, (q, k, v), ()).systems()
    return Case(
        f"decode_cross_attention/N{rows}",
        2 * (tokens + rows) * width * q.itemsize,
        {"ours": without_autograd(ours), **fwd},
    )
