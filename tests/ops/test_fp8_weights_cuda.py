"""The kernels that cast all weights, compared with their references bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.ops_testing import adam_arguments, flat, skip_without_fp8, spaced
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.ops import Cast, WeightCast
from lightseq_fairseq.ops.casting import E4M3
from lightseq_fairseq.ops.fp8_weights import Matrix, fp8_tiles

Arguments = dict[str, Any]

# A block casts 64 rows of 128 columns. The last one has more tiles than blocks are resident on a
# GPU.
MATRICES: dict[str, list[tuple[int, int]]] = {
    "smallest": [(16, 16)],
    "one tile": [(64, 128)],
    "edges": [(16, 144), (144, 16), (112, 128), (128, 112), (272, 400), (1040, 784)],
    "wide and high": [(16, 16384), (16384, 16)],
    "some without rows": [(0, 48), (48, 32), (0, 16), (0, 0), (32, 48), (16, 0)],
    "layer": [(192, 64), (64, 64), (256, 64), (64, 256)] * 3,
    "many": [(16, 16), (32, 16), (16, 48)] * 900,
    "large": [(4096, 4608), (16, 16)],
}
ALL_MATRICES = pytest.mark.parametrize("shapes", MATRICES.values(), ids=MATRICES)
# Parameters behind each matrix: less than a row of a tile, and more than a tile.
GAPS = (8, 8196, 0, 260, 20000)
UNTOUCHED = 0x55


@pytest.fixture(autouse=True)
def with_fp8() -> None:
    skip_without_fp8()


def arguments(shapes: Sequence[tuple[int, int]]) -> Arguments:
    """Arguments of `fp8_weights` on a CPU, with gaps between the matrices, which lie in memory in
    another order than in the table. Weights have all sizes, and some are not finite."""
    torch.manual_seed(len(shapes))
    matrices, start, place = [], 24, 16
    for i, (rows, columns) in enumerate(reversed(shapes)):
        matrices.append(Matrix(start, place, rows, columns))
        start += rows * columns + GAPS[i % len(GAPS)]
        place += rows * columns + 16
    count = start + 3  # no multiple of four
    weights = torch.randn(count) * torch.exp(3 * torch.randn(count))
    numbers = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, -0.0, 1e38, -(2.0**-11)])
    weights[24 : 24 + len(numbers)] = numbers
    unwritten = torch.full((place,), UNTOUCHED, dtype=torch.uint8)
    cast = WeightCast(
        tiles=fp8_tiles(matrices[::-1], count),
        scale=torch.exp2(torch.randint(-8, 4, (len(shapes),)).float()),
        amax=torch.exp(3 * torch.randn(len(shapes))),
        saturated=torch.randint(2**40, (len(shapes),)),
        values=unwritten.view(E4M3),
        transposes=unwritten.clone().view(E4M3),
    )
    return {"weights": weights.bfloat16(), "cast": cast}


def of_adam(shapes: Sequence[tuple[int, int]]) -> Arguments:
    """Arguments of `adam_step`, in order."""
    given = arguments(shapes)
    weights = given["weights"].nan_to_num(0.5, 0.5, 0.5)
    return {**adam_arguments(weights), "cast": given["cast"]}


def on_gpu(given: Arguments) -> Arguments:
    ours = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in given.items()}
    return ours | {"cast": WeightCast(*(x.cuda() for x in given["cast"]))}


def bits(x: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(kinds[x.itemsize]).cpu()


def assert_equal(ours: Arguments, expected: Arguments) -> None:
    ours, expected = (given | given["cast"]._asdict() for given in (ours, expected))
    for name, x in expected.items():
        if isinstance(x, Tensor):
            assert torch.equal(bits(ours[name]), bits(x)), name


@ALL_MATRICES
def test_cast_equals_the_reference(shapes):
    given = arguments(shapes)
    ours = on_gpu(given)
    ops.fp8_weights(**ours)
    ops.fp8_weights(**given)
    assert_equal(ours, given)


@ALL_MATRICES
@pytest.mark.parametrize("norm", [2.0, math.inf])
def test_adam_has_the_bits_of_update_and_cast(shapes, norm):
    """If the gradient has overflowed, the old weights are cast."""
    given = of_adam(shapes)
    given["norm"].fill_(norm)
    ours, expected = on_gpu(given), on_gpu(given)
    ops.adam_step(**ours)
    ops.adam_step(**expected | {"cast": None})
    ops.fp8_weights(expected["param_low"], expected["cast"])
    assert_equal(ours, expected)
    assert ours["step"] == (8 if math.isfinite(norm) else 7)


def test_adam_has_the_bits_of_the_reference():
    given = of_adam(MATRICES["edges"])
    ours, expected = on_gpu(given), on_gpu(given)
    for _ in range(3):
        ops.adam_step(**ours)
        ops.REFERENCES["adam_step"](*flat(expected.values()))
    assert_equal(ours, expected)


def test_no_matrices():
    given = arguments([(16, 16)])
    tiles, *scalars = given["cast"][:4]
    tiles = fp8_tiles([], len(given["weights"]))
    given["cast"] = WeightCast(tiles, *(x[:0] for x in scalars), *given["cast"][4:])
    ours = on_gpu(given)
    ops.fp8_weights(**ours)
    assert_equal(ours, given)


def test_parts_of_tensors():
    """Scalars are rows of a table, as in training."""
    given = arguments(MATRICES["layer"])
    scales, amaxes = (torch.stack([x] * 3).cuda() for x in given["cast"][1:3])
    scales, ours = spaced(scales), on_gpu(given)
    ours["cast"] = ours["cast"]._replace(scale=scales[1], amax=amaxes[1])
    ops.fp8_weights(**ours)
    before = given["cast"].amax.clone()
    ops.fp8_weights(**given)
    assert_equal(ours, given)
    assert torch.equal(amaxes[::2].cpu(), torch.stack([before] * 2))


def test_same_input_same_bits():
    given = of_adam(MATRICES["large"] + MATRICES["edges"])
    results = []
    for _ in range(3):
        ours = on_gpu(given)
        ops.adam_step(**ours)
        results.append(ours)
    for other in results[1:]:
        assert_equal(other, results[0])


@pytest.mark.parametrize(
    ("run", "make", "changed"),
    [(ops.fp8_weights, arguments, "weights"), (ops.adam_step, of_adam, "grad")],
)
def test_replayed_graph_reads_its_input_anew(run, make, changed):
    given = make(MATRICES["edges"])
    expected, ours = on_gpu(given), on_gpu(given)
    run(**on_gpu(given))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(**ours)
    assert_equal(ours, given)  # captured, not run
    for factor in (4.0, 0.5):
        for arguments_of in (expected, ours):
            arguments_of[changed].mul_(factor)
            arguments_of["cast"].scale.div_(factor**2)
        graph.replay()
        run(**expected)
        assert_equal(ours, expected)


@pytest.mark.large
def test_more_elements_than_32_bits_count():
    """Each matrix has the bits of `fp8_quantise`; the second is behind 2^32 numbers."""
    shapes = [(2**20 + 16, 4096), (4112, 1040)]
    matrices, end = [], 0
    for rows, columns in shapes:
        matrices.append(Matrix(end, end, rows, columns))
        end += rows * columns
    weights = torch.empty(end, dtype=torch.bfloat16, device="cuda").normal_()
    weights[-1] = 600.0
    values, transposes = (
        torch.empty(end, dtype=torch.uint8, device="cuda").view(E4M3) for _ in range(2)
    )
    scale, amax = torch.tensor([2.0**-6, 1.0]).cuda(), torch.zeros(2).cuda()
    saturated = torch.zeros(2, dtype=torch.int64).cuda()
    tiles = fp8_tiles(matrices, end).cuda()
    ops.fp8_weights(weights, WeightCast(tiles, scale, amax, saturated, values, transposes))
    for i, (start, _, rows, columns) in enumerate(matrices):
        part = slice(start, start + rows * columns)
        cast = Cast(scale[i], torch.zeros_like(amax[i]), torch.zeros_like(saturated[i]))
        results = ops.fp8_quantise(weights[part].view(rows, columns), cast)
        for result, ours in zip(results, (values, transposes), strict=True):
            assert torch.equal(ours.view(torch.uint8)[part], result.view(torch.uint8).flatten())
        assert amax[i] == cast.amax and saturated[i] == cast.saturated
    assert amax[1] == 600 and saturated[1] == 1


def test_refusals():
    weights, cast = on_gpu(arguments(MATRICES["layer"])).values()
    for given in (
        (weights[1:], cast),
        (weights, cast._replace(values=cast.values[1:], transposes=cast.transposes[:-1])),
        (weights, cast._replace(values=cast.values[:-1], transposes=cast.transposes[1:])),
    ):
        with pytest.raises(RuntimeError, match=r"fp8_weights: .* must be aligned to \d+ bytes"):
            ops.fp8_weights(*given)
    with pytest.raises(ValueError, match="fp8_weights: tiles is on cpu, the other"):
        ops.fp8_weights(weights, cast._replace(tiles=cast.tiles.cpu()))
    ours = on_gpu(of_adam(MATRICES["layer"]))
    vectors = ("param", "exp_avg", "exp_avg_sq", "grad", "param_low")
    with pytest.raises(RuntimeError, match=r"adam_step: .* must be aligned to 8 bytes"):
        ops.adam_step(**ours | {name: ours[name][1:] for name in vectors})
