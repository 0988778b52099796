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
from .case import PAD, SITE, Case, Formula, Make, Run, Sizes, without_autograd
from .fp8 import cast_of


def embedding(sizes: Sizes, tokens: int, make: Make) -> Iterator[Case]:
    target, _ = segments(tokens, make.device)
    width, p, eps = sizes.width, sizes.dropout, 1e-5
    dropout, none = (ops.Dropout(rate, rng, SITE) for rng in [make.rng()] for rate in (p, 0.0))
    scale = math.sqrt(width)
    ids = zipf_tokens(tokens, sizes.vocabulary, make.device)
    positions = target.positions + PAD + 1
    weight = make.leaf(sizes.vocabulary, width, scale=width**-0.5)
    table = sinusoidal_positions(target.max_len + PAD + 1, width, PAD).to(weight)
    gamma, beta = make.leaf(width), make.leaf(width)
    dy = make.rows(tokens, width)

    def look_up(weight: Tensor) -> Tensor:
        x = functional.embedding(ids, weight, padding_idx=PAD) * scale
        return x + functional.embedding(positions, table)

    def formula(weight: Tensor) -> tuple[Tensor, ...]:
        return (functional.dropout(look_up(weight), p),)

    def normed_formula(weight: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        y = functional.layer_norm(look_up(weight), (width,), gamma, beta, eps)
        return (functional.dropout(y, p),)

    def forward(dropout: ops.Dropout = dropout, cast: ops.Cast | None = None) -> tuple[Tensor, ...]:
        return ops.embedding_fwd(ids, weight, positions, table, scale, dropout, cast)

    def backward(dy: Tensor = dy, dropout: ops.Dropout = dropout) -> tuple[Tensor]:
        dweight = torch.empty_like(weight)
        ops.embedding_bwd(dy, ids, positions, scale, PAD, dropout, dweight, None, False)
        return (dweight,)

    def normed_forward(cast: ops.Cast | None = None) -> tuple[Tensor, ...]:
        return ops.embedding_layer_norm_fwd(
            ids, weight, positions, table, gamma, beta, scale, dropout, eps=eps, cast=cast
        )

    def normed_backward() -> Run:
        _, mean, rstd, _ = torch.no_grad()(normed_forward)()

        def run() -> tuple[Tensor, ...]:
            x, dgamma, dbeta = forward(none)[0], torch.empty_like(gamma), torch.empty_like(beta)
            dx = ops.embedding_layer_norm_bwd(
                dy, x, gamma, mean, rstd, dropout, dgamma, dbeta, False
            )
            return *backward(dx, none), dgamma, dbeta

        return torch.no_grad()(run)

    fwd, bwd = Formula(formula, (weight,), (dy,)).systems()
    normed_fwd, normed_bwd = Formula(normed_formula, (weight, gamma, beta), (dy,)).systems()
    row = width * dy.itemsize
    read = len(ids.unique()) + target.max_len
    indices, statistics = tokens * ids.itemsize, 2 * 4 * tokens
    yield Case(
        f"embedding_fwd/T{tokens}",
        (tokens + read) * row + 2 * indices,
        {"ours": without_autograd(lambda: forward()[:1]), **fwd},
    )
    # Backward writes the whole table: rows of words that are not in the batch become zeros.
    yield Case(
        f"embedding_bwd/T{tokens}",
        (tokens + sizes.vocabulary) * row + indices,
        {"ours": without_autograd(backward), **bwd},
    )
    yield Case(
        f"embedding_layer_norm_fwd/T{tokens}",
        (tokens + read) * row + 2 * indices + statistics,
        {"ours": without_autograd(lambda: normed_forward()[:1]), **normed_fwd},
    )
    # All of backward: the look-up again, LayerNorm, and the table.
    yield Case(
        f"embedding_layer_norm_bwd/T{tokens}",
        (tokens + read + sizes.vocabulary) * row + 2 * indices + statistics,
        {"ours": normed_backward, **normed_bwd},
    )
    if make.dtype != torch.bfloat16:
        return
    # As in post-LayerNorm stacks, whose first product reads the embedding.
    cast = cast_of(make, 6.0)
    for name, run, least in (
        ("embedding_fwd", lambda: forward(cast=cast), 0),
        ("embedding_layer_norm_fwd", lambda: normed_forward(cast), statistics),
    ):
        yield Case(
            f"fp8_{name}/T{tokens}",
            (tokens + read) * row + tokens * width + 2 * indices + least,
            {"ours": without_autograd(run)},
        )
