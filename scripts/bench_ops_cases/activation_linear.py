"""Cases of ops/activation_linear.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops
from lightseq_fairseq.ops.linear_activation import store_slope

from .case import Case, Formula, Make, Sizes, without_autograd


def activation_linear(sizes: Sizes, tokens: int, make: Make) -> Iterator[Case]:
    yield from (_activation_linear(name, sizes, tokens, make) for name in ("relu", "gelu"))


def _activation_linear(name: str, sizes: Sizes, tokens: int, make: Make) -> Case:
    c, f = sizes.width, sizes.ffn
    z, bias = make.leaf(tokens, f), make.leaf(f)
    weight = make.leaf(c, f, scale=f**-0.5)
    dy = make.rows(tokens, c)
    activation = functional.relu if name == "relu" else functional.gelu
    x = activation(z + bias).detach()
    before = (z + bias).detach()
    slope = None
    if name == "gelu":
        slope = torch.ops.aten.gelu_backward(torch.ones_like(before), before)
        slope = store_slope(slope, x.dtype)

    def formula(z: Tensor, bias: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (functional.linear(activation(z + bias), weight),)

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
        dz, _ = ops.activation_linear_bwd(dy, x, weight, slope, 0.0, dweight, dbias, False)
        return dz, dbias, dweight

    def separate() -> tuple[Tensor, Tensor, Tensor]:
        dx = torch.mm(dy, weight)
        if name == "relu":
            dz = torch.ops.aten.threshold_backward(dx, x, 0)
        else:
            dz = torch.ops.aten.gelu_backward(dx, before)
        return dz, dz.sum(0), torch.mm(dy.t(), x)

    _, bwd = Formula(formula, (z, bias, weight), (dy,)).systems()
    return Case(
        f"activation_linear_bwd.{name}/T{tokens}",
        2 * x.nbytes + (0 if slope is None else slope.nbytes) + 2 * weight.nbytes + dy.nbytes,
        {"ours": without_autograd(backward), **bwd, "library": without_autograd(separate)},
        4 * tokens * c * f,
    )
