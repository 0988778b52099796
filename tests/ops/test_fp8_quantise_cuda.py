"""The kernel that casts to E4M3, compared with its reference bit for bit."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import on_gpu, poison_cache, skip_without_fp8
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.ops import Cast

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Rows and columns of a block are 128, of a thread 8; rows are padded to multiples of 16.
SIZES = [
    (1, 16), (1, 1024), (7, 48), (15, 32), (16, 144), (17, 1024), (127, 128), (128, 128),
    (129, 272), (777, 1040), (3712, 1024), (3001, 4096), (9, 65536),
]  # fmt: skip


@pytest.fixture(autouse=True)
def with_fp8() -> None:
    skip_without_fp8()


def cast_of(scale: float, amax: float = 0.0, saturated: int = 0, device: str = "cuda") -> Cast:
    return Cast(*(torch.tensor(x, device=device) for x in (scale, amax, saturated)))


def assert_equals_reference(x: Tensor, scale: float, *before: float) -> None:
    """x: on a CPU. before: amax and saturated."""
    expected, ours = (cast_of(scale, *before, device=device) for device in ("cpu", "cuda"))
    results = ops.fp8_quantise(x, expected)
    poison_cache()
    mine = ops.fp8_quantise(on_gpu(x), ours)
    names = ("values", "transpose", "scale", "amax", "saturated")
    for name, a, b in zip(names, (*mine, *ours), (*results, *expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous()
        assert torch.equal(bits(a.cpu()), bits(b)), name


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def wild(rows: int, columns: int) -> Tensor:
    """Numbers of all sizes, with infinities, NaN and negative zero."""
    torch.manual_seed(rows + columns)
    x = torch.randn(rows, columns) * torch.exp(3 * torch.randn(rows, columns))
    numbers = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, -0.0, 1e38, -(2.0**-11)])
    x[0, : len(numbers)] = numbers
    x[-1, -len(numbers) :] = numbers
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_equals_the_reference(rows, columns, dtype):
    assert_equals_reference(wild(rows, columns).to(dtype), 2.0**-4)


@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**-20, 8.0, 2.0**60])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_number(dtype, scale):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(256, 256)
    assert_equals_reference(every.clone(), scale)


def test_ties_round_to_even_and_their_neighbours_to_the_nearest():
    numbers = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).double()
    ties = ((numbers[1:] + numbers[:-1]) / 2).float()
    x = torch.stack([torch.nextafter(ties, ties - 1), ties, torch.nextafter(ties, ties + 1)])
    assert_equals_reference(torch.cat([x, -x[:, :2]], 1), 1.0)


@pytest.mark.parametrize("before", [(2.0, 5), (1e30, 2**40)])
def test_statistics_continue(before):
    torch.manual_seed(0)
    assert_equals_reference(9 * torch.randn(150, 160), 2.0**-6, *before)


def test_no_finite_number():
    x = torch.full((20, 32), torch.inf)
    x[::2] = torch.nan
    assert_equals_reference(x, 1.0)


def test_no_rows():
    assert_equals_reference(torch.empty(0, 48), 1.0, 3.0, 4)


def test_strided_rows():
    x = torch.full((90, 320), torch.nan, dtype=torch.bfloat16)
    x[:, 8:152] = wild(90, 144)
    assert_equals_reference(x[:, 8:152], 0.5)


def test_same_input_same_bits():
    x = on_gpu(wild(3001, 1040).bfloat16())
    results = []
    for _ in range(3):
        cast = cast_of(0.5)
        values, transpose = ops.fp8_quantise(x, cast)
        results.append((bits(values), bits(transpose), *cast))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_replayed_graph_reads_the_scale_anew():
    x = on_gpu(wild(300, 272).bfloat16())
    cast = cast_of(1.0)

    def run() -> tuple[Tensor, Tensor]:
        return ops.fp8_quantise(x, cast)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for power in (-5, 3):
        for scalar, value in zip(cast, cast_of(2.0**power), strict=True):
            scalar.copy_(value)
        graph.replay()
        expected = cast_of(2.0**power, device="cpu")
        results = ops.fp8_quantise(x.cpu(), expected)
        pairs = zip((*captured, *cast), (*results, *expected), strict=True)
        assert all(torch.equal(bits(a.cpu()), bits(b)) for a, b in pairs)


@pytest.mark.large
def test_more_elements_than_32_bits_count():
    rows, columns = 2**19 + 5, 4096
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-1, -1] = 600.0
    cast = cast_of(1.0)
    values, transpose = ops.fp8_quantise(x, cast)
    assert cast.amax == 600 and cast.saturated == 1
    of_last, _ = ops.fp8_quantise(x[-5:].cpu(), cast_of(1.0, device="cpu"))
    assert torch.equal(bits(values[-5:].cpu()), bits(of_last))
    assert transpose.shape == (columns, rows + 11)
    assert torch.equal(bits(transpose)[:, rows - 5 : rows].t(), bits(values)[-5:])
    assert not bits(transpose)[:, rows:].any()
    for first in (0, 2**18 + 3):
        part = slice(first, first + 1000)
        assert torch.equal(bits(transpose)[:, part].t(), bits(values)[part])


def test_refusals():
    cast = cast_of(1.0)
    with pytest.raises(RuntimeError, match="fp8_quantise: x must be contiguous in its last dim"):
        ops.fp8_quantise(on_gpu(torch.randn(4, 40)[:, 3:35]), cast)
    with pytest.raises(ValueError, match="fp8_quantise: fp8 needs rows of a multiple of 16"):
        ops.fp8_quantise(torch.randn(4, 24).cuda(), cast)
    with pytest.raises(ValueError, match="fp8_quantise: x must be float16 or bfloat16 or float32"):
        ops.fp8_quantise(torch.randn(4, 32).double().cuda(), cast)
    assert cast.amax == 0 and cast.saturated == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_column_sums(rows, columns, dtype):
    """Of the numbers before the cast; it does not change."""
    torch.manual_seed(rows + columns)
    x = (2 * torch.randn(rows, columns)).to(dtype).cuda()
    cast = cast_of(2.0**-6)
    poison_cache()
    plain = ops.fp8_quantise(x, cast)
    results = []
    for _ in range(2):
        sums = torch.full((columns,), torch.nan, device="cuda")
        mine = ops.fp8_quantise(x, cast, sums)
        assert all(map(torch.equal, map(bits, mine), map(bits, plain)))
        results.append(sums)
    assert torch.equal(*results)
    size = x.double().abs().sum(0)
    assert ((results[0] - x.double().sum(0)).abs() <= 1e-5 * size + 1e-6).all()
    held = torch.randn(columns, device="cuda").to(dtype)
    expected = held.clone().add_(results[0])
    ops.fp8_quantise(x, cast, held, True)
    assert torch.equal(held, expected)
