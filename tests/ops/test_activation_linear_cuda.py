"""The backward pass of an activation and the GEMM after it, compared with float64: by tiles, and
without them; also in fp8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.fp8_operands import assert_is_cast, bits, numbers, parts, quantised, widened, with_nan
from helpers.linear_cases import OF_FP8_SUM, in_fp8
from helpers.ops_testing import (
    assert_as_good_as,
    assert_replays_draw_anew,
    check_op,
    make_cast,
    make_rng,
    poison_cache,
    skip_without_fp8,
)
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.base import library
from lightseq_fairseq.ops import Cast, Quantised
from lightseq_fairseq.ops.casting import E4M3
from lightseq_fairseq.ops.linear_activation import read_slope, store_slope

pytestmark = pytest.mark.gpu

P = 0.2  # dropout rate
ACTIVATIONS = pytest.mark.parametrize("activation", ["relu", "gelu"])
BF16, F32 = torch.bfloat16, torch.float32
HALVES = [torch.float16, BF16]
# Rows, inputs, outputs. Tiles of 128 x 256 for most SMs of an H200: complete tiles; a last pair
# with one tile; incomplete tiles on all sides; a single step of the sum; four tiles per block.
TILED = [
    *((2304, 2048, 512), (4224, 1024, 1024), (2199, 2056, 520), (9001, 264, 40)),
    *((3712, 1024, 512), (8192, 2048, 72), (3712, 4096, 1024)),
]
OTHERS = [(7, 64, 40), (300, 1024, 256), (2304, 2048, 97)]
# In fp8 widths are multiples of 16. The last but one: two steps, the second one incomplete.
FP8_TILED = [
    *((2304, 2048, 512), (4224, 1024, 1024), (2192, 2064, 528), (9008, 272, 32)),
    *((3712, 1024, 144), (8192, 3072, 256)),
]
FP8_OTHERS = [(5, 48, 64), (300, 1024, 256), (2199, 2048, 512)]
FP8_SOME = pytest.mark.parametrize(("rows", "k", "n"), [FP8_TILED[2], FP8_OTHERS[1]])
Operands = tuple[Any, Any, Any, Tensor | None]


def inputs(rows: int, k: int, n: int, kind: torch.dtype, activation: str = "relu") -> Operands:
    """x, weight, dy, and the slope, whose derivation does not matter here; None for relu"""
    torch.manual_seed(rows + k + n)
    x, dy = torch.randn(rows, k, device="cuda"), torch.randn(rows, n, device="cuda")
    weight, dtype = torch.randn(n, k, device="cuda") * n**-0.5, BF16 if kind == E4M3 else kind
    slope = None if activation == "relu" else store_slope(torch.rand_like(x) * 1.2 - 0.1, dtype)
    x = x.relu_() if slope is None else x
    if kind != E4M3:
        return x.to(kind), weight.to(kind), dy.to(kind), slope
    skip_without_fp8()
    return quantised(x, 2.0**-6), in_fp8(weight, n**-0.5), quantised(dy, 2.0**-6), slope


def formula(
    x: Tensor, weight: Tensor, dy: Tensor, slope: Tensor | None, p: float = P
) -> dict[str, Tensor]:
    """The result of torch in the dtype of x."""
    dx = dy @ weight
    dz = dx.masked_fill_(x <= 0, 0) if slope is None else dx * slope
    dz = dz / (1 - p)
    return {"dz": dz, "dweight": dy.t() @ x, "dbias": dz.sum(0)}


def in_dtype(dtype: torch.dtype, *operands: Tensor | None) -> dict[str, Tensor]:
    return formula(*(None if t is None else read_slope(t).to(dtype) for t in operands))


def bwd(
    operands: Operands, *gradients: Tensor | None, accumulate: bool = False,
    bias: Tensor | None = None, p: float = P, cast: Cast | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dz and transpose; in fp8 with a cast."""
    x, weight, dy, slope = operands
    if cast is None and isinstance(x, Quantised):
        cast = make_cast(device="cuda")
    poison_cache()
    return ops.activation_linear_bwd(
        dy, x, weight, slope, p, *gradients, accumulate=accumulate, bias=bias, cast=cast
    )


def run(*operands: Any) -> dict[str, Tensor]:
    x, weight = operands[:2]
    dweight, dbias = torch.full_like(weight, torch.nan), torch.full_like(x[0], torch.nan)
    dz, transpose = bwd(operands, dweight, dbias)
    assert transpose.numel() == 0
    return {"dz": dz, "dweight": dweight, "dbias": dbias}


def check(*operands: Tensor | None) -> None:
    plain, exact = (in_dtype(kind, *operands) for kind in (operands[0].dtype, torch.float64))
    for name, ours in run(*operands).items():
        assert_as_good_as(ours, plain[name], exact[name], name)


def nans(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def check_fp8(operands: Operands, p: float, grad_dtype: torch.dtype) -> None:
    """x may have any numbers, zeros and NaN."""
    x, weight, dy, slope = operands
    x = with_nan(x, 1, 3)
    slopes = read_slope(slope) if slope is not None else (numbers(x).nan_to_num(1.0) > 0)
    a, b = numbers(dy), numbers(weight)
    dz = a @ b
    # Hopper adds up to 128 terms with fewer bits than float32; without tiles, results are rounded
    # to bfloat16 between.
    error = (a.abs() @ b.abs()) * OF_FP8_SUM + dz.abs() * 2.0**-8
    dz, error = dz * slopes.double() / (1 - p), error * slopes.double().abs() / (1 - p)
    dweight, dbias = nans(*b.shape, dtype=grad_dtype), nans(b.shape[1])
    cast = make_cast(device="cuda")
    values, transpose = bwd((x, weight, dy, slope), dweight, dbias, p=p, cast=cast)
    assert_is_cast(values, transpose, cast, dz.cpu(), error.cpu())
    assert ((dbias - dz.sum(0)).abs() <= error.sum(0) + 1e-5 * dz.abs().sum(0)).all()
    expected = nans(*b.shape, dtype=grad_dtype)
    ops.linear_bwd(dy, x, weight, expected, None, None, False, False)
    assert torch.equal(bits(dweight), bits(expected))


def test_kernel_is_loaded():
    assert "activation_linear_bwd" in library.load().kernels


@ACTIVATIONS
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "k", "n"), TILED + OTHERS)
def test_errs_no_more_than_torch(rows, k, n, dtype, activation):
    check(*inputs(rows, k, n, dtype, activation))


@ACTIVATIONS
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(("rows", "k", "n"), FP8_TILED + FP8_OTHERS)
def test_fp8_is_the_cast_of_the_exact_numbers(rows, k, n, p, activation):
    check_fp8(inputs(rows, k, n, E4M3, activation), p, F32 if p else BF16)


@ACTIVATIONS
@pytest.mark.parametrize(("rows", "k", "n"), [TILED[0], OTHERS[0]])
def test_float32(rows, k, n, activation):
    operands = inputs(rows, k, n, torch.float32, activation)
    exact = in_dtype(torch.float64, *operands)
    for name, ours in run(*operands).items():
        torch.testing.assert_close(ours.double(), exact[name], rtol=1e-5, atol=1e-3)


@ACTIVATIONS
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "k", "n"), [TILED[2], OTHERS[1]])
def test_gradients_are_added(rows, k, n, dtype, activation):
    operands = inputs(rows, k, n, dtype, activation)
    old = torch.randn_like(operands[1]), torch.randn_like(operands[0][0])
    new = [t.clone() for t in old]
    bwd(operands, *new, accumulate=True)
    plain, exact = (in_dtype(kind, *operands) for kind in (operands[0].dtype, torch.float64))
    for name, before, after in zip(("dweight", "dbias"), old, new, strict=True):
        assert_as_good_as(after, before + plain[name], before.double() + exact[name], name)


@pytest.mark.parametrize("dtype", [F32, *HALVES])
@FP8_SOME
def test_gradients_in_fp8_have_any_float_type_and_are_added(rows, k, n, dtype):
    operands = inputs(rows, k, n, E4M3)
    dbias, dweight = nans(k), nans(n, k, dtype=BF16)
    bwd(operands, dweight, dbias)
    held, of_weight = torch.randn(k).to(dtype).cuda(), torch.randn(n, k).to(BF16).cuda()
    expected, alone = held.clone().add_(dbias), of_weight.clone()
    x, weight, dy, _ = operands
    ops.linear_bwd(dy, x, weight, alone, None, None, True, False)
    bwd(operands, of_weight, held, accumulate=True)
    assert torch.equal(held, expected) and torch.equal(of_weight, alone)


@ACTIVATIONS
@pytest.mark.parametrize(
    ("rows", "k", "n", "kind"),
    [(*TILED[1], BF16), *((*size, E4M3) for size in FP8_TILED + FP8_OTHERS)],
)
def test_same_bits_with_and_without_gradients_of_parameters(rows, k, n, kind, activation):
    operands, results = inputs(rows, k, n, kind, activation), []
    for _ in range(2):
        gradients = nans(n, k, dtype=BF16), nans(k, dtype=BF16)
        results.append([bits(t) for t in (*bwd(operands, *gradients), *gradients)])
    assert all(map(torch.equal, *results))
    assert all(map(torch.equal, map(bits, bwd(operands, None, None)), results[0]))


@ACTIVATIONS
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "k", "n"), [TILED[0], TILED[2]])
def test_rows_of_a_wider_matrix(rows, k, n, dtype, activation):
    x, weight, dy, slope = inputs(rows, k, n, dtype, activation)
    has_bytes = slope is not None and slope.dtype == torch.uint8  # then it is contiguous
    wide = slope if slope is None or has_bytes else widened(slope, 256)
    expected = run(x, weight, dy, slope)["dz"]
    assert torch.equal(run(x, weight, widened(dy, 256), wide)["dz"], expected)


@FP8_SOME
def test_rows_of_wider_matrices_in_fp8(rows, k, n):
    operands = inputs(rows, k, n, E4M3)
    expected, ours = nans(n, k), nans(n, k)
    dz = bwd(operands, expected, None)
    wide = (*(widened(t, 32) for t in operands[:3]), None)
    assert all(map(torch.equal, map(bits, bwd(wide, ours, None)), map(bits, dz)))
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_slope_that_is_not_aligned_is_refused(dtype):
    """Where a second kernel reads it."""
    rows, k, n = OTHERS[0]
    x, weight, dy, slope = inputs(rows, k, n, dtype, "gelu")
    room = torch.zeros(slope.numel() + 1, dtype=slope.dtype, device="cuda")
    with pytest.raises(RuntimeError, match="activation_linear_bwd: slope must be"):
        bwd((x, weight, dy, room[1:].view(rows, k)), None, None)


@pytest.mark.parametrize(("rows", "k", "n"), [TILED[0], OTHERS[1]])
def test_nan_stays(rows, k, n):
    x, weight, dy, _ = inputs(rows, k, n, torch.bfloat16)
    dy[rows // 2, 3] = torch.nan
    x[5, 9] = torch.nan
    results = run(x, weight, dy, None)
    positive = x[rows // 2] > 0
    assert torch.equal(results["dz"][rows // 2].isnan(), positive)
    assert torch.equal(results["dbias"].isnan(), positive)
    assert results["dz"].isnan().sum() == positive.sum()
    torch.testing.assert_close(results["dz"][5, 9], (dy[5] @ weight / (1 - P))[9])


@ACTIVATIONS
@pytest.mark.parametrize(("rows", "k", "n"), [FP8_TILED[0], FP8_OTHERS[1]])
def test_nan_stays_in_fp8(rows, k, n, activation):
    x, weight, dy, slope = inputs(rows, k, n, E4M3, activation)
    dbias = nans(k)
    dz, transpose = bwd((x, weight, with_nan(dy, rows // 2, 3), slope), None, dbias)
    found = dz.float().isnan()
    expected = numbers(x)[rows // 2] > 0 if slope is None else torch.ones(k, device="cuda") > 0
    assert torch.equal(found[rows // 2], expected) and found.sum() == expected.sum()
    assert torch.equal(transpose.float()[:, :rows].isnan(), found.t())
    assert torch.equal(dbias.isnan(), expected)


@pytest.mark.parametrize(("rows", "k", "n"), [TILED[0], OTHERS[1]])
def test_nan_of_a_slope_stays(rows, k, n):
    x, weight, dy, slope = inputs(rows, k, n, torch.float16, "gelu")
    slope[5, 9] = torch.nan
    results = run(x, weight, dy, slope)
    assert torch.equal(results["dz"].isnan(), slope.isnan())
    assert results["dbias"].isnan().nonzero().tolist() == [[9]]


@ACTIVATIONS
def test_in_a_graph(activation):
    """After another kernel, whose results it must wait for, and before a kernel that reads its
    own."""
    x, weight, dy, slope = inputs(*TILED[1], BF16, activation)
    expected = run(x, weight, dy, slope)["dz"].float().sum(0)
    given, dbias = dy.clone(), torch.empty_like(x[0])
    bwd((x, weight, given, slope), None, dbias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moved = given.clone()
        total = bwd((x, weight, moved, slope), None, dbias)[0].float().sum(0)
    for factor in (1.0, 0.0, -2.0):
        given.copy_(dy * factor)
        graph.replay()
        torch.testing.assert_close(total, expected * factor, rtol=0, atol=0)


@ACTIVATIONS
def test_replayed_graph_in_fp8_draws_anew(activation):
    """Both products next to an activation, each after a kernel whose results it reads."""
    _, weight, dy, _ = inputs(*FP8_TILED[0], E4M3)
    first, k, rng = weight.t(), FP8_TILED[0][1], make_rng(micro_batch=0, device="cuda")
    bias, cast, dbias = torch.randn(k).to(BF16).cuda(), make_cast(device="cuda"), nans(k)

    def forward_and_backward() -> list[Tensor]:
        dropout = ops.Dropout(0.5, rng, 2)
        *y, slope = ops.linear_activation_fwd(dy, first, bias, activation, dropout, True, cast)
        operands = Quantised(*y, cast.scale), weight, dy, None if activation == "relu" else slope
        dz = bwd(operands, None, dbias, p=0.5, cast=cast)
        return [t.view(torch.uint8) for t in (*y, *dz)] + [dbias.clone()]

    assert_replays_draw_anew(forward_and_backward, rng)


def test_deferred_column_sums_are_the_same():
    operands, k = inputs(*FP8_TILED[2], E4M3), FP8_TILED[2][1]
    flat, expected = nans(k), nans(k)
    bwd(operands, None, expected)
    ops.defer_column_sums(flat)
    bwd(operands, None, flat)
    ops.flush_column_sums(flat, True)
    assert torch.equal(flat, expected)


def test_no_rows_in_fp8():
    dweight, dbias = nans(64, 48), nans(48)
    dz, transpose = bwd(inputs(0, 48, 64, E4M3), dweight, dbias)
    assert dz.shape == (0, 48) and transpose.shape == (48, 0)
    assert dweight.eq(0).all() and dbias.eq(0).all()


@pytest.mark.parametrize("kind", [BF16, E4M3])
def test_opcheck(kind):
    x, weight, dy, slope = inputs(9, 64, 48, kind, "gelu")
    cast = [make_cast(device="cuda")] if kind == E4M3 else []
    given = slope, P, torch.ones(48, 64).to(BF16).cuda(), torch.ones(64).to(BF16).cuda()
    check_op("activation_linear_bwd", *map(parts, (dy, x, weight)), *given, True, None, *cast)


def test_refusals_in_fp8():
    with pytest.raises(RuntimeError, match="activation_linear_bwd: dbias must be contiguous"):
        bwd(inputs(4, 48, 64, E4M3), None, torch.empty(96, device="cuda")[::2])


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(("rows", "k", "n"), [TILED[0], OTHERS[0]])
def test_a_nan_in_the_bias_shows_in_its_gradient(rows, k, n, dtype):
    operands = inputs(rows, k, n, dtype)
    bias, dbias = torch.zeros_like(operands[0][0]), torch.empty_like(operands[0][0])
    bias[3] = torch.nan
    dz, _ = bwd(operands, None, dbias, bias=bias)
    assert not dz.isnan().any()
    assert torch.equal(dbias.isnan(), bias.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("rows", [4, 40, 300])
@pytest.mark.parametrize("where", ["x", "weight", "bias"])
@ACTIVATIONS
def test_a_nan_reaches_a_gradient(activation, where, rows, dtype):
    """Whatever the GEMM's ReLU made of it in the forward pass."""
    from lightseq_fairseq.layers import EncoderLayer
    from lightseq_fairseq.memory.packing import Segments

    torch.manual_seed(1)
    layer = EncoderLayer(64, 128, 4, activation=activation, normalize_before=True)
    layer.to("cuda", dtype)
    with torch.no_grad():
        if where != "x":
            getattr(layer.fc1, where).view(-1)[5] = torch.nan
    x = torch.randn(rows, 64, device="cuda", dtype=dtype)
    if where == "x":
        x[0, 0] = torch.nan
    x.requires_grad_()
    segments = Segments.from_lengths(torch.tensor([rows], device="cuda"))
    y = layer(x, segments, torch.tensor([1, 0], device="cuda"))
    y.float().sum().backward()
    norms = [p.grad.float().norm() for p in layer.parameters() if p.grad is not None]
    assert y.isnan().any() or torch.stack([*norms, x.grad.float().norm()]).isnan().any()
