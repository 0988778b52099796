"""Cases of ops/embedding.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops
from lightseq_fairseq.layers import sinusoidal_positions

from .batch import segments, zipf_tokens
from .case import PAD, SITE, Case, Formula, Make, Sizes, without_autograd


def embedding(sizes: Sizes, tokens: int, make: Make) -> Iterator[Case]:
    target, _ = segments(tokens, make.device)
    width, p, rng = sizes.width, sizes.dropout, make.rng()
    scale = math.sqrt(width)
    ids = zipf_tokens(tokens, sizes.vocabulary, make.device)
    positions = target.positions + PAD + 1
    weight = make.leaf(sizes.vocabulary, width, scale=width**-0.5)
    table = sinusoidal_positions(target.max_len + PAD + 1, width, PAD).to(weight)
    dy = make.rows(tokens, width)

    def formula(weight: Tensor) -> tuple[Tensor, ...]:
        x = functional.embedding(ids, weight, padding_idx=PAD) * scale
        x = x + functional.embedding(positions, table)
        return (functional.dropout(x, p),)

    def forward() -> tuple[Tensor]:
        return (ops.embedding_fwd(ids, weight, positions, table, scale, p, rng, SITE),)

    def backward() -> tuple[Tensor]:
        dweight = torch.empty_like(weight)
        ops.embedding_bwd(dy, ids, positions, scale, PAD, p, rng, SITE, dweight, None, False)
        return (dweight,)

    fwd, bwd = Formula(formula, (weight,), (dy,)).systems()
    row = width * dy.itemsize
    read = len(ids.unique()) + target.max_len
    indices = tokens * ids.itemsize
    yield Case(
        f"embedding_fwd/T{tokens}",
        (tokens + read) * row + 2 * indices,
        {"ours": without_autograd(forward), **fwd},
    )
    # Backward writes the whole table: rows of words that are not in the batch become zeros.
    yield Case(
        f"embedding_bwd/T{tokens}",
        (tokens + sizes.vocabulary) * row + indices,
        {"ours": without_autograd(backward), **bwd},
    )
