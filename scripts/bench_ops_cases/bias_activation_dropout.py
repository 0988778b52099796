"""Cases of ops/bias_activation_dropout.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops

from .case import SITE, Case, Formula, Make, Sizes, without_autograd


def bias_activation_dropout(sizes: Sizes, tokens: int, make: Make) -> Iterator[Case]:
    p = sizes.dropout
    dropout = ops.Dropout(p, make.rng(), SITE)
    x, bias = make.leaf(tokens, sizes.ffn), make.leaf(sizes.ffn)
    dy = make.rows(tokens, sizes.ffn)

    def formula(x: Tensor, bias: Tensor) -> tuple[Tensor]:
        return (functional.dropout(functional.relu(x + bias), p),)

    def forward() -> tuple[Tensor]:
        return (ops.bias_activation_dropout_fwd(x, bias, "relu", dropout),)

    def backward() -> tuple[Tensor, Tensor]:
        dbias = torch.empty_like(bias)
        dx = ops.bias_activation_dropout_bwd(dy, x, bias, "relu", dropout, dbias, False)
        return dx, dbias

    fwd, bwd = Formula(formula, (x, bias), (dy,)).systems()
    stem = "bias_activation_dropout"
    fwd, bwd = (
        {"ours": without_autograd(forward), **fwd},
        {"ours": without_autograd(backward), **bwd},
    )
    yield Case(f"{stem}_fwd/T{tokens}", 2 * x.nbytes, fwd)
    yield Case(f"{stem}_bwd/T{tokens}", 3 * x.nbytes, bwd)
