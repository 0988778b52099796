"""Cases of ops/dropout_residual_layer_norm.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops

from .case import SITE, Case, Formula, Make, Run, Sizes, without_autograd


def dropout_residual_layer_norm(sizes: Sizes, tokens: int, make: Make) -> Iterator[Case]:
    """Yield the pre-LayerNorm cases: the sum is also the next residual, so it has a gradient."""
    width, p, eps = sizes.width, sizes.dropout, 1e-5
    dropout = ops.Dropout(p, make.rng(), SITE)
    x, residual = make.leaf(tokens, width), make.leaf(tokens, width)
    bias, gamma, beta = (make.leaf(width) for _ in range(3))
    dsum, dy = make.rows(tokens, width), make.rows(tokens, width)

    def formula(
        x: Tensor, residual: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor
    ) -> tuple[Tensor, ...]:
        total = residual + functional.dropout(x + bias, p)
        return total, functional.layer_norm(total, (width,), gamma, beta, eps)

    def results() -> tuple[Tensor, ...]:
        return ops.dropout_residual_layer_norm_fwd(x, bias, residual, gamma, beta, dropout, eps)

    def ours_backward() -> Run:
        total, _, mean, rstd, _, _ = torch.no_grad()(results)()

        def run() -> tuple[Tensor, ...]:
            dbias, dgamma, dbeta = (torch.empty_like(v) for v in (bias, gamma, beta))
            dx, dresidual, _ = ops.dropout_residual_layer_norm_bwd(
                dy, dsum, total, gamma, mean, rstd, dropout, dgamma, dbeta, dbias, False
            )
            return dx if p > 0 else dresidual, dresidual, dbias, dgamma, dbeta

        return torch.no_grad()(run)

    fwd, bwd = Formula(formula, (x, residual, bias, gamma, beta), (dsum, dy)).systems()
    statistics = 2 * 4 * tokens
    stem = "dropout_residual_layer_norm"
    yield Case(
        f"{stem}_fwd/T{tokens}",
        4 * x.nbytes + statistics,
        {"ours": without_autograd(lambda: results()[:2]), **fwd},
    )
    yield Case(f"{stem}_bwd/T{tokens}", 5 * x.nbytes + statistics, {"ours": ours_backward, **bwd})
