"""Kernels that start early, where streams fork and join: as branches of a graph, and without one.

A graph may let such a kernel start before the one that it follows is over. It must not read what
that one, or the other branch, has still to write.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ops_testing import make_rng
from torch import Tensor

from lightseq_fairseq import ops

pytestmark = pytest.mark.gpu

STEPS = 20
LONG = 100_000  # clock cycles


class Branches:
    """Layer norms, products and attention; both branches read a norm's result, a norm both ends.

    slow: the stream with a pause between two of its kernels, if any.
    """

    def __init__(self, rows: int, slow: str | None):
        self.width, self.rows, self.slow = 256, rows, slow
        self.rng = make_rng(device="cuda")
        self.x, self.keys, self.values = (self.randn(n, self.width) for n in (rows, 64, 64))
        self.weight, self.other_weight = (self.randn(self.width, self.width) / 16 for _ in range(2))
        self.gamma, self.beta = self.randn(self.width), self.randn(self.width)
        self.cu = torch.tensor([0, 40, 64], dtype=torch.int32, device="cuda")
        self.sentences = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
        self.beside = torch.cuda.Stream()

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    def norm(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return ops.dropout_residual_layer_norm_fwd(
            x, None, residual, self.gamma, self.beta, 0.0, self.rng, 1, 1e-5
        )[1]

    def branch(self, x: Tensor, weight: Tensor, is_slow: bool) -> Tensor:
        out = ops.decode_cross_attention(
            x, self.keys, self.values, self.cu, self.sentences, self.rows // 2, 4, 0.1
        )
        if is_slow:
            torch.cuda._sleep(LONG)
        return self.norm(ops.linear_fwd(out, weight, None), x)

    def __call__(self, wait: Callable[[], None] = lambda: None) -> list[Tensor]:
        stream, results = torch.cuda.current_stream(), [self.norm(self.x, None)]
        for _ in range(STEPS):
            if self.slow == "both":
                torch.cuda._sleep(LONG)
            x = self.norm(results[-1], self.x)
            wait()
            self.beside.wait_stream(stream)
            with torch.cuda.stream(self.beside):
                lower = self.branch(x, self.weight, self.slow == "beside")
            wait()
            upper = self.branch(x, self.other_weight, self.slow == "here")
            wait()
            stream.wait_stream(self.beside)
            results += [x, lower, upper, self.norm(lower, upper)]
        return results


@pytest.mark.parametrize("rows", [2, 16, 320])
@pytest.mark.parametrize("slow", [None, "here", "beside", "both"])
def test_branches(slow: str | None, rows: int) -> None:
    torch.manual_seed(rows)
    branches = Branches(rows, slow)
    branches(torch.cuda.synchronize)  # products are timed
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = branches()
    for _ in range(5):
        branches.x.normal_()
        expected = branches(torch.cuda.synchronize)
        assert all(x.isfinite().all() for x in expected)
        assert all(map(torch.equal, branches(), expected))
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, captured, expected))
