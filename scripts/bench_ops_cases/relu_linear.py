"""Case of ops/relu_linear.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops

from .case import Case, Formula, Make, Sizes, without_autograd


def relu_linear(sizes: Sizes, tokens: int, make: Make) -> Iterator[Case]:
    c, f = sizes.width, sizes.ffn
    z, bias = make.leaf(tokens, f), make.leaf(f)
    weight = make.leaf(c, f, scale=f**-0.5)
    dy = make.rows(tokens, c)
    x = (z + bias).relu_().detach()

    def formula(z: Tensor, bias: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (functional.linear(functional.relu(z + bias), weight),)

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
        return ops.relu_linear_bwd(dy, x, weight, 0.0, dweight, dbias, False), dbias, dweight

    def separate() -> tuple[Tensor, Tensor, Tensor]:
        dz = torch.ops.aten.threshold_backward(torch.mm(dy, weight), x, 0)
        return dz, dz.sum(0), torch.mm(dy.t(), x)

    _, bwd = Formula(formula, (z, bias, weight), (dy,)).systems()
    yield Case(
        f"relu_linear_bwd/T{tokens}",
        2 * x.nbytes + 2 * weight.nbytes + dy.nbytes,
        {"ours": without_autograd(backward), **bwd, "library": without_autograd(separate)},
        4 * tokens * c * f,
    )
