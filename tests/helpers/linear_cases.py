"""Cases for GEMMs of few rows: operands, and a chain of kernels in a graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from helpers.ops_testing import make_rng
from torch import Tensor

from lightseq_fairseq import ops

NORM_EPS = 1e-5


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
                bias = self.biases[1 + number]
                x = ops.linear_fwd(x, weights[number], bias, relu=number % 3 == 1)
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
