"""Column sums that are deferred and share launches equal those that ops compute at once, bit for
bit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers.ops_testing import make_rng
from torch import Tensor

from lightseq_fairseq import ops

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
Sum = tuple[str, int, int]  # op, rows, columns
# Incomplete blocks; more than a launch holds (72 sums); more than is kept (16 MB).
MANY = [
    [("linear", 33, 40), ("close", 70, 264), ("activation", 5, 8), ("linear", 1, 1000)],
    [("close", 9, 64), ("linear", 300, 24)] * 30,
    [("close", 4000, 1024), ("linear", 4000, 4096), ("activation", 4000, 4096)] * 6,
]


class Sums:
    """Ops that write gradients of biases and LayerNorms into one buffer, one after the other."""

    def __init__(self, kinds: list[Sum], dtype: torch.dtype) -> None:
        torch.manual_seed(len(kinds))
        self.kinds, self.dtype = kinds, dtype
        self.size = sum(3 * columns for _, _, columns in kinds)
        self.rows = [torch.randn(rows, columns).to(dtype).cuda() for _, rows, columns in kinds]
        self.dropout = ops.Dropout(0.2, make_rng().cuda(), 4)

    def write(self, flat: Tensor, accumulate: bool = False) -> None:
        place = 0
        for (op, _, columns), dy in zip(self.kinds, self.rows, strict=True):
            first, second, third = flat[place : place + 3 * columns].view(3, columns)
            place += 3 * columns
            if op == "linear":
                x, weight = dy.new_ones(len(dy), 8), dy.new_ones(columns, 8)
                ops.linear_bwd(dy, x, weight, None, first, None, accumulate, False)
            elif op == "activation":
                ops.bias_activation_dropout_bwd(
                    dy, dy, dy[0], "gelu", self.dropout, second, accumulate
                )
            else:
                mean, rstd = dy.float().mean(1), dy.float().std(1).reciprocal()
                ops.dropout_residual_layer_norm_bwd(
                    dy, dy, dy, dy[0], mean, rstd, self.dropout, first, second, third, accumulate
                )

    def flat(self) -> Tensor:
        """A buffer of numbers to overwrite or to add to."""
        return torch.arange(self.size, dtype=torch.float32).remainder(7).to(self.dtype).cuda()


@contextmanager
def later(flat: Tensor) -> Iterator[None]:
    ops.defer_column_sums(flat)
    yield
    ops.flush_column_sums(flat, wanted=True)


@DTYPES
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kinds", MANY, ids=lambda kinds: str(len(kinds)))
def test_the_same_bits(kinds: list[Sum], accumulate: bool, dtype: torch.dtype) -> None:
    sums = Sums(kinds, dtype)
    expected, ours = sums.flat(), sums.flat()
    sums.write(expected, accumulate)
    assert not torch.equal(expected, ours)
    with later(ours):
        sums.write(ours, accumulate)
    assert torch.equal(ours, expected)


@DTYPES
def test_a_gradient_written_twice(dtype: torch.dtype) -> None:
    sums = Sums(MANY[0], dtype)
    expected, ours = sums.flat(), sums.flat()
    for accumulate in (False, True, True):
        sums.write(expected, accumulate)
    with later(ours):
        for accumulate in (False, True, True):
            sums.write(ours, accumulate)
    assert torch.equal(ours, expected)


def test_others_are_complete_at_once() -> None:
    """Gradients outside of the buffer, those of another stream, and all gradients after the
    block."""
    sums = Sums(MANY[0], torch.bfloat16)
    expected = sums.flat()
    sums.write(expected)
    elsewhere, of_stream, afterwards = (sums.flat() for _ in range(3))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with later(of_stream):
        sums.write(elsewhere)
        assert torch.equal(elsewhere, expected)
        with torch.cuda.stream(stream):
            sums.write(of_stream)
        torch.cuda.synchronize()
        assert torch.equal(of_stream, expected)
    with later(afterwards):
        pass
    sums.write(afterwards)
    assert torch.equal(afterwards, expected)


def test_one_begins_before_the_other_ends() -> None:
    sums = Sums(MANY[0], torch.bfloat16)
    expected, first, second = sums.flat(), sums.flat(), sums.flat()
    sums.write(expected)
    with later(first):
        sums.write(first)
        with later(second):
            assert torch.equal(first, expected)
            sums.write(second)
        assert torch.equal(second, expected)


def test_a_gradient_that_lies_in_part_in_the_flat_one() -> None:
    """It is computed at once, after the deferred sums that write the same numbers."""
    dy = torch.randn(50, 64, device="cuda")
    x, weight = dy.new_ones(50, 8), dy.new_ones(64, 8)
    expected, ours = (torch.zeros(160, device="cuda") for _ in range(2))

    def write(buffer: Tensor) -> None:
        for begin, accumulate in ((0, False), (32, True), (96, True)):
            target = buffer[begin : begin + 64]
            ops.linear_bwd(dy, x, weight, None, target, None, accumulate, False)

    write(expected)
    with later(ours[:128]):
        write(ours)
        assert torch.equal(ours[96:], expected[96:])
    assert torch.equal(ours, expected)


def test_unwanted_sums_never_come() -> None:
    sums = Sums(MANY[0], torch.bfloat16)
    ours, untouched = sums.flat(), sums.flat()
    ops.defer_column_sums(ours)
    sums.write(ours)
    ops.flush_column_sums(ours, wanted=False)
    with later(ours):
        pass
    assert torch.equal(ours, untouched)


def test_another_thread_in_a_captured_graph() -> None:
    """As when autograd runs the backward pass of a captured step."""
    sums = Sums(MANY[2][:3], torch.bfloat16)
    expected, ours = sums.flat(), sums.flat()
    sums.write(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"), later(ours):
        stream = torch.cuda.current_stream()

        def write() -> None:
            with torch.cuda.stream(stream):
                sums.write(ours)

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    for _ in range(3):
        ours.copy_(sums.flat())
        graph.replay()
        assert torch.equal(ours, expected)
