"""Cases of ops/linear.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops

from .case import SITE, Case, Formula, Make, Run, Sizes, without_autograd


def linear(sizes: Sizes, tokens: int, make: Make) -> Iterator[Case]:
    """Yield the products of a layer. Biases that the next op adds are left out."""
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


def linear_layer(sizes: Sizes, tokens: int, make: Make) -> Iterator[Case]:
    """Yield all products of an encoder layer, with the work of their epilogues: bias, ReLU, grads.

    There is no activation dropout, so ReLU is part of the product. The biases of out and fc2 belong
    to the ops at the end of a sublayer. Inputs: x of the qkv product, a (attention's result) of the
    output projection, y of the feed-forward.
    """
    c, f = sizes.width, sizes.ffn
    x, a, y = (make.leaf(tokens, c) for _ in range(3))
    qkv_w, qkv_b = make.leaf(3 * c, c, scale=c**-0.5), make.leaf(3 * c)
    out_w = make.leaf(c, c, scale=c**-0.5)
    fc1_w, fc1_b = make.leaf(f, c, scale=c**-0.5), make.leaf(f)
    fc2_w = make.leaf(c, f, scale=f**-0.5)
    leaves = (x, qkv_w, qkv_b, a, out_w, y, fc1_w, fc1_b, fc2_w)
    dropout = ops.Dropout(0.0, make.rng(), SITE)
    dqkv, dout, dz = make.rows(tokens, 3 * c), make.rows(tokens, c), make.rows(tokens, c)

    def formula(
        x: Tensor, qkv_w: Tensor, qkv_b: Tensor, a: Tensor, out_w: Tensor, y: Tensor,
        fc1_w: Tensor, fc1_b: Tensor, fc2_w: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        h = functional.linear(y, fc1_w, fc1_b).relu()
        qkv = functional.linear(x, qkv_w, qkv_b)
        return qkv, functional.linear(a, out_w), functional.linear(h, fc2_w)

    def hidden() -> Tensor:
        h, *_ = ops.linear_activation_fwd(y, fc1_w, fc1_b, "relu", dropout, need_slope=False)
        return h

    def forward() -> tuple[Tensor, ...]:
        qkv, out = ops.linear_fwd(x, qkv_w, qkv_b), ops.linear_fwd(a, out_w, None)
        return qkv, out, ops.linear_fwd(hidden(), fc2_w, None)

    def backward() -> Run:
        h = torch.no_grad()(hidden)()

        def run() -> tuple[Tensor, ...]:
            dqkv_w, dqkv_b, dout_w, dfc1_w, dfc1_b, dfc2_w = (
                torch.empty_like(w) for w in (qkv_w, qkv_b, out_w, fc1_w, fc1_b, fc2_w)
            )
            dh, _ = ops.activation_linear_bwd(dz, h, fc2_w, None, 0.0, dfc2_w, dfc1_b, False)
            dy = ops.linear_bwd(dh, y, fc1_w, dfc1_w, None, None, False, True)
            da = ops.linear_bwd(dout, a, out_w, dout_w, None, None, False, True)
            dx = ops.linear_bwd(dqkv, x, qkv_w, dqkv_w, dqkv_b, None, False, True)
            return dx, dqkv_w, dqkv_b, da, dout_w, dy, dfc1_w, dfc1_b, dfc2_w

        return torch.no_grad()(run)

    def separate_hidden() -> Tensor:
        return torch.mm(y, fc1_w.t()).add_(fc1_b).relu_()

    def separate_forward() -> tuple[Tensor, ...]:
        qkv, out = torch.mm(x, qkv_w.t()).add_(qkv_b), torch.mm(a, out_w.t())
        return qkv, out, torch.mm(separate_hidden(), fc2_w.t())

    def separate_backward() -> Run:
        h = torch.no_grad()(separate_hidden)()

        def run() -> tuple[Tensor, ...]:
            dh = torch.ops.aten.threshold_backward(torch.mm(dz, fc2_w), h, 0)
            return (
                torch.mm(dqkv, qkv_w), torch.mm(dqkv.t(), x), dqkv.sum(0),
                torch.mm(dout, out_w), torch.mm(dout.t(), a),
                torch.mm(dh, fc1_w), torch.mm(dh.t(), y), dh.sum(0),
                torch.mm(dz.t(), h),
            )  # fmt: skip

        return torch.no_grad()(run)

    fwd, bwd = Formula(formula, leaves, (dqkv, dout, dz)).systems()
    operands = sum(leaf.nbytes for leaf in leaves)
    results = dqkv.nbytes + dout.nbytes + dz.nbytes
    saved = tokens * f * x.element_size()  # h
    flops = 2 * tokens * sum(w.numel() for w in (qkv_w, out_w, fc1_w, fc2_w))
    library = without_autograd(separate_forward)
    yield Case(
        f"linear_layer_fwd/T{tokens}",
        operands + results + saved,
        {"ours": without_autograd(forward), **fwd, "library": library},
        flops,
    )
    yield Case(
        f"linear_layer_bwd/T{tokens}",
        2 * operands + results + saved,
        {"ours": backward, **bwd, "library": separate_backward},
        2 * flops,
    )


def linear_few_rows(sizes: Sizes, make: Make) -> Iterator[Case]:
    """Yield the forward products of a decode step for one sentence: they read mostly weights."""
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
        dx = ops.linear_bwd(dy, x, weight, dweight, dbias, None, False, True)
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
