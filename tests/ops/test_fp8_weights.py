"""The cast of all weights is `fp8_quantise` of each, bit for bit."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import check_op, spaced

from lightseq_fairseq import ops
from lightseq_fairseq.ops.fp8_quantise import E4M3

# (first element in the flat buffer, rows, columns), in another order than in memory
MATRICES = ((128, 16, 48), (2048, 32, 16), (1024, 16, 16))
SIZES = [rows * columns for _, rows, columns in MATRICES]


def arguments(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    firsts = [sum(SIZES[:place]) for place in range(len(SIZES))]
    places = [(start, first, *shape) for (start, *shape), first in zip(MATRICES, firsts)]
    return {
        "weights": torch.randn(4096).to(dtype),
        "places": torch.tensor(places),
        "scale": torch.tensor([2.0**-9, 2.0**-7, 1.0]),
        "amax": torch.tensor([0.5, 9.0, 0.0]),
        "saturated": torch.tensor([3, 0, 0]),
        "values": torch.full((sum(SIZES),), 0x7F, dtype=torch.uint8).view(E4M3),
        "transposes": torch.full((sum(SIZES),), 0x7F, dtype=torch.uint8).view(E4M3),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_is_the_cast_of_each_matrix(dtype):
    given, before = arguments(dtype), arguments(dtype)
    given["weights"][130] = torch.nan
    ops.fp8_weights(**given)
    first = 0
    for place, (start, rows, columns) in enumerate(MATRICES):
        matrix = given["weights"][start : start + rows * columns].view(rows, columns)
        scalars = [before[name][place] for name in ("scale", "amax", "saturated")]
        results = ops.fp8_quantise(matrix, *scalars)
        for name, result in zip(("values", "transposes"), results, strict=True):
            ours = given[name][first : first + matrix.numel()].view(torch.uint8)
            assert torch.equal(ours, result.view(torch.uint8).flatten())
        assert given["amax"][place] == scalars[1] and given["saturated"][place] == scalars[2]
        first += matrix.numel()
    assert given["saturated"][0] > 3


def test_scales_may_be_apart():
    given, expected = arguments(), arguments()
    given["scale"] = spaced(given["scale"])
    ops.fp8_weights(**given)
    ops.fp8_weights(**expected)
    for name in ("values", "transposes"):
        assert torch.equal(given[name].view(torch.uint8), expected[name].view(torch.uint8))


def test_opcheck():
    check_op("fp8_weights", *arguments().values())


def test_refusals():
    more = torch.tensor([[4, 0, 0, 0], [0, 8, 0, 0], [0, 0, 8, 0], [0, 0, 0, 8]])
    unaligned = (arguments()["places"] + row for row in more)
    for name, wrong, sentence in (
        ("weights", torch.zeros(4096, dtype=torch.float64), "weights must be float16 or bfloat16"),
        ("places", torch.zeros(3, 3, dtype=torch.int64), r"places must have shape \[M, 4\]"),
        ("scale", torch.ones(2), r"scale must have shape \[3\]"),
        ("transposes", torch.zeros(16).to(E4M3), r"transposes must have shape \[1536\]"),
        ("saturated", torch.zeros(6, dtype=torch.int64)[::2], "saturated must be contiguous"),
        ("weights", torch.zeros(2500), "32 rows and 16 columns does not fit at element 2048 of"),
        ("scale", torch.tensor([1.0, 3.0, 1.0]), "scale must be powers of two"),
        *(("places", wrong, "is not aligned to 16") for wrong in unaligned),
    ):
        with pytest.raises(ValueError, match=f"fp8_weights: .*{sentence}"):
            ops.fp8_weights(**{**arguments(), name: wrong})
