"""Cases for GEMMs on a GPU: operands of any kind, bounds of errors, and for GEMMs of few rows a
chain of kernels in a graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from helpers.fp8_operands import numbers, quantised
from helpers.ops_testing import make_rng, poison_cache
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops
from lightseq_fairseq.ops import Quantised
from lightseq_fairseq.ops.casting import E4M3

NORM_EPS = 1e-5
# Hopper's tensor cores keep 13 bits behind the leading bit of the largest term while they add up
# to 128 products of E4M3; later sums are in float32. Relative to the sum of absolute values, the
# largest errors of these products lie between 2^-12 and 2^-11; torch._scaled_mm makes the same
# ones.
OF_FP8_SUM = 2.0**-11


def in_fp8(x: Tensor, size: float) -> Quantised:
    """x, normally distributed with this standard deviation, in E4M3."""
    return quantised(x, 2.0 ** math.ceil(math.log2(size / 64)))


def inputs(tokens: int, k: int, n: int, kind: torch.dtype) -> tuple[Any, Any, Tensor, Any]:
    """x, weight, bias, dy; in fp8 bias is bfloat16."""
    torch.manual_seed(tokens + k + n)
    shapes = ((tokens, k), (n, k), (n,), (tokens, n))
    scales = (1.0, k**-0.5, 1.0, n**-0.5)
    x, weight, bias, dy = (
        torch.randn(*shape, device="cuda").mul_(scale)
        for shape, scale in zip(shapes, scales, strict=True)
    )
    if kind != E4M3:
        return x.to(kind), weight.to(kind), bias.to(kind), dy.to(kind)
    x, weight, dy = in_fp8(x, 1.0), in_fp8(weight, k**-0.5), in_fp8(dy, n**-0.5)
    return x, weight, bias.bfloat16(), dy


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def positive_part(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu of the product, which computes it in its epilogue."""
    dropout = ops.Dropout(0.0, make_rng(device=x.device), 1)
    return ops.linear_activation_fwd(x, weight, bias, "relu", dropout, need_slope=False)[0]


def gradients(
    k: int, n: int, kind: torch.dtype, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """Memory for dweight and dbias; in fp8 the op that casts dy computes dbias."""
    if kind == E4M3:
        return poisoned(n, k, dtype=dtype or torch.bfloat16), None
    return poisoned(n, k, dtype=dtype or kind), poisoned(n, dtype=dtype or kind)


def formula(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The result of torch in the dtype of the arguments."""
    return {
        "y": functional.linear(x, weight, bias),
        "dx": dy @ weight,
        "dweight": dy.t() @ x,
        "dbias": dy.sum(0),
    }


def assert_near(
    results: dict[str, Tensor | None], *operands: Any, added: dict[str, Any] | None = None
) -> None:
    """The error of each result is at most twice that of torch in the same dtype; for fp8 see
    `assert_near_in_fp8`. added: what was in a result before.

    For float32 results a few ulp of the sum of all magnitudes are added, because the error of a
    float32 sum depends on the order of its terms.
    """
    results = {name: ours for name, ours in results.items() if ours is not None}
    if isinstance(operands[1], Quantised):
        assert_near_in_fp8(results, *operands, added=added)
        return
    x, *_, dy = operands
    plain = formula(*operands)
    exact = formula(*(t.double() for t in operands))
    magnitude = formula(*(t.double().abs() for t in operands))
    for name, ours in results.items():
        theirs, truth = plain[name], exact[name]
        if ours.dtype != theirs.dtype:
            theirs = torch.mm(dy.t(), x, out_dtype=ours.dtype) if name == "dweight" else dy.float()
            theirs = theirs.sum(0) if name == "dbias" else theirs
        if added is not None:
            theirs, truth = added[name] + theirs, added[name].double() + truth
        assert ours.dtype == theirs.dtype and ours.shape == truth.shape
        error = (ours.double() - truth).abs().max()
        limit = 2 * (theirs.double() - truth).abs().max()
        if ours.dtype == torch.float32:
            limit = max(limit, 4 * torch.finfo(torch.float32).eps * magnitude[name].max())
        assert error <= limit, f"{name}: {error:.3e}, allowed are {limit:.3e}"


def assert_near_in_fp8(
    results: dict[str, Tensor], *operands: Any, added: dict[str, Any] | None = None
) -> None:
    """Equal to float64 but for rounding, also of a product before it is added to another gradient,
    and the error of the sum."""
    exact = formula(*(numbers(t) for t in operands))
    sizes = formula(*(numbers(t).abs() for t in operands))
    for name, ours in results.items():
        truth = exact[name]
        rounded = truth.abs()
        if added is not None:
            truth = truth + added[name].double()
            rounded = rounded + truth.abs()
        assert ours.shape == truth.shape
        rounding = torch.finfo(ours.dtype).eps / 2 * rounded
        error = (ours.double() - truth).abs()
        assert (error <= 1.01 * (rounding + OF_FP8_SUM * sizes[name])).all(), (
            f"{name}: {error.max():.3e}"
        )
        # Most errors are far smaller.
        mean = error.mean() / truth.abs().mean()
        assert mean < torch.finfo(ours.dtype).eps / 4 + 2.0**-8, f"{name}: mean {mean:.3e}"


def poison_memory(*shapes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Fills the memory that the allocator returns next with NaN."""
    for _ in range(2):
        tensors = [poisoned(*shape, dtype=dtype) for shape in shapes]
        del tensors


def check(
    tokens: int, k: int, n: int, kind: torch.dtype, grad_dtype: torch.dtype | None = None
) -> None:
    """Both ops with operands of this kind err no more than `assert_near` allows."""
    x, weight, bias, dy = inputs(tokens, k, n, kind)
    if kind == E4M3:
        poison_cache()
    else:
        padded_k, padded_n = -k // 64 * -64, -n // 64 * -64
        for rows in (tokens, n, padded_n):
            poison_memory(*((rows, width) for width in (n, k, padded_n, padded_k)), dtype=kind)
    dweight, dbias = gradients(k, n, kind, grad_dtype)
    y = ops.linear_fwd(x, weight, bias)
    dx = ops.linear_bwd(dy, x, weight, dweight, dbias, None, False, True)
    assert y.is_contiguous() and dx.is_contiguous() and y.dtype == dx.dtype == bias.dtype
    results = {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}
    assert_near(results, x, weight, bias, dy)


def drawn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda").mul_(scale).to(dtype)


def inside(x: Tensor) -> Tensor:
    """x as a part of a wider matrix of NaN, so that its rows are further apart."""
    rows, columns = x.shape
    wide = torch.full((rows + 1, columns + 24), torch.nan, dtype=x.dtype, device="cuda")
    view = wide[:rows, 8 : 8 + columns]
    view.copy_(x)
    return view


class Chain:
    """An embedding, norms and GEMMs in turn; the last GEMM is as wide as a vocabulary."""

    def __init__(self, rows: int, width: int, ffn: int, vocabulary: int, dtype: torch.dtype):
        self.rng = make_rng(device="cuda")
        self.tokens = torch.randint(vocabulary, (rows,), device="cuda")
        shapes = [(vocabulary, width)] + 3 * [(3 * width, width), (ffn, 3 * width), (width, ffn)]
        self.weights = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
        self.biases = [torch.empty(shape[0], dtype=dtype, device="cuda") for shape in shapes]
        self.gamma, self.beta = (torch.empty(width, dtype=dtype, device="cuda") for _ in range(2))
        self.rewrite()

    def rewrite(self) -> None:
        for x in (*self.biases, self.beta, self.gamma):
            x.normal_()
        for weight in self.weights:
            weight.normal_(std=weight.shape[1] ** -0.5)

    def close(self, h: Tensor | None, stream: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = (stream, None) if h is None else (h, stream)
        total, y, *_ = ops.dropout_residual_layer_norm_fwd(
            x, None, residual, self.gamma, self.beta, ops.Dropout(0.0, self.rng, 1), NORM_EPS
        )
        return (stream if h is None else total), y

    def __call__(self) -> list[Tensor]:
        table, *weights = self.weights
        dropout = ops.Dropout(0.0, self.rng, 1)
        stream, _ = ops.embedding_fwd(self.tokens, table, None, None, 1.0, dropout)
        stream, x = self.close(None, stream)
        results = [x]
        for place in range(0, len(weights), 3):
            for number in (place, place + 1, place + 2):
                operands = x, weights[number], self.biases[1 + number]
                if number % 3 == 1:
                    x, *_ = ops.linear_activation_fwd(*operands, "relu", dropout, need_slope=False)
                else:
                    x = ops.linear_fwd(*operands)
                results.append(x)
            stream, x = self.close(x, stream)
            results.append(x)
        return [*results, ops.linear_fwd(x, table, self.biases[0])]


def captured(call: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def assert_same_bits(graph: list[Tensor], eager: list[Tensor]) -> None:
    for place, (x, y) in enumerate(zip(graph, eager, strict=True)):
        assert y.isfinite().all()
        assert torch.equal(x, y), f"result {place} of {len(eager)}"


def assert_replays_have_new_weights(
    chain: Chain, graph: torch.cuda.CUDAGraph, results: list[Tensor]
) -> None:
    """Each replay uses the current weights, although a kernel may prefetch them before the kernel
    before it ends."""
    for _ in range(20):
        chain.rewrite()
        for x in results:
            x.fill_(torch.nan)
        graph.replay()
        assert_same_bits(results, chain())
