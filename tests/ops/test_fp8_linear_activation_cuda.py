"""The kernels of fp8 products with activation and dropout, compared with float64: by tiles, and
without them."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from helpers.fp8_operands import OfCast, Operand, assert_is_cast, bits
from helpers.ops_testing import assert_replays_draw_anew, check_op, poison_cache, skip_without_fp8
from helpers.ops_testing import make_rng as rng_on
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.base import library
from lightseq_fairseq.ops.linear_activation import read_slope, store_slope

make_rng = functools.partial(rng_on, device="cuda")

pytestmark = pytest.mark.gpu

SITE, SCALE = 2, 2.0**-6
gelu = torch.nn.functional.gelu
ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": gelu,
    "gelu_accurate": functools.partial(gelu, approximate="tanh"),
}
# Rows, inputs and results. Tiles of 128 x 256 for most SMs of an H200: complete tiles; an odd
# number of row tiles; incomplete tiles on all sides; a single step; two steps, the second one
# incomplete; several tiles per block.
TILED = [
    *((2304, 512, 2048), (4224, 1024, 1024), (2192, 528, 2064), (9008, 32, 272)),
    *((3712, 144, 1024), (8192, 256, 3072)),
]
OTHERS = [(5, 64, 48), (300, 256, 1024), (2199, 512, 2048)]


@pytest.fixture(autouse=True)
def with_fp8() -> None:
    skip_without_fp8()


class Case:
    """A product on the GPU, [rows, c] times [c, f], its operands and its sums in float64."""

    def __init__(self, rows: int, c: int, f: int) -> None:
        torch.manual_seed(rows + c + f)
        a = Operand(torch.randn(rows, c), 2.0**-6)
        b = Operand(1.5 * torch.randn(f, c) * c**-0.5, 2.0**-5 * 2.0 ** round(-math.log2(c) / 2))
        self.a, self.b = a.to("cuda"), b.to("cuda")
        left, right = a.numbers.cuda(), b.numbers.cuda()
        self.exact = left @ right.t()
        # Hopper adds up to 128 terms with fewer bits than float32; without tiles, results are
        # rounded to bfloat16 between.
        self.error = (left.abs() @ right.abs().t()) * 2.0**-11 + self.exact.abs() * 2.0**-8
        self.bias = torch.randn(f).bfloat16().cuda()
        self.rows, self.f = rows, f

    def forward(self, activation="relu", p=0.0, need_slope=True, rng=None, of_cast=None):
        """values, transpose, slope and the cast's scalars."""
        rng, of_cast = make_rng() if rng is None else rng, of_cast or OfCast(SCALE, "cuda")
        poison_cache()
        results = ops.fp8_linear_activation_fwd(
            *(self.a.values, self.a.scale, self.b.values, self.b.scale, self.bias),
            *(activation, p, rng, SITE, need_slope, *of_cast),
        )
        return *results, of_cast

    def backward(self, y_transpose, slope=None, p=0.0, dbias=None, accumulate=False, of_cast=None):
        """values, transpose and the cast's scalars."""
        of_cast = of_cast or OfCast(SCALE, "cuda")
        poison_cache()
        results = ops.fp8_activation_linear_bwd(
            *(self.a.values, self.a.scale, self.b.values, self.b.scale, y_transpose, slope, p),
            *(dbias, accumulate, *of_cast),
        )
        return *results, of_cast

    def y(self) -> Operand:
        """Any results of ReLU: numbers, zeros and NaN."""
        y = torch.randn(self.rows, self.f).relu_()
        y[:, 3] = torch.nan
        return Operand(y, SCALE).to("cuda")

    def slope(self) -> Tensor:
        return store_slope(torch.rand(self.rows, self.f) * 1.2 - 0.1, torch.bfloat16).cuda()


def dropout_factors(case: Case, p: float) -> Tensor | float:
    if p == 0:
        return 1.0
    return ops.dropout_mask(rng_on(), SITE, case.rows, case.f, p).cuda() / (1 - p)


def check_forward(case: Case, activation: str, p: float) -> None:
    z, error = (case.exact + case.bias).requires_grad_(), case.error + case.bias.abs() * 2.0**-8
    y = ACTIVATIONS[activation](z.detach())
    factors = dropout_factors(case, p)
    values, transpose, slope, of_cast = case.forward(activation, p)
    # gelu's formula has an error of 2.5e-4; its derivative is at most 1.13.
    bound = (1.13 * error + 1e-3 * (activation != "relu") * (1 + y.abs())) * factors
    assert_is_cast(values, transpose, of_cast, (y * factors).cpu(), bound.cpu())
    if activation == "relu":
        assert slope.numel() == 0
        return
    ACTIVATIONS[activation](z).sum().backward()
    true = z.grad * (factors != 0 if p else 1)
    assert slope.dtype == torch.uint8
    assert ((read_slope(slope) - true).abs() <= 1 / 399 + error + 1e-3).all()
    assert not (read_slope(slope) * (true == 0)).any() or p == 0


def check_backward(case: Case, p: float, activation: str = "relu") -> None:
    y, dbias = case.y(), torch.full((case.f,), torch.nan, device="cuda")
    if activation == "relu":
        slope, numbers = None, (y.values.float().nan_to_num(1.0) > 0).double()
    else:
        slope = case.slope()
        numbers = read_slope(slope).double()
    dz, error = case.exact * numbers / (1 - p), case.error * numbers.abs() / (1 - p)
    results = case.backward(y.transpose, slope, p, dbias)
    assert_is_cast(*results, dz.cpu(), error.cpu())
    assert ((dbias - dz.sum(0)).abs() <= error.sum(0) + 1e-5 * dz.abs().sum(0)).all()


def test_kernels_are_loaded():
    names = {"fp8_linear_activation_fwd", "fp8_activation_linear_bwd"}
    assert names <= set(library.load().kernels)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(("rows", "c", "f"), TILED + OTHERS)
def test_is_the_cast_of_the_exact_numbers(rows, c, f, p, activation):
    case = Case(rows, c, f)
    check_forward(case, activation, p)
    check_backward(case, p, activation)


@pytest.mark.parametrize(("rows", "c", "f"), [TILED[2], OTHERS[1]])
def test_saturated_numbers_are_counted(rows, c, f):
    case = Case(rows, c, f)
    values, _, _, of_cast = case.forward(of_cast=OfCast(2.0**-8, "cuda"))
    assert of_cast.saturated > 100
    assert (values.float() == 448).sum() >= of_cast.saturated - 3
    z = (case.exact + case.bias).relu()
    torch.testing.assert_close(of_cast.amax.double(), z.max(), rtol=1e-2, atol=0)


@pytest.mark.parametrize(("rows", "c", "f"), [TILED[0], TILED[2], OTHERS[1]])
def test_drops_what_the_reference_drops(rows, c, f):
    case = Case(rows, c, f)
    case.bias.fill_(9.0)  # results are not 0, the slope about 1
    keep = ops.dropout_mask(rng_on(), SITE, rows, f, 0.5).cuda()
    values, _, slope, _ = case.forward("gelu", 0.5)
    assert torch.equal(values.float() != 0, keep) and torch.equal(read_slope(slope) != 0, keep)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "c", "f"), TILED + OTHERS)
def test_same_bits_again_and_without_slope(rows, c, f, activation):
    case = Case(rows, c, f)
    first, second = (case.forward(activation, 0.1) for _ in range(2))
    assert all(map(torch.equal, map(bits, first[:3]), map(bits, second[:3])))
    *without, slope, _ = case.forward(activation, 0.1, need_slope=False)
    assert slope.numel() == 0 and all(map(torch.equal, map(bits, without), map(bits, first[:2])))
    results = []
    for _ in range(2):
        dbias = torch.full((f,), torch.nan, device="cuda")
        given = None if activation == "relu" else first[2]
        results.append((*map(bits, case.backward(first[1], given, 0.1, dbias)[:2]), dbias))
    assert all(map(torch.equal, *results))
    without = case.backward(first[1], given, 0.1)[:2]
    assert all(map(torch.equal, map(bits, without), results[0]))


@pytest.mark.parametrize(("rows", "c", "f"), [TILED[0], OTHERS[1]])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_not_a_number_stays_visible(activation, rows, c, f):
    case = Case(rows, c, f)
    case.bias[1] = torch.nan
    case.a.values.view(torch.uint8)[rows // 2, 5] = 0x7F
    values, transpose, slope, _ = case.forward(activation, 0.3)
    found = values.float().isnan()
    assert found[:, 1].all() and found[rows // 2].all() and found.sum() == rows + f - 1
    dbias = torch.empty(f, device="cuda")
    given = None if activation == "relu" else slope
    found = case.backward(transpose, given, 0.3, dbias)[0].float().isnan()
    assert found[rows // 2].all() and dbias.isnan().all() and found.sum() == f


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "c", "f"), [TILED[2], OTHERS[1]])
def test_dbias_has_any_float_type_and_accumulates(rows, c, f, grad_dtype):
    case = Case(rows, c, f)
    y, fresh = case.y().transpose, torch.full((f,), torch.nan, device="cuda")
    case.backward(y, dbias=fresh)
    held = torch.randn(f, device="cuda").to(grad_dtype)
    expected = held.clone().add_(fresh)
    case.backward(y, dbias=held, accumulate=True)
    assert torch.equal(held, expected)


@pytest.mark.parametrize(("rows", "c", "f"), [TILED[2], OTHERS[1]])
def test_rows_may_be_strided(rows, c, f):
    case = Case(rows, c, f)
    y = case.y().transpose
    expected = [case.forward("gelu"), case.backward(y)]

    def widened(t: Tensor) -> Tensor:
        wide = torch.full((len(t), t.shape[1] + 64), 0x7F, dtype=torch.uint8, device="cuda")
        wide[:, 32:-32] = t.view(torch.uint8)
        return wide.view(t.dtype)[:, 32:-32]

    case.a.values, case.b.values = widened(case.a.values), widened(case.b.values)
    found = [case.forward("gelu"), case.backward(widened(y))]
    for ours, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, map(bits, ours[:2]), map(bits, other[:2])))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_replayed_graph_draws_anew(activation):
    case, rng = Case(*TILED[0]), make_rng(micro_batch=0)
    dbias, of_cast = torch.empty(case.f, device="cuda"), OfCast(SCALE, "cuda")

    def run() -> list[Tensor]:
        *y, slope, _ = case.forward(activation, 0.5, rng=rng, of_cast=of_cast)
        given = None if activation == "relu" else slope
        dz = case.backward(y[1], given, 0.5, dbias, of_cast=of_cast)[:2]
        return [t.view(torch.uint8) for t in (*y, *dz)] + [dbias.clone()]

    assert_replays_draw_anew(run, rng)


def test_deferred_column_sums_are_the_same():
    case = Case(*TILED[2])
    flat, expected = torch.full((case.f,), torch.nan, device="cuda"), torch.empty(case.f).cuda()
    y = case.y().transpose
    case.backward(y, dbias=expected)
    ops.defer_column_sums(flat)
    case.backward(y, dbias=flat)
    ops.flush_column_sums(flat, True)
    assert torch.equal(flat, expected)


def test_no_rows():
    case = Case(0, 64, 48)
    values, transpose, slope, _ = case.forward("gelu")
    assert values.shape == slope.shape == (0, 48) and transpose.shape == (48, 0)
    dbias = torch.full((48,), torch.nan, device="cuda")
    assert case.backward(transpose, dbias=dbias)[0].shape == (0, 48) and dbias.eq(0).all()


def test_opcheck():
    case, of_cast = Case(9, 48, 64), OfCast(SCALE, "cuda")
    given = case.a.values, case.a.scale, case.b.values, case.b.scale
    check_op(
        *("fp8_linear_activation_fwd", *given, case.bias, "gelu", 0.3, make_rng(), SITE, True),
        *of_cast,
    )
    y, dbias = case.y().transpose, case.bias.clone()
    check_op("fp8_activation_linear_bwd", *given, y, case.slope(), 0.3, dbias, True, *of_cast)


def test_refusals():
    case = Case(4, 64, 48)
    case.bias = torch.randn(96).bfloat16().cuda()[::2]
    with pytest.raises(RuntimeError, match="activation_fwd: bias must be contiguous in its last"):
        case.forward()
    with pytest.raises(RuntimeError, match="activation_linear_bwd: dbias must be contiguous"):
        case.backward(case.y().transpose, dbias=torch.empty(96, device="cuda")[::2])
