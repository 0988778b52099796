"""Case of ops/linear_activation.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops
from lightseq_fairseq.ops.linear_activation import slope_dtype

from .case import SITE, Case, Formula, Make, Sizes, without_autograd


def linear_activation(sizes: Sizes, tokens: int, make: Make) -> Iterator[Case]:
    """Yield the case of gelu without dropout, as in RoBERTa and GPT-2."""
    c, f, dropout = sizes.width, sizes.ffn, ops.Dropout(0.0, make.rng(), SITE)
    x, weight, bias = make.leaf(tokens, c), make.leaf(f, c, scale=c**-0.5), make.leaf(f)
    dy = make.rows(tokens, f)

    def formula(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
        return (functional.gelu(functional.linear(x, weight, bias)),)

    def forward() -> tuple[Tensor]:
        y, *_ = ops.linear_activation_fwd(x, weight, bias, "gelu", dropout, need_slope=True)
        return (y,)

    def separate() -> tuple[Tensor]:
        return (functional.gelu(torch.mm(x, weight.t()).add_(bias)),)

    fwd, _ = Formula(formula, (x, weight, bias), (dy,)).systems()
    yield Case(
        f"linear_activation_fwd.gelu/T{tokens}",
        x.nbytes + weight.nbytes + dy.nbytes + dy.numel() * slope_dtype(dy.dtype).itemsize,
        {"ours": without_autograd(forward), **fwd, "library": without_autograd(separate)},
        2 * tokens * c * f,
    )
