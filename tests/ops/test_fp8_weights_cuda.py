"""The kernel that casts all weights, compared with its reference bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from helpers.ops_testing import check_op, skip_without_fp8, spaced
from torch import Tensor

from lightseq_fairseq import library, ops
from lightseq_fairseq.ops.fp8_quantise import E4M3

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# A block casts 128 rows of 128 columns. The last ones have more tiles than blocks are resident on a
# GPU: of many matrices, and of one.
MATRICES: dict[str, list[tuple[int, int]]] = {
    "smallest": [(16, 16)],
    "one tile": [(128, 128)],
    "edges": [(16, 144), (144, 16), (112, 128), (128, 112), (272, 400), (1040, 784)],
    "wide and high": [(16, 16384), (16384, 16)],
    "some without rows": [(0, 48), (48, 32), (0, 16), (0, 0), (32, 48), (16, 0)],
    "layer": [(192, 64), (64, 64), (256, 64), (64, 256)] * 3,
    "more matrices than blocks": [(16, 16), (32, 16), (16, 48)] * 900,
    "one that all blocks share": [(4096, 4608), (16, 16)],
}
WRITTEN = ("amax", "saturated", "values", "transposes")
UNTOUCHED = 0x55


@pytest.fixture(autouse=True)
def with_fp8() -> None:
    skip_without_fp8()


def arguments(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Arguments of the op on a CPU, with gaps between the matrices, which lie in memory in another
    order than in the table. Weights have all sizes, and some are not finite."""
    torch.manual_seed(len(shapes))
    places, start, first = [], 24, 16
    for rows, columns in reversed(shapes):
        places.append((start, first, rows, columns))
        start += rows * columns + 8
        first += rows * columns + 16
    weights = torch.randn(start) * torch.exp(3 * torch.randn(start))
    numbers = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, -0.0, 1e38, -(2.0**-11)])
    weights[24 : 24 + len(numbers)] = numbers
    count = len(shapes)
    unwritten = torch.full((first,), UNTOUCHED, dtype=torch.uint8)
    return {
        "weights": weights.to(dtype),
        "places": torch.tensor(places[::-1]),
        "scale": torch.exp2(torch.randint(-8, 4, (count,)).float()),
        "amax": torch.exp(3 * torch.randn(count)),
        "saturated": torch.randint(2**40, (count,)),
        "values": unwritten.view(E4M3),
        "transposes": unwritten.clone().view(E4M3),
    }


def on_gpu(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.cuda() for name, x in given.items()}


def bits(x: Tensor) -> Tensor:
    return (x.view(torch.uint8) if x.dtype == E4M3 else x).cpu()


def assert_equal(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, x in expected.items():
        if name != "weights":  # NaN does not equal itself
            assert torch.equal(bits(ours[name]), bits(x)), name


def test_kernel_is_loaded():
    assert "fp8_weights" in library.load().kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", MATRICES.values(), ids=MATRICES)
def test_equals_the_reference(shapes, dtype):
    given = arguments(shapes, dtype)
    ours = on_gpu(given)
    ops.fp8_weights(**ours)
    ops.fp8_weights(**given)
    assert_equal(ours, given)


def test_no_matrices():
    given = arguments([(16, 16)])
    for name in ("places", "scale", "amax", "saturated"):
        given[name] = given[name][:0]
    ours = on_gpu(given)
    ops.fp8_weights(**ours)
    assert_equal(ours, given)


def test_parts_of_tensors():
    """Scalars are rows of a table, as in training."""
    given = arguments(MATRICES["layer"])
    tables = {name: torch.stack([given[name]] * 3).cuda() for name in ("scale", "amax")}
    tables["scale"] = spaced(tables["scale"])
    ours = on_gpu(given) | {name: table[1] for name, table in tables.items()}
    ops.fp8_weights(**ours)
    before = given["amax"].clone()
    ops.fp8_weights(**given)
    assert_equal(ours, given)
    assert torch.equal(tables["amax"][::2].cpu(), torch.stack([before] * 2))


def test_same_input_same_bits():
    given = arguments(MATRICES["one that all blocks share"] + MATRICES["edges"])
    results = []
    for _ in range(3):
        ours = on_gpu(given)
        ops.fp8_weights(**ours)
        results.append(ours)
    for other in results[1:]:
        assert_equal(other, results[0])


def test_replayed_graph_reads_weights_and_scales_anew():
    given = arguments(MATRICES["edges"])
    ours = on_gpu(given)
    ops.fp8_weights(**on_gpu(given))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.fp8_weights(**ours)
    assert_equal(ours, given)  # captured, not run
    for factor in (4.0, 0.5):
        for arguments_of in (given, ours):
            arguments_of["weights"].mul_(factor)
            arguments_of["scale"].div_(factor**2)
        graph.replay()
        ops.fp8_weights(**given)
        assert_equal(ours, given)


@pytest.mark.large
def test_more_elements_than_32_bits_count():
    """Each matrix has the bits of `fp8_quantise`; the second is behind 2^32 numbers."""
    shapes = [(2**20 + 16, 4096), (4112, 1040)]
    places, first = [], 0
    for rows, columns in shapes:
        places.append((first, first, rows, columns))
        first += rows * columns
    weights = torch.empty(first, dtype=torch.bfloat16, device="cuda").normal_()
    weights[-1] = 600.0
    values, transposes = (
        torch.empty(first, dtype=torch.uint8, device="cuda").view(E4M3) for _ in range(2)
    )
    scale, amax = torch.tensor([2.0**-6, 1.0]).cuda(), torch.zeros(2).cuda()
    saturated = torch.zeros(2, dtype=torch.int64).cuda()
    ops.fp8_weights(
        weights, torch.tensor(places).cuda(), scale, amax, saturated, values, transposes
    )
    for i, (start, _, rows, columns) in enumerate(places):
        part = slice(start, start + rows * columns)
        of_cast = torch.zeros_like(amax[i]), torch.zeros_like(saturated[i])
        results = ops.fp8_quantise(weights[part].view(rows, columns), scale[i], *of_cast)
        for result, ours in zip(results, (values, transposes), strict=True):
            assert torch.equal(ours.view(torch.uint8)[part], result.view(torch.uint8).flatten())
        assert amax[i] == of_cast[0] and saturated[i] == of_cast[1]
    assert amax[1] == 600 and saturated[1] == 1


def test_opcheck():
    check_op("fp8_weights", *on_gpu(arguments(MATRICES["layer"])).values())


def test_refusals():
    ours = on_gpu(arguments(MATRICES["layer"]))
    for name in ("weights", "values", "transposes"):
        moved = {name: ours[name][1:]}
        if name != "weights":
            other = "transposes" if name == "values" else "values"
            moved[other] = ours[other][:-1]
        with pytest.raises(RuntimeError, match=r"fp8_weights: .* must be aligned to 16 bytes"):
            ops.fp8_weights(**{**ours, **moved})
    with pytest.raises(ValueError, match="fp8_weights: places is on cpu, the other"):
        ops.fp8_weights(**{**ours, "places": ours["places"].cpu()})
