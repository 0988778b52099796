"""Cases of ops/embedding.py and ops/fp8_embedding.py."""

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
from .fp8 import scalars


def embedding(sizes: Sizes, tokens: int, make: Make) -> Iterator[Case]:
    target, _ = segments(tokens, make.device)
    width, p, rng, eps = sizes.width, sizes.dropout, make.rng(), 1e-5
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

    def forward(p: float = p) -> tuple[Tensor]:
        return (ops.embedding_fwd(ids, weight, positions, table, scale, p, rng, SITE),)

    def backward(dy: Tensor = dy, p: float = p) -> tuple[Tensor]:
        dweight = torch.empty_like(weight)
        ops.embedding_bwd(dy, ids, positions, scale, PAD, p, rng, SITE, dweight, None, False)
        return (dweight,)

    def normed_forward() -> tuple[Tensor, ...]:
        return ops.embedding_layer_norm_fwd(
            ids, weight, positions, table, gamma, beta, scale, p, rng, SITE, eps
        )

    def normed_backward() -> Run:
        _, mean, rstd = torch.no_grad()(normed_forward)()

        def run() -> tuple[Tensor, ...]:
            (x,), dgamma, dbeta = forward(0.0), torch.empty_like(gamma), torch.empty_like(beta)
            dx = ops.embedding_layer_norm_bwd(
                dy, x, gamma, mean, rstd, p, rng, SITE, dgamma, dbeta, False
            )
            return *backward(dx, 0.0), dgamma, dbeta

        return torch.no_grad()(run)

    of_cast = scalars(make, 6.0)

    def cast_forward() -> tuple[Tensor, ...]:
        return ops.fp8_embedding_fwd(ids, weight, positions, table, scale, p, rng, SITE, *of_cast)

    def cast_normed_forward() -> tuple[Tensor, ...]:
        return ops.fp8_embedding_layer_norm_fwd(
            ids, weight, positions, table, gamma, beta, scale, p, rng, SITE, eps, *of_cast
        )

    fwd, bwd = Formula(formula, (weight,), (dy,)).systems()
    normed_fwd, normed_bwd = Formula(normed_formula, (weight, gamma, beta), (dy,)).systems()
    row = width * dy.itemsize
    read = len(ids.unique()) + target.max_len
    indices, statistics = tokens * ids.itemsize, 2 * 4 * tokens
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
    for name, cast, least in (
        ("embedding_fwd", cast_forward, 0),
        ("embedding_layer_norm_fwd", cast_normed_forward, statistics),
    ):
        yield Case(
            f"fp8_{name}/T{tokens}",
            (tokens + read) * row + tokens * width + 2 * indices + least,
            {"ours": without_autograd(cast)},
        )
