"""Products of E4M3 operands on a GPU, compared with float64 products of the same numbers."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.ops_testing import check_op, poison_cache, skip_without_fp8
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.base import library

pytestmark = pytest.mark.gpu

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
# Hopper's tensor cores keep 13 bits behind the leading bit of the largest term while they add up
# to 128 products; later sums are in float32. Relative to the sum of absolute values, the largest
# errors of these products lie between 2^-12 and 2^-11; torch._scaled_mm makes the same ones.
OF_SUM = 2.0**-11
# Tokens: 64 and 4096 are searched, the others are not; inputs and outputs.
SIZES = [
    (1, 64, 32), (7, 16, 16), (64, 256, 1024), (199, 1040, 272), (777, 1024, 3072),
    (4096, 1024, 1024), (4096, 4096, 1024),
]  # fmt: skip


@pytest.fixture(autouse=True)
def with_fp8() -> None:
    skip_without_fp8()


class Operand:
    """A matrix in E4M3, and the numbers that it stands for."""

    def __init__(self, x: Tensor, scale: float) -> None:
        self.scale = torch.tensor(scale).cuda()
        scalars = self.scale, torch.tensor(0.0).cuda(), torch.tensor(0).cuda()
        self.values, self.transpose = ops.fp8_quantise(x, *scalars)
        self.numbers = self.values.double() * scale


class Case:
    def __init__(self, tokens: int, inputs: int, outputs: int) -> None:
        torch.manual_seed(tokens + inputs + outputs)

        def operand(rows: int, columns: int, size: float) -> Operand:
            scale = 2.0 ** math.ceil(math.log2(size / 64))
            return Operand(size * torch.randn(rows, columns, device="cuda"), scale)

        self.x, self.dy = operand(tokens, inputs, 1.0), operand(tokens, outputs, 1e-4)
        self.weight = operand(outputs, inputs, inputs**-0.5)
        self.bias = torch.randn(outputs, device="cuda").to(BF16)

    def fwd(self, with_bias: bool = True) -> Tensor:
        poison_cache()
        x, weight = self.x, self.weight
        bias = self.bias if with_bias else None
        return ops.fp8_linear_fwd(x.values, x.scale, weight.values, weight.scale, bias)

    def bwd(
        self, dweight: Tensor | None = None, onto: Tensor | None = None, accumulate: bool = False,
        need_dx: bool = True,
    ) -> Tensor:  # fmt: skip
        poison_cache()
        return ops.fp8_linear_bwd(
            *(self.dy.values, self.dy.transpose, self.dy.scale, self.x.transpose, self.x.scale),
            *(self.weight.transpose, self.weight.scale, dweight, onto, accumulate, need_dx),
        )

    def formula(self, name: str, function=lambda x: x) -> Tensor:
        """In float64, of function(numbers)."""
        x, weight, dy = (function(t.numbers) for t in (self.x, self.weight, self.dy))
        if name == "y":
            return x @ weight.t() + function(self.bias.double())
        return dy @ weight if name == "dx" else dy.t() @ x

    def assert_near(self, name: str, ours: Tensor, added: Tensor | None = None) -> None:
        """Equal to float64 but for rounding, also of a product before it is ``added`` to another
        gradient, and the error of the sum."""
        exact, sizes = self.formula(name), self.formula(name, torch.abs)
        rounded = exact.abs()
        if added is not None:
            exact = exact + added.double()
            rounded = rounded + exact.abs()
        rounding = torch.finfo(ours.dtype).eps / 2 * rounded
        error = (ours.double() - exact).abs()
        assert (error <= 1.01 * (rounding + OF_SUM * sizes)).all(), f"{name}: {error.max():.3e}"
        # Most errors are far smaller.
        mean = error.mean() / exact.abs().mean()
        assert mean < torch.finfo(ours.dtype).eps / 4 + 2.0**-8, f"{name}: mean {mean:.3e}"


def poisoned(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def test_kernels_are_loaded():
    assert {"fp8_linear_fwd", "fp8_linear_bwd"} <= set(library.load().kernels)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), SIZES)
def test_equals_float64(tokens, inputs, outputs, dtype):
    case, dweight = Case(tokens, inputs, outputs), poisoned(outputs, inputs, dtype=dtype)
    y, dx = case.fwd(), case.bwd(dweight)
    assert y.dtype == dx.dtype == BF16 and y.is_contiguous() and dx.is_contiguous()
    for name, ours in {"y": y, "dx": dx, "dweight": dweight}.items():
        case.assert_near(name, ours)


@pytest.mark.parametrize("size", [(4096, 1024, 1024), (4096, 4096, 1024)])
def test_errs_no_more_than_torch(size):
    case = Case(*size)
    x, weight = case.x, case.weight
    theirs = torch._scaled_mm(
        x.values, weight.values.t(), x.scale, weight.scale, bias=case.bias, out_dtype=BF16,
        use_fast_accum=False,
    )  # fmt: skip
    exact = case.formula("y")
    errors = [(y.double() - exact).square().mean().sqrt() for y in (case.fwd(), theirs)]
    assert errors[0] <= 1.1 * errors[1], errors


@pytest.mark.parametrize("tokens", [7, 21, 64])
def test_small_integers_are_rounded_once_to_nearest_even(tokens):
    """Their sums need so few bits that they are exact."""
    torch.manual_seed(0)
    x = Operand(torch.randint(-7, 8, (tokens, 48)).float().cuda(), 1.0)
    weight = Operand(torch.randint(-7, 8, (32, 48)).float().cuda() * 2.0**-10, 2.0**-10)
    exact = x.numbers @ weight.numbers.t()
    y = ops.fp8_linear_fwd(x.values, x.scale, weight.values, weight.scale, None)
    assert torch.equal(y, exact.float().to(BF16))
    assert not torch.equal(y.double(), exact)  # some are rounded


@pytest.mark.parametrize("tokens", [199, 208, 256])  # 256 is searched
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_accumulate_adds(tokens, dtype):
    """Also in the first call, which searches the algorithm."""
    case = Case(tokens, 272, 528)
    before = torch.randn(528, 272, device="cuda").mul_(1e-3).to(dtype)
    after = before.clone()
    case.bwd(after, accumulate=True, need_dx=False)
    case.assert_near("dweight", after, added=before)


def test_dx_is_added_to_another_gradient():
    case = Case(320, 272, 528)
    other = torch.randn(320, 272, device="cuda").mul_(1e-3).to(BF16)
    onto = other.clone()
    assert case.bwd(onto=onto, need_dx=False).numel() == 0
    case.assert_near("dx", onto, added=other)


def test_only_what_is_asked_for():
    case, dweight = Case(80, 64, 32), poisoned(32, 64)
    dx = case.bwd(dweight)
    assert torch.equal(case.bwd(), dx) and case.bwd(need_dx=False).numel() == 0
    alone = poisoned(32, 64)
    case.bwd(alone, need_dx=False)
    assert torch.equal(alone, dweight)
    y = case.fwd(with_bias=False)
    case.bias.zero_()
    case.assert_near("y", y)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_gradient_in_a_wider_matrix(dtype):
    """As for the keys and values of all decoder layers, whose weights are adjacent."""
    case, wide = Case(100, 64, 32), poisoned(32, 192, dtype=dtype)
    case.bwd(wide[:, 64:128])
    case.assert_near("dweight", wide[:, 64:128])
    assert wide[:, :64].isnan().all() and wide[:, 128:].isnan().all()


def test_views_of_wider_operands():
    case, dweight = Case(100, 64, 48), poisoned(48, 64)
    for operand in (case.x, case.weight, case.dy):
        for name in ("values", "transpose"):
            matrix = getattr(operand, name)
            wide = torch.full(
                (len(matrix), matrix.shape[1] + 32), 0x7F, dtype=torch.uint8, device="cuda"
            )
            wide[:, 16:-16] = matrix.view(torch.uint8)
            setattr(operand, name, wide.view(E4M3)[:, 16:-16])
    for name, ours in {"y": case.fwd(), "dx": case.bwd(dweight), "dweight": dweight}.items():
        case.assert_near(name, ours)


def test_not_a_number_stays_visible():
    case, dweight = Case(40, 64, 32), poisoned(32, 64)
    for operand in (case.x, case.dy):
        operand.values.view(torch.uint8)[3, 5] = 0x7F
        operand.transpose.view(torch.uint8)[5, 3] = 0x7F
    y, dx = case.fwd(), case.bwd(dweight)
    for rows in (y, dx):
        assert rows.isnan().all(1).nonzero()[:, 0].tolist() == [3]
        assert int(rows.isnan().sum()) == rows.shape[1]
    assert dweight[5].isnan().all() and dweight[:, 5].isnan().all()
    assert int(dweight.isnan().sum()) == 64 + 32 - 1


def test_no_tokens():
    case, dweight = Case(0, 64, 32), poisoned(32, 64)
    assert case.fwd().shape == (0, 32) and case.bwd(dweight).shape == (0, 64)
    assert dweight.eq(0).all()
    case.bwd(dweight.fill_(2), accumulate=True)
    assert dweight.eq(2).all()


@pytest.mark.parametrize(
    "size",
    [(500, 272, 144), pytest.param((15_232, 1024, 4096), marks=pytest.mark.large)],
)
def test_same_input_same_bits(size):
    case, results = Case(*size), []
    for _ in range(3):
        dweight = poisoned(size[2], size[1])
        results.append((case.fwd(), case.bwd(dweight), dweight))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.large
def test_more_elements_than_32_bits_count():
    tokens, outputs = 65_536, 43_008
    case = Case(16, 64, outputs)
    x = Operand(torch.randn(tokens, 64, device="cuda"), 2.0**-6)
    y = ops.fp8_linear_fwd(x.values, x.scale, case.weight.values, case.weight.scale, case.bias)
    assert y.numel() > 2**31
    rows = torch.tensor([0, tokens // 2, tokens - 1], device="cuda")
    x.numbers = x.numbers[rows]
    case.x = x
    case.assert_near("y", y[rows])


@pytest.mark.parametrize("tokens", [336, 576])  # 576 would be searched, if not captured
@pytest.mark.parametrize("seen", [True, False])
def test_captured_graph(tokens, seen):
    """The graph reads operands and scales anew."""
    case, dweight = Case(tokens + 64 * seen, 272, 144), poisoned(144, 272)
    if seen:
        case.bwd(dweight)
        case.fwd()
    operands = case.x, case.dy, case.weight
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.fp8_linear_fwd(
            case.x.values, case.x.scale, case.weight.values, case.weight.scale, case.bias
        )
        dx = ops.fp8_linear_bwd(
            *(case.dy.values, case.dy.transpose, case.dy.scale),
            *(case.x.transpose, case.x.scale, case.weight.transpose, case.weight.scale),
            *(dweight, None, False, True),
        )
    for power in (0, 3):
        for operand in operands:
            operand.scale.mul_(2.0**power)
            operand.numbers = operand.values.double() * operand.scale
        graph.replay()
        for name, ours in {"y": y, "dx": dx, "dweight": dweight}.items():
            case.assert_near(name, ours)


def test_opcheck():
    case = Case(21, 48, 32)
    x, weight, dy = case.x, case.weight, case.dy
    check_op("fp8_linear_fwd", x.values, x.scale, weight.values, weight.scale, case.bias)
    given = (dy.values, dy.transpose, dy.scale, x.transpose, x.scale)
    given += (weight.transpose, weight.scale)
    dweight = torch.ones(32, 48, dtype=BF16, device="cuda")
    check_op("fp8_linear_bwd", *given, dweight, None, True, True)


def test_refusals():
    case = Case(16, 64, 32)
    case.bias = torch.zeros(64, dtype=BF16, device="cuda")[::2]
    with pytest.raises(RuntimeError, match="fp8_linear_fwd: bias must be contiguous in its last"):
        case.fwd()
    case.bias, scale = None, case.x.scale
    case.x.scale = torch.ones(4, device="cuda")[1]
    with pytest.raises(RuntimeError, match="fp8_linear_fwd: x_scale must be aligned to 16 bytes"):
        case.fwd()
    case.x.scale = scale
    with pytest.raises(RuntimeError, match="fp8_linear_bwd: dweight must be contiguous in its"):
        case.bwd(torch.zeros(32, 72, device="cuda")[:, 3:67])
    with pytest.raises(RuntimeError, match="fp8_linear_bwd: rows of dweight must not overlap"):
        case.bwd(torch.zeros(1, 64, device="cuda").expand(32, -1))
