"""A GEMM with activation and dropout compared with float64: by tiles, and without them; also in
fp8."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from helpers.fp8_operands import assert_is_cast, bits, numbers, parts, quantised, widened, with_nan
from helpers.ops_testing import (
    assert_kernel_as_good_as,
    check_op,
    leaf,
    make_cast,
    on_gpu,
    poison_cache,
    skip_without_fp8,
)
from helpers.ops_testing import make_rng as rng_on
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops
from lightseq_fairseq.base import library
from lightseq_fairseq.ops import Cast, Dropout, Quantised
from lightseq_fairseq.ops.casting import E4M3
from lightseq_fairseq.ops.linear_activation import read_slope

make_rng = functools.partial(rng_on, device="cuda")

pytestmark = pytest.mark.gpu

SITE = 2
HALVES = [torch.float16, torch.bfloat16]
WITH_SLOPE = {
    "gelu": functional.gelu,
    "gelu_accurate": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}
ACTIVATIONS = {"relu": functional.relu, **WITH_SLOPE}
# Rows, inputs, outputs. Tiles of 128 x 256 for most SMs of an H200: complete tiles; an odd
# number of row tiles, so that the last clusters have one tile; incomplete tiles on all sides; a
# single step, which processes 16 rows of a warp at once; seven steps, which process three; 17
# steps, more than a warp has rows; several tiles per block.
TILED = [
    *((2304, 512, 2048), (4224, 1024, 1024), (2199, 520, 2056), (9001, 40, 264)),
    *((3712, 448, 1024), (3712, 1088, 1024), (8192, 768, 3072)),
]
OTHERS = [(5, 64, 40), (40, 64, 40), (300, 256, 1024)]
# In fp8 widths are multiples of 16. The last but one: two steps, the second one incomplete.
FP8_TILED = [
    *((2304, 512, 2048), (4224, 1024, 1024), (2192, 528, 2064), (9008, 32, 272)),
    *((3712, 144, 1024), (8192, 256, 3072)),
]
FP8_OTHERS = [(5, 64, 48), (300, 256, 1024), (2199, 512, 2048)]
SOME = pytest.mark.parametrize(
    ("rows", "c", "f", "kind"),
    [
        *((*size, dtype) for size in (TILED[0], TILED[2], OTHERS[2]) for dtype in HALVES),
        *((*size, E4M3) for size in (FP8_TILED[0], FP8_TILED[2], FP8_OTHERS[1])),
    ],
)
ALL = pytest.mark.parametrize(
    ("rows", "c", "f", "kind"),
    [
        *((*size, dtype) for size in TILED + OTHERS for dtype in HALVES),
        *((*size, E4M3) for size in FP8_TILED + FP8_OTHERS),
    ],
)


def inputs(rows: int, c: int, f: int, kind: torch.dtype) -> tuple[Any, Any, Tensor]:
    """x, weight, bias; in fp8 bias is bfloat16."""
    torch.manual_seed(rows + c + f)
    x = torch.randn(rows, c, device="cuda")
    weight = torch.randn(f, c, device="cuda") * 1.5 * c**-0.5
    bias = torch.randn(f, device="cuda")
    if kind != E4M3:
        return x.to(kind), weight.to(kind), bias.to(kind)
    skip_without_fp8()
    scale = 2.0**-5 * 2.0 ** round(-math.log2(c) / 2)
    return quantised(x, 2.0**-6), quantised(weight, scale), bias.bfloat16()


def run(
    operands: tuple[Any, ...], activation: str = "gelu", p: float = 0.0,
    need_slope: bool = True, cast: Cast | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y, transpose and slope; in fp8 with a cast."""
    if cast is None and isinstance(operands[0], Quantised):
        cast = make_cast(device="cuda")
    dropout = Dropout(p, make_rng(), SITE)
    poison_cache()
    return ops.linear_activation_fwd(*operands, activation, dropout, need_slope, cast)


def formula(
    operands: tuple[Tensor, ...], activation: str, p: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """y and slope in plain torch."""
    z = leaf(functional.linear(*(t.to(dtype) for t in operands)), dtype)
    y = ACTIVATIONS[activation](z)
    if p > 0:
        y = y * ops.dropout_mask(make_rng(device="cpu"), SITE, *z.shape, p).cuda()
    y.sum().backward()
    return y.detach() / (1 - p), z.grad


def check(operands: tuple[Tensor, ...], activation: str, p: float = 0.0) -> None:
    plain, exact = (formula(operands, activation, p, t) for t in (operands[0].dtype, torch.float64))
    y, transpose, slope = run(operands, activation, p)
    assert transpose.numel() == 0
    ours = y, read_slope(slope).to(y.dtype)
    names = ("y",) if activation == "relu" else ("y", "slope")
    for name, *three in zip(names, ours, plain, exact):
        assert_kernel_as_good_as(*three, name, half_roundings=0.5)


def check_fp8(operands: tuple[Any, ...], activation: str, p: float) -> None:
    x, weight, bias = map(numbers, operands)
    product, sizes = x @ weight.t(), x.abs() @ weight.abs().t()
    # Hopper adds up to 128 terms with fewer bits than float32; without tiles, results are rounded
    # to bfloat16 between.
    error = sizes * 2.0**-11 + (product.abs() + bias.abs()) * 2.0**-8
    z = leaf(product + bias, torch.float64)
    exact = ACTIVATIONS[activation](z)
    exact.sum().backward()
    kept = (
        ops.dropout_mask(make_rng(device="cpu"), SITE, *z.shape, p).cuda() if p else z > -math.inf
    )
    exact, true = exact.detach() * kept / (1 - p), z.grad * kept
    # gelu's formula has an error of 2.5e-4; its derivative is at most 1.13.
    of_gelu = 0.0 if activation == "relu" else 1e-3
    bound = (1.13 * error + of_gelu * (1 + exact.abs())) * kept / (1 - p)
    cast = make_cast(device="cuda")
    values, transpose, slope = run(operands, activation, p, cast=cast)
    assert_is_cast(values, transpose, cast, exact.cpu(), bound.cpu())
    if activation == "relu":
        assert slope.numel() == 0
        return
    assert slope.dtype == torch.uint8
    assert ((read_slope(slope) - true).abs() <= 1 / 399 + error + 1e-3).all()
    assert not (read_slope(slope) * ~kept).any()


def test_kernel_is_loaded():
    assert "linear_activation_fwd" in library.load().kernels


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", WITH_SLOPE)
@pytest.mark.parametrize(("rows", "c", "f"), TILED + OTHERS)
def test_errs_no_more_than_torch(rows, c, f, activation, dtype):
    check(inputs(rows, c, f, dtype), activation)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(("rows", "c", "f"), [TILED[2], OTHERS[0], OTHERS[2]])
def test_every_activation_with_dropout(rows, c, f, p, activation, dtype):
    check(inputs(rows, c, f, dtype), activation, p)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(("rows", "c", "f"), FP8_TILED + FP8_OTHERS)
def test_fp8_is_the_cast_of_the_exact_numbers(rows, c, f, p, activation):
    check_fp8(inputs(rows, c, f, E4M3), activation, p)


@pytest.mark.parametrize(("rows", "c", "f"), [FP8_TILED[2], FP8_OTHERS[1]])
def test_saturated_numbers_are_counted(rows, c, f):
    operands, cast = inputs(rows, c, f, E4M3), make_cast(2.0**-8, "cuda")
    values, _, _ = run(operands, "relu", cast=cast)
    assert cast.saturated > 100
    assert (values.float() == 448).sum() >= cast.saturated - 3
    x, weight, bias = map(numbers, operands)
    most = (x @ weight.t() + bias).max()
    torch.testing.assert_close(cast.amax.double(), most, rtol=1e-2, atol=0)


@SOME
def test_drops_what_the_reference_drops(rows, c, f, kind):
    keep = ops.dropout_mask(make_rng(device="cpu"), SITE, rows, f, 0.5).cuda()
    x, weight, bias = inputs(rows, c, f, kind)
    bias.fill_(9.0)  # gelu is never 0, its slope about 1
    y, _, slope = run((x, weight, bias), p=0.5)
    assert torch.equal(y.float() != 0, keep) and torch.equal(read_slope(slope) != 0, keep)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@ALL
def test_same_bits_again_and_without_slope(rows, c, f, kind, activation):
    """Layers that backward computes again need the same bits."""
    operands = inputs(rows, c, f, kind)
    first, second = (run(operands, activation, 0.1) for _ in range(2))
    assert all(map(torch.equal, map(bits, first), map(bits, second)))
    *without, slope = run(operands, activation, 0.1, need_slope=False)
    assert all(map(torch.equal, map(bits, without), map(bits, first))) and slope.numel() == 0


@SOME
def test_rows_of_a_wider_matrix(rows, c, f, kind):
    x, weight, bias = inputs(rows, c, f, kind)
    wide = widened(x, 64), widened(weight, 64) if kind == E4M3 else weight, bias
    results = run(wide), run((x, weight, bias))
    assert all(map(torch.equal, *(map(bits, each) for each in results)))


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize(
    ("rows", "c", "f", "kind", "activation"),
    [
        *((*size, torch.bfloat16, name) for size in (TILED[0], OTHERS[2]) for name in WITH_SLOPE),
        *((*size, E4M3, name) for size in (FP8_TILED[0], FP8_OTHERS[1]) for name in ACTIVATIONS),
    ],
)
def test_nan_stays(rows, c, f, kind, p, activation):
    x, weight, bias = inputs(rows, c, f, kind)
    x = with_nan(x, rows // 2, 3)
    bias[9] = math.nan
    y, transpose, slope = run((x, weight, bias), activation, p)
    results = [y.float().isnan()]
    if kind == E4M3:
        results.append(transpose.float()[:, :rows].t().isnan())
    else:
        results.append(slope == 255)
    for found in results:
        assert found[rows // 2].all() and found[:, 9].all()
        assert found.sum() == rows + f - 1


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", WITH_SLOPE)
def test_infinities_have_their_limit(activation, dtype):
    """By tiles; bias_activation_dropout's tests cover the kernel without them."""
    x, weight, bias = inputs(*TILED[0], dtype)
    numbers = torch.tensor([math.inf, -math.inf, 200.0, -200.0, 60000.0, -60000.0], device="cuda")
    bias[:6] = numbers
    y, _, slope = run((x, weight, bias), activation)
    y, slope = y[:, :6].float(), read_slope(slope)[:, :6].float()
    assert (y[:, 0] == math.inf).all()
    assert (y[:, 1::2].abs() < 1e-30).all() and (y[:, 2::2] > 100).all()
    assert torch.allclose(slope, torch.tensor([1.0, 0] * 3, device="cuda"), rtol=0, atol=1e-30)


@pytest.mark.parametrize("kind", [torch.bfloat16, E4M3])
def test_in_a_graph(kind):
    """The op runs between a kernel that writes its input and a kernel that reads its results. Each
    replay draws new dropout bits."""
    x, weight, bias = inputs(*TILED[1], torch.bfloat16)
    given, rng, cast = x.clone(), make_rng(micro_batch=0), None
    if kind == E4M3:
        _, weight, _ = inputs(*TILED[1], kind)
        cast = make_cast(device="cuda")

    def totals(x: Tensor) -> list[Tensor]:
        if cast is not None:
            x = Quantised(*ops.fp8_quantise(x, cast), cast.scale)
        settings = "gelu", Dropout(0.5, rng, SITE), True, cast
        return [t.float().sum(0) for t in ops.linear_activation_fwd(x, weight, bias, *settings)]

    totals(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = totals(given.clone())
    for micro_batch, factor in ((1, 1.0), (2, 0.0), (3, -2.0)):
        rng[1] = micro_batch
        given.copy_(x * factor)
        graph.replay()
        expected = totals(given)
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.parametrize("kind", [torch.bfloat16, E4M3])
def test_no_rows(kind):
    y, transpose, slope = run(inputs(0, 256, 1024, kind))
    assert y.shape == slope.shape == (0, 1024)
    assert transpose.shape == ((1024, 0) if kind == E4M3 else (0,))


@pytest.mark.parametrize("kind", [torch.bfloat16, E4M3])
def test_opcheck(kind):
    x, weight, bias = inputs(9, 48, 64, kind)
    cast = [make_cast(device="cuda")] if kind == E4M3 else []
    settings = "gelu", Dropout(0.3, make_rng(), SITE), True
    check_op("linear_activation_fwd", parts(x), parts(weight), bias, *settings, *cast)


@pytest.mark.parametrize(
    ("f", "bias", "message"),
    [
        (12, torch.randn(12), "bias has rows of 12 elements; .* must be a multiple of 8"),
        (32, torch.randn(64)[::2], "bias must be contiguous in its last dimension"),
    ],
)
def test_refusals(f, bias, message):
    x, weight = torch.randn(40, 16, device="cuda"), torch.randn(f, 16, device="cuda")
    with pytest.raises(RuntimeError, match=f"linear_activation_fwd: {message}"):
        run((x, weight, on_gpu(bias)))


def test_refusals_in_fp8():
    x, weight, _ = inputs(4, 64, 48, E4M3)
    bias = torch.randn(96).bfloat16().cuda()[::2]
    with pytest.raises(RuntimeError, match="activation_fwd: bias must be contiguous in its last"):
        run((x, weight, bias))


def test_float64_is_refused_whatever_the_number_of_rows():
    for rows in (TILED[0][0], OTHERS[0][0]):
        with pytest.raises(RuntimeError, match="must be float32, float16 or bfloat16 on a GPU"):
            run(inputs(rows, *TILED[0][1:], torch.float64))
