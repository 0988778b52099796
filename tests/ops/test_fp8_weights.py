"""The cast of all weights is `fp8_quantise` of each, bit for bit; Adam's is that of its results."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from helpers.ops_testing import adam_arguments, spaced
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.ops import Cast, WeightCast
from lightseq_fairseq.ops.casting import E4M3
from lightseq_fairseq.ops.fp8_weights import QUAD, Matrix, fp8_tiles

COUNT = 12001
# In another order than in memory, with gaps between them.
SHAPES = ((128, 16, 48), (3072, 80, 16), (1024, 16, 16), (4608, 16, 272), (9216, 32, 16))
SIZES = [rows * columns for _, rows, columns in SHAPES]
MATRICES = [Matrix(start, sum(SIZES[:i]), *shape) for i, (start, *shape) in enumerate(SHAPES)]


def make_weights() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(COUNT).bfloat16()


def make_cast() -> WeightCast:
    return WeightCast(
        tiles=fp8_tiles(MATRICES, COUNT),
        scale=torch.tensor([2.0**-9, 2.0**-7, 1.0, 2.0**-8, 2.0**-8]),
        amax=torch.tensor([0.5, 9.0, 0.0, 0.0, 0.0]),
        saturated=torch.tensor([3, 0, 0, 0, 0]),
        values=torch.full((sum(SIZES),), 0x7F, dtype=torch.uint8).view(E4M3),
        transposes=torch.full((sum(SIZES),), 0x7F, dtype=torch.uint8).view(E4M3),
    )


def assert_same(ours: Iterable[Any], expected: Iterable[Any]) -> None:
    for mine, x in zip(ours, expected, strict=True):
        if isinstance(x, Tensor):
            kind = torch.uint8 if x.dtype == E4M3 else x.dtype
            assert torch.equal(mine.view(kind), x.view(kind))


def test_is_the_cast_of_each_matrix():
    weights, ours, before = make_weights(), make_cast(), make_cast()
    weights[130] = torch.nan
    ops.fp8_weights(weights, ours)
    for i, (start, place, rows, columns) in enumerate(MATRICES):
        matrix = weights[start : start + rows * columns].view(rows, columns)
        cast = Cast(before.scale[i], before.amax[i], before.saturated[i])
        results = ops.fp8_quantise(matrix, cast)
        for mine, result in zip((ours.values, ours.transposes), results, strict=True):
            part = mine[place : place + matrix.numel()].view(torch.uint8)
            assert torch.equal(part, result.view(torch.uint8).flatten())
        assert ours.amax[i] == cast.amax and ours.saturated[i] == cast.saturated
    assert ours.saturated[0] > 3


@pytest.mark.parametrize("norm", [2.0, math.inf, math.nan])
def test_adam_casts_what_it_computes(norm):
    """If the gradient has overflowed, what was there before."""
    cast, expected_cast = make_cast(), make_cast()
    ours = adam_arguments(make_weights()) | {"norm": torch.tensor(norm)}
    expected = {k: x.clone() if isinstance(x, Tensor) else x for k, x in ours.items()}
    ops.adam_step(**ours, cast=cast)
    ops.adam_step(**expected)
    ops.fp8_weights(expected["param_low"], expected_cast)
    del ours["norm"], expected["norm"]  # may be NaN
    assert_same(ours.values(), expected.values())
    assert_same(cast, expected_cast)
    assert ours["step"] == (8 if norm == 2.0 else 7)


def test_each_parameter_is_in_one_tile():
    times = torch.zeros(COUNT, dtype=torch.int64)
    of_matrix = torch.full((COUNT,), -1)
    for first, stride, rows, quads, matrix, *_ in fp8_tiles(MATRICES, COUNT).tolist():
        for row in range(rows):
            start = QUAD * (first + row * stride)
            part = slice(start, start + QUAD * quads)
            times[part] += 1
            of_matrix[part] = matrix
    assert times[: COUNT // QUAD * QUAD].eq(1).all() and times[COUNT // QUAD * QUAD :].eq(0).all()
    expected = torch.full((COUNT,), -1)
    for i, (start, _, rows, columns) in enumerate(MATRICES):
        expected[start : start + rows * columns] = i
    assert torch.equal(of_matrix, expected)


def test_scales_may_be_apart():
    ours, expected = make_cast(), make_cast()
    ours = ours._replace(scale=spaced(ours.scale))
    for cast in (ours, expected):
        ops.fp8_weights(make_weights(), cast)
    assert_same(ours, expected)


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        (make_cast().tiles - 2, "do not fit"),
        (fp8_tiles(MATRICES, COUNT + 4), "do not fit weights with 12001 elements"),
        (fp8_tiles([Matrix(0, 7168, 16, 16)], 0), "do not fit values with 7168"),
        (fp8_tiles([Matrix(0, 0, 16, 16)] * 6, 0), "do not fit scale with 5 elements"),
    ],
)
def test_tiles_of_other_weights_are_refused(tiles, message):
    with pytest.raises(ValueError, match=f"fp8_weights: .*{message}"):
        ops.fp8_weights(make_weights(), make_cast()._replace(tiles=tiles))


@pytest.mark.parametrize("change", [(2, 0, 0, 0), (0, 8, 0, 0), (0, 0, 8, 0), (0, 0, 0, 8)])
def test_matrices_that_are_not_aligned(change):
    matrix = Matrix(*(x + y for x, y in zip((0, 0, 16, 16), change, strict=True)))
    with pytest.raises(ValueError, match=r"fp8_tiles: Matrix\(.*\) is not aligned"):
        fp8_tiles([matrix], 1024)
