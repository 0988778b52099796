"""The backward pass of an activation and the GEMM after it, compared with float64: by tiles, and
without them."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import assert_as_good_as, poison_cache
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.base import library
from lightseq_fairseq.ops.linear_activation import read_slope, store_slope

pytestmark = pytest.mark.gpu

P = 0.2  # dropout rate
ACTIVATIONS = pytest.mark.parametrize("activation", ["relu", "gelu"])
HALVES = [torch.float16, torch.bfloat16]
# Rows, inputs, outputs. Tiles of 128 x 256 for most SMs of an H200: complete tiles; a last pair
# with one tile; incomplete tiles on all sides; a single step of the sum; four tiles per block.
TILED = [
    *((2304, 2048, 512), (4224, 1024, 1024), (2199, 2056, 520), (9001, 264, 40)),
    *((3712, 1024, 512), (8192, 2048, 72), (3712, 4096, 1024)),
]
OTHERS = [(7, 64, 40), (300, 1024, 256), (2304, 2048, 97)]


def inputs(
    rows: int, k: int, n: int, dtype: torch.dtype, activation: str = "relu"
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x, weight, dy, and the slope, whose derivation does not matter here; None for relu"""
    torch.manual_seed(rows + k + n)
    x = torch.randn(rows, k, device="cuda")
    slope = None if activation == "relu" else store_slope(torch.rand_like(x) * 1.2 - 0.1, dtype)
    weight = (torch.randn(n, k, device="cuda") * n**-0.5).to(dtype)
    dy = torch.randn(rows, n, device="cuda").to(dtype)
    return (x.relu_() if slope is None else x).to(dtype), weight, dy, slope


def formula(x: Tensor, weight: Tensor, dy: Tensor, slope: Tensor | None) -> dict[str, Tensor]:
    """The result of torch in the dtype of x."""
    dx = dy @ weight
    dz = dx.masked_fill_(x <= 0, 0) if slope is None else dx * slope
    dz = dz / (1 - P)
    return {"dz": dz, "dweight": dy.t() @ x, "dbias": dz.sum(0)}


def in_dtype(dtype: torch.dtype, *operands: Tensor | None) -> dict[str, Tensor]:
    return formula(*(None if t is None else read_slope(t).to(dtype) for t in operands))


def bwd(
    operands: tuple[Tensor, Tensor, Tensor, Tensor | None], *gradients: Tensor | None,
    accumulate: bool = False, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    x, weight, dy, slope = operands
    return ops.activation_linear_bwd(
        dy, x, weight, slope, P, *gradients, accumulate=accumulate, bias=bias
    )


def run(*operands: Tensor | None) -> dict[str, Tensor]:
    x, weight = operands[:2]
    poison_cache()
    dweight, dbias = torch.full_like(weight, torch.nan), torch.full_like(x[0], torch.nan)
    return {"dz": bwd(operands, dweight, dbias), "dweight": dweight, "dbias": dbias}


def check(*operands: Tensor | None) -> None:
    plain, exact = (in_dtype(kind, *operands) for kind in (operands[0].dtype, torch.float64))
    for name, ours in run(*operands).items():
        assert_as_good_as(ours, plain[name], exact[name], name)


def test_kernel_is_loaded():
    assert "activation_linear_bwd" in library.load().kernels


@ACTIVATIONS
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "k", "n"), TILED + OTHERS)
def test_errs_no_more_than_torch(rows, k, n, dtype, activation):
    check(*inputs(rows, k, n, dtype, activation))


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


@ACTIVATIONS
def test_same_bits_with_and_without_gradients_of_parameters(activation):
    operands = inputs(*TILED[1], torch.bfloat16, activation)
    first, second = run(*operands), run(*operands)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(bwd(operands, None, None), first["dz"])


@ACTIVATIONS
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "k", "n"), [TILED[0], TILED[2]])
def test_rows_of_a_wider_matrix(rows, k, n, dtype, activation):
    x, weight, dy, slope = inputs(rows, k, n, dtype, activation)

    def widened(t: Tensor) -> Tensor:
        wide = torch.full((rows, t.shape[1] + 512), torch.nan, dtype=t.dtype, device="cuda")
        return wide[:, 256:-256].copy_(t)

    has_bytes = slope is not None and slope.dtype == torch.uint8  # then it is contiguous
    wide = slope if slope is None or has_bytes else widened(slope)
    expected = run(x, weight, dy, slope)["dz"]
    assert torch.equal(run(x, weight, widened(dy), wide)["dz"], expected)


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
    x, weight, dy, slope = inputs(*TILED[1], torch.bfloat16, activation)
    expected = run(x, weight, dy, slope)["dz"].float().sum(0)
    given, dbias = dy.clone(), torch.empty_like(x[0])
    bwd((x, weight, given, slope), None, dbias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moved = given.clone()
        total = bwd((x, weight, moved, slope), None, dbias).float().sum(0)
    for factor in (1.0, 0.0, -2.0):
        given.copy_(dy * factor)
        graph.replay()
        torch.testing.assert_close(total, expected * factor, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(("rows", "k", "n"), [TILED[0], OTHERS[0]])
def test_a_nan_in_the_bias_shows_in_its_gradient(rows, k, n, dtype):
    operands = inputs(rows, k, n, dtype)
    bias, dbias = torch.zeros_like(operands[0][0]), torch.empty_like(operands[0][0])
    bias[3] = torch.nan
    dz = bwd(operands, None, dbias, bias=bias)
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
