"""The cast of all weights is `fp8_quantise` of each, bit for bit; Adam's is that of its results."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.ops_testing import adam_arguments, check_op, spaced
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.ops.casting import E4M3
from lightseq_fairseq.ops.fp8_weights import QUAD, Matrix, fp8_tiles

COUNT = 12001
# In another order than in memory, with gaps between them.
SHAPES = ((128, 16, 48), (3072, 80, 16), (1024, 16, 16), (4608, 16, 272), (9216, 32, 16))
SIZES = [rows * columns for _, rows, columns in SHAPES]
MATRICES = [Matrix(start, sum(SIZES[:i]), *shape) for i, (start, *shape) in enumerate(SHAPES)]


def arguments() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "weights": torch.randn(COUNT).bfloat16(),
        "tiles": fp8_tiles(MATRICES, COUNT),
        "scale": torch.tensor([2.0**-9, 2.0**-7, 1.0, 2.0**-8, 2.0**-8]),
        "amax": torch.tensor([0.5, 9.0, 0.0, 0.0, 0.0]),
        "saturated": torch.tensor([3, 0, 0, 0, 0]),
        "values": torch.full((sum(SIZES),), 0x7F, dtype=torch.uint8).view(E4M3),
        "transposes": torch.full((sum(SIZES),), 0x7F, dtype=torch.uint8).view(E4M3),
    }


def of_cast(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in given.items() if name != "weights"}


def assert_same(ours: dict, expected: dict) -> None:
    for name, x in expected.items():
        if isinstance(x, Tensor):
            mine = ours[name]
            if x.dtype == E4M3:
                mine, x = mine.view(torch.uint8), x.view(torch.uint8)
            assert torch.equal(mine, x), name


def test_is_the_cast_of_each_matrix():
    given, before = arguments(), arguments()
    given["weights"][130] = torch.nan
    ops.fp8_weights(**given)
    for i, (start, place, rows, columns) in enumerate(MATRICES):
        matrix = given["weights"][start : start + rows * columns].view(rows, columns)
        scalars = [before[name][i] for name in ("scale", "amax", "saturated")]
        results = ops.fp8_quantise(matrix, *scalars)
        for name, result in zip(("values", "transposes"), results, strict=True):
            ours = given[name][place : place + matrix.numel()].view(torch.uint8)
            assert torch.equal(ours, result.view(torch.uint8).flatten())
        assert given["amax"][i] == scalars[1] and given["saturated"][i] == scalars[2]
    assert given["saturated"][0] > 3


@pytest.mark.parametrize("norm", [2.0, math.inf, math.nan])
def test_adam_casts_what_it_computes(norm):
    """If the gradient has overflowed, what was there before."""
    ours, expected = arguments(), arguments()
    torch.manual_seed(1)
    of_ours = adam_arguments(ours["weights"]) | {"norm": torch.tensor(norm)}
    of_expected = {k: x.clone() if isinstance(x, Tensor) else x for k, x in of_ours.items()}
    ops.fp8_adam_step(**of_ours, **of_cast(ours))
    ops.adam_step(**of_expected)
    ops.fp8_weights(of_expected["param_low"], **of_cast(expected))
    del of_ours["norm"], of_expected["norm"]  # may be NaN
    assert_same(of_ours, of_expected)
    assert_same(of_cast(ours), of_cast(expected))
    assert of_ours["step"] == (8 if norm == 2.0 else 7)


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
    given, expected = arguments(), arguments()
    given["scale"] = spaced(given["scale"])
    ops.fp8_weights(**given)
    ops.fp8_weights(**expected)
    assert_same(given, {name: expected[name] for name in ("values", "transposes")})


def test_opcheck():
    given = arguments()
    check_op("fp8_weights", *given.values())
    check_op("fp8_adam_step", *adam_arguments(given["weights"]).values(), *of_cast(given).values())


def test_refusals():
    for name, wrong, sentence in (
        ("weights", torch.zeros(COUNT), "weights must be bfloat16, got float32"),
        ("tiles", torch.zeros(3, 4).int(), r"tiles must have shape \[B, 8\]"),
        ("tiles", arguments()["tiles"].long(), "tiles must be int32"),
        ("amax", torch.ones(2), r"amax must have shape \[5\]"),
        ("transposes", torch.zeros(16).to(E4M3), r"transposes must have shape \[7168\]"),
        ("saturated", torch.zeros(10, dtype=torch.int64)[::2], "saturated must be contiguous"),
        ("scale", torch.tensor([1.0, 3.0, 1.0, 1.0, 1.0]), "scale must be powers of two"),
        ("tiles", arguments()["tiles"] - 2, "do not fit"),
        ("tiles", fp8_tiles(MATRICES, COUNT + 4), "do not fit weights with 12001 elements"),
        ("tiles", fp8_tiles([Matrix(0, 7168, 16, 16)], 0), "do not fit values with 7168"),
        ("tiles", fp8_tiles([Matrix(0, 0, 16, 16)] * 6, 0), "do not fit scale with 5 elements"),
    ):
        with pytest.raises(ValueError, match=f"fp8_weights: .*{sentence}"):
            ops.fp8_weights(**{**arguments(), name: wrong})


def test_refusals_of_adam():
    given = arguments()
    for name, wrong, sentence in (
        ("param", torch.zeros(COUNT), "param must be int16, got float32"),
        ("grad", torch.zeros(COUNT), "grad must be bfloat16, got float32"),
        ("exp_avg", torch.zeros(5), r"exp_avg must have shape \[12001\]"),
        ("beta1", 1.0, "beta1 must be at least 0 and below 1"),
        ("scale", torch.ones(5) * 3, "scale must be powers of two"),
        ("tiles", given["tiles"][1:], "the tiles cover 11872 of 12000 parameters"),
    ):
        with pytest.raises(ValueError, match=f"fp8_adam_step: {sentence}"):
            ops.fp8_adam_step(**{**adam_arguments(given["weights"]), **of_cast(given), name: wrong})


@pytest.mark.parametrize("change", [(2, 0, 0, 0), (0, 8, 0, 0), (0, 0, 8, 0), (0, 0, 0, 8)])
def test_matrices_that_are_not_aligned(change):
    matrix = Matrix(*(x + y for x, y in zip((0, 0, 16, 16), change, strict=True)))
    with pytest.raises(ValueError, match=r"fp8_tiles: Matrix\(.*\) is not aligned"):
        fp8_tiles([matrix], 1024)
