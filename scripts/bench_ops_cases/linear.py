"""Cases of ops/linear.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops

from .case import Case, Formula, Make, Sizes, without_autograd


def linear(sizes: Sizes, tokens: int, make: Make) -> Iterator[Case]:
    """The products of a layer. Biases that the op behind the product adds are not counted here."""
    c, f = sizes.width, sizes.ffn
    for shape, inputs, outputs, has_bias in (
        ("qkv", c, 3 * c, True),
        ("out", c, c, False),
        ("fc1", c, f, False),
        ("fc2", f, c, False),
        ("cross_kv", c, 2 * c * sizes.decoder_layers, True),
        ("logits", c, sizes.vocabulary, False),
    ):
        yield from _linear(shape, tokens, inputs, outputs, has_bias, make)


def linear_few_rows(sizes: Sizes, make: Make) -> Iterator[Case]:
    """Forward of a decode step for one sentence: its products read weights and little else."""
    c, f, rows = sizes.width, sizes.ffn, sizes.beam
    for shape, inputs, outputs in (
        ("qkv", c, 3 * c),
        ("out", c, c),
        ("fc1", c, f),
        ("fc2", f, c),
        ("logits", c, sizes.vocabulary),
    ):
        forward, _ = _linear(shape, rows, inputs, outputs, shape == "qkv", make)
        yield replace(forward, name=f"linear_fwd.{shape}/N{rows}")


def _linear(
    shape: str, tokens: int, inputs: int, outputs: int, has_bias: bool, make: Make
) -> Iterator[Case]:
    x = make.leaf(tokens, inputs)
    weight = make.leaf(outputs, inputs, scale=inputs**-0.5)
    bias = make.leaf(outputs) if has_bias else None
    dy = make.rows(tokens, outputs)

    def formula(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor]:
        return (functional.linear(x, weight, bias),)

    def forward() -> tuple[Tensor]:
        return (ops.linear_fwd(x, weight, bias),)

    def backward() -> tuple[Tensor, ...]:
        dweight = torch.empty_like(weight)
        dbias = None if bias is None else torch.empty_like(bias)
        dx = ops.linear_bwd(dy, x, weight, dweight, dbias, False, True)
        return (dx, dweight) if dbias is None else (dx, dweight, dbias)

    def products() -> tuple[Tensor, Tensor]:
        return torch.mm(dy, weight), torch.mm(dy.t(), x)

    leaves = (x, weight) if bias is None else (x, weight, bias)
    fwd, bwd = Formula(formula, leaves, (dy,)).systems()
    operands = x.nbytes + weight.nbytes
    flops = 2 * tokens * inputs * outputs
    library = without_autograd(lambda: (torch.mm(x, weight.t()),))
    yield Case(
        f"linear_fwd.{shape}/T{tokens}",
        operands + dy.nbytes,
        {"ours": without_autograd(forward), **fwd, "library": library},
        flops,
    )
    library = without_autograd(products)
    yield Case(
        f"linear_bwd.{shape}/T{tokens}",
        2 * operands + dy.nbytes,
        {"ours": without_autograd(backward), **bwd, "library": library},
        2 * flops,
    )
