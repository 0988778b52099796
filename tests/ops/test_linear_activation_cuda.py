"""A GEMM with activation and dropout compared with float64: by tiles, and without them."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from helpers.ops_testing import assert_kernel_as_good_as, leaf, on_gpu, poison_cache
from helpers.ops_testing import make_rng as rng_on
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops
from lightseq_fairseq.base import library
from lightseq_fairseq.ops.linear_activation import read_slope

make_rng = functools.partial(rng_on, device="cuda")

pytestmark = pytest.mark.gpu

SITE = 2
HALVES = [torch.float16, torch.bfloat16]
GELUS = {
    "gelu": functional.gelu,
    "gelu_accurate": lambda x: functional.gelu(x, approximate="tanh"),
}
ACTIVATIONS = {"relu": functional.relu, **GELUS}
# Rows, inputs, outputs. Tiles of 128 x 256 for most SMs of an H200: complete tiles; an odd
# number of row tiles, so that the last clusters have one tile; incomplete tiles on all sides; a
# single step, which processes 16 rows of a warp at once; seven steps, which process three; 17
# steps, more than a warp has rows; several tiles per block.
TILED = [
    *((2304, 512, 2048), (4224, 1024, 1024), (2199, 520, 2056), (9001, 40, 264)),
    *((3712, 448, 1024), (3712, 1088, 1024), (8192, 768, 3072)),
]
OTHERS = [(5, 64, 40), (40, 64, 40), (300, 256, 1024)]


def inputs(rows: int, c: int, f: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, bias"""
    torch.manual_seed(rows + c + f)
    x = torch.randn(rows, c, device="cuda").to(dtype)
    weight = (torch.randn(f, c, device="cuda") * 1.5 * c**-0.5).to(dtype)
    return x, weight, torch.randn(f, device="cuda").to(dtype)


def run(
    operands: tuple[Tensor, ...], activation: str = "gelu", p: float = 0.0,
    need_slope: bool = True, rng: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rng = make_rng() if rng is None else rng
    poison_cache()
    return ops.linear_activation_fwd(*operands, activation, p, rng, SITE, need_slope)


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
    y, slope = run(operands, activation, p)
    ours = y, read_slope(slope).to(y.dtype)
    names = ("y",) if activation == "relu" else ("y", "slope")
    for name, *three in zip(names, ours, plain, exact):
        assert_kernel_as_good_as(*three, name, half_roundings=0.5)


def test_kernel_is_loaded():
    assert "linear_activation_fwd" in library.load().kernels


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", GELUS)
@pytest.mark.parametrize(("rows", "c", "f"), TILED + OTHERS)
def test_errs_no_more_than_torch(rows, c, f, activation, dtype):
    check(inputs(rows, c, f, dtype), activation)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(("rows", "c", "f"), [TILED[2], OTHERS[0], OTHERS[2]])
def test_every_activation_with_dropout(rows, c, f, p, activation, dtype):
    check(inputs(rows, c, f, dtype), activation, p)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "c", "f"), [TILED[2], OTHERS[2]])
def test_drops_what_the_reference_drops(rows, c, f, dtype):
    keep = ops.dropout_mask(make_rng(device="cpu"), SITE, rows, f, 0.5).cuda()
    x, weight, _ = inputs(rows, c, f, dtype)
    bias = torch.full((f,), 9.0, dtype=dtype, device="cuda")  # gelu is never 0, its slope about 1
    y, slope = run((x, weight, bias), p=0.5)
    assert torch.equal(y != 0, keep) and torch.equal(read_slope(slope) != 0, keep)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", GELUS)
@pytest.mark.parametrize(("rows", "c", "f"), TILED + OTHERS)
def test_same_bits_again_and_without_slope(rows, c, f, activation, dtype):
    """Layers that backward computes again need the same bits."""
    operands = inputs(rows, c, f, dtype)
    first, second = (run(operands, activation) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    y, slope = run(operands, activation, need_slope=False)
    assert torch.equal(y, first[0]) and slope.numel() == 0


@pytest.mark.parametrize(("rows", "c", "f"), [TILED[0], TILED[2], OTHERS[2]])
def test_rows_of_a_wider_matrix(rows, c, f):
    x, weight, bias = inputs(rows, c, f, torch.bfloat16)
    wide = torch.full((rows, 2048), math.nan, dtype=x.dtype, device="cuda")
    wide[:, 256 : 256 + c] = x
    results = run((wide[:, 256 : 256 + c], weight, bias)), run((x, weight, bias))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("activation", GELUS)
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize(("rows", "c", "f"), [TILED[0], OTHERS[2]])
def test_nan_stays(rows, c, f, p, activation):
    x, weight, bias = inputs(rows, c, f, torch.bfloat16)
    x[rows // 2, 3] = math.nan
    bias[9] = math.nan
    y, slope = run((x, weight, bias), activation, p)
    for found in (y.isnan(), slope == 255):
        assert found[rows // 2].all() and found[:, 9].all()
        assert found.sum() == rows + f - 1


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", GELUS)
def test_gelu_of_infinities_is_its_limit(activation, dtype):
    """By tiles; bias_activation_dropout's tests cover the kernel without them."""
    x, weight, bias = inputs(*TILED[0], dtype)
    numbers = torch.tensor([math.inf, -math.inf, 200.0, -200.0, 60000.0, -60000.0], device="cuda")
    bias[:6] = numbers
    y, slope = (read_slope(t)[:, :6].float() for t in run((x, weight, bias), activation))
    assert (y[:, 0] == math.inf).all()
    assert (y[:, 1::2].abs() < 1e-30).all() and (y[:, 2::2] > 100).all()
    assert torch.allclose(slope, torch.tensor([1.0, 0] * 3, device="cuda"), rtol=0, atol=1e-30)


def test_in_a_graph():
    """The op runs between a kernel that writes its input and a kernel that reads its results. Each
    replay draws new dropout bits."""
    x, weight, bias = inputs(*TILED[1], torch.bfloat16)
    given, rng = x.clone(), make_rng(micro_batch=0)

    def totals(x: Tensor) -> list[Tensor]:
        settings = "gelu", 0.5, rng, SITE, True
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


def test_no_rows():
    x, weight, bias = inputs(*OTHERS[2], torch.bfloat16)
    y, slope = run((x[:0], weight, bias))
    assert y.shape == slope.shape == (0, 1024)


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


def test_float64_is_refused_whatever_the_number_of_rows():
    for rows in (TILED[0][0], OTHERS[0][0]):
        with pytest.raises(RuntimeError, match="must be float32, float16 or bfloat16 on a GPU"):
            run(inputs(rows, *TILED[0][1:], torch.float64))
