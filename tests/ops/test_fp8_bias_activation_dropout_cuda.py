"""The kernels of bias, activation and dropout with fp8 results, compared with their references.

Identity and relu: bit for bit. gelu: its formula on a GPU has an error of 1e-5, and of 2.5e-4 for
bfloat16, so a number near the middle between two numbers of E4M3 may become the other one.
"""

from __future__ import annotations

import functools

import pytest
import torch
from helpers.ops_testing import (
    assert_replays_draw_anew,
    check_op,
    on_gpu,
    poison_cache,
    skip_without_fp8,
)
from helpers.ops_testing import make_rng as rng_on
from torch import Tensor

from lightseq_fairseq import library, ops
from lightseq_fairseq.ops.bias_activation_dropout import ACTIVATIONS

make_rng = functools.partial(rng_on, device="cuda")

pytestmark = pytest.mark.gpu

SITE, SCALE = 2, 2.0**-6
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Rows and columns of a block are 128, of a thread 8; rows are padded to multiples of 16.
SIZES = [
    (1, 16), (1, 1024), (5, 48), (16, 32), (37, 272), (127, 128), (129, 144), (700, 1040),
    (3712, 1024), (9, 65536),
]  # fmt: skip


@pytest.fixture(autouse=True)
def with_fp8() -> None:
    skip_without_fp8()


class Case:
    """Inputs on a CPU and on the GPU, and a call of each op."""

    def __init__(
        self, tokens: int, width: int, dtype: torch.dtype, activation: str = "relu", p: float = 0.1,
        with_bias: bool = True,
    ) -> None:  # fmt: skip
        torch.manual_seed(tokens + width)
        self.x, self.dy = (2 * torch.randn(tokens, width) for _ in range(2))
        self.x, self.dy = self.x.to(dtype), self.dy.to(dtype)
        self.bias = torch.randn(width).to(dtype) if with_bias else None
        self.activation, self.p = activation, p
        _, self.y_transpose = ops.fp8_bias_activation_dropout_fwd(
            self.x, self.bias, "relu", p, rng_on(), SITE, *self.of_cast("cpu")
        )

    def of_cast(self, device: str) -> list[Tensor]:
        """scale, amax and saturated."""
        return [t.to(device) for t in (torch.tensor(SCALE), torch.tensor(0.5), torch.tensor(3))]

    def run(self, op: str, device: str, dbias: Tensor | None = None, accumulate: bool = False):
        """values, transpose, amax and saturated."""
        dy, x, bias, y = self.dy, self.x, self.bias, self.y_transpose
        if device == "cuda":
            dy, x, bias = on_gpu(dy), on_gpu(x), None if bias is None else on_gpu(bias)
            y = on_gpu(bits(y)).view(y.dtype)
        of_cast, dropout = self.of_cast(device), (self.activation, self.p, rng_on(device=device))
        if device == "cuda":
            poison_cache()
        if op == "fwd":
            results = ops.fp8_bias_activation_dropout_fwd(x, bias, *dropout, SITE, *of_cast)
        elif op == "bwd":
            results = ops.fp8_bias_activation_dropout_bwd(
                dy, x, bias, *dropout, SITE, dbias, accumulate, *of_cast
            )
        else:
            results = ops.fp8_relu_dropout_bwd(dy, y, self.p, dbias, accumulate, *of_cast)
        return (*map(bits, results), *of_cast[1:])

    def check(self, op: str) -> None:
        width = self.x.shape[1]
        ours = torch.full((width,), torch.nan, device="cuda")
        exact = torch.full((width,), torch.nan)
        results, expected = self.run(op, "cuda", ours), self.run(op, "cpu", exact)
        is_exact = op == "relu_bwd" or not self.activation.startswith("gelu")
        (assert_equal if is_exact else assert_near)(results, expected, len(self.x))
        if op != "fwd":
            size = self.dy.float().abs().sum(0).max() + 1
            error = 3e-5 if not is_exact and self.x.dtype == torch.bfloat16 else 3e-6
            torch.testing.assert_close(ours.cpu(), exact, rtol=1e-4, atol=float(error * size))


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def assert_equal(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...], rows: int) -> None:
    names = ("values", "transpose", "amax", "saturated")
    for name, mine, other in zip(names, ours, expected, strict=True):
        assert torch.equal(mine.cpu(), other), f"{name}: {int((mine.cpu() != other).sum())} differ"


def assert_near(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...], rows: int) -> None:
    values, transpose, amax, saturated = (t.cpu() for t in ours)
    assert torch.equal(transpose[:, :rows], values.t()) and not transpose[:, rows:].any()
    numbers, others = (v.view(torch.float8_e4m3fn).float() for v in (values, expected[0]))
    # At most the next number of E4M3, and seldom.
    torch.testing.assert_close(numbers, others, rtol=0.126, atol=2.0**-9, equal_nan=True)
    assert (numbers != others).float().mean() < 6e-3 or (numbers != others).sum() <= 2
    torch.testing.assert_close(amax, expected[2], rtol=3e-4, atol=0)
    assert abs(int(saturated - expected[3])) <= 2 + 1e-4 * values.numel()


def test_kernels_are_loaded():
    names = {"fp8_bias_activation_dropout_fwd", "fp8_bias_activation_dropout_bwd"}
    assert {*names, "fp8_relu_dropout_bwd"} <= set(library.load().kernels)


@pytest.mark.parametrize("op", ["fwd", "bwd", "relu_bwd"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_equals_the_reference(tokens, width, dtype, op):
    Case(tokens, width, dtype).check(op)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation, p, with_bias, dtype):
    case = Case(300, 528, dtype, activation, p, with_bias)
    case.check("fwd")
    case.check("bwd")


def test_relu_of_every_number_of_e4m3():
    """Only positive numbers and NaN pass: neither zeros nor negative numbers."""
    case = Case(256, 256, torch.bfloat16, p=0.3)
    every = torch.arange(256).to(torch.uint8).expand(256, 256)
    case.y_transpose = every.contiguous().view(torch.float8_e4m3fn)
    case.check("relu_bwd")
    passed = case.run("relu_bwd", "cuda")[0].ne(0).any(1)
    assert passed.nonzero()[:, 0].tolist() == [*range(1, 128), 255]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_not_a_number_stays_visible(activation, p):
    case = Case(40, 256, torch.float16, activation, p)
    case.x[3], case.dy[3] = torch.nan, torch.nan
    dbias = torch.zeros(256, device="cuda")
    for op in ("fwd", "bwd"):
        values, transpose, *_ = case.run(op, "cuda", dbias)
        assert (values[3] == 0x7F).all() and (transpose[:, 3] == 0x7F).all()
        assert not transpose[:, 40:].any()
    assert dbias.isnan().all()


def test_infinity_becomes_not_a_number_and_is_not_counted():
    case = Case(40, 256, torch.float32, "identity", 0.0)
    case.x[3], case.dy[3] = torch.inf, -torch.inf
    case.x[4], case.dy[4] = 3e38, -3e38
    for op in ("fwd", "bwd"):
        results = case.run(op, "cuda")
        assert_equal(results, case.run(op, "cpu"), 40)
        assert (results[0][3] == 0x7F).all()


@pytest.mark.parametrize("op", ["bwd", "relu_bwd"])
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_dbias_has_any_float_type_and_accumulates(grad_dtype, op):
    case = Case(500, 512, torch.float16)
    fresh = torch.full((512,), torch.nan, device="cuda")
    with_sums = case.run(op, "cuda", fresh)
    held = torch.randn(512, device="cuda").to(grad_dtype)
    expected = held.clone().add_(fresh)
    case.run(op, "cuda", held, accumulate=True)
    assert torch.equal(held, expected)
    assert all(map(torch.equal, with_sums, case.run(op, "cuda", None)))


@pytest.mark.parametrize("op", ["fwd", "bwd", "relu_bwd"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_same_input_same_bits(activation, op):
    case = Case(3001, 2064, torch.bfloat16, activation)
    results = []
    for _ in range(3):
        dbias = torch.full((2064,), torch.nan, device="cuda")
        results.append((*case.run(op, "cuda", dbias), dbias.nan_to_num()))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("op", ["fwd", "bwd", "relu_bwd"])
def test_rows_may_be_strided(op):
    case = Case(90, 528, torch.bfloat16)
    expected = case.run(op, "cuda")
    for name in ("x", "dy"):
        tensor = getattr(case, name)
        wide = torch.full((90, 1056), torch.nan, dtype=tensor.dtype)
        setattr(case, name, wide[:, 8:536].copy_(tensor))
    wide = torch.full((528, 128), 0x7F, dtype=torch.uint8)
    wide[:, 16:112] = bits(case.y_transpose)
    case.y_transpose = wide.view(torch.float8_e4m3fn)[:, 16:112]
    assert all(map(torch.equal, case.run(op, "cuda"), expected))


@pytest.mark.parametrize("op", ["bwd", "relu_bwd"])
def test_no_tokens(op):
    case = Case(0, 64, torch.bfloat16)
    dbias = torch.full((64,), torch.nan, device="cuda")
    values, transpose, amax, saturated = case.run(op, "cuda", dbias)
    assert values.shape == (0, 64) and transpose.shape == (64, 0)
    assert amax == 0.5 and saturated == 3 and dbias.eq(0).all()
    case.run(op, "cuda", dbias.fill_(1), accumulate=True)
    assert dbias.eq(1).all() and case.run("fwd", "cuda")[1].shape == (64, 0)


def test_replayed_graph_draws_anew():
    case, rng = Case(200, 512, torch.bfloat16, p=0.5), make_rng(micro_batch=0)
    x, dy, bias = case.x.cuda(), case.dy.cuda(), case.bias.cuda()
    of_cast, dbias = case.of_cast("cuda"), torch.empty(512, device="cuda")

    def run() -> list[Tensor]:
        dropout = ("relu", 0.5, rng, SITE)
        y = ops.fp8_bias_activation_dropout_fwd(x, bias, *dropout, *of_cast)
        dx = ops.fp8_bias_activation_dropout_bwd(
            dy, x, bias, *dropout, None, False, *of_cast
        )  # fmt: skip
        dz = ops.fp8_relu_dropout_bwd(dy, y[1], 0.5, dbias, False, *of_cast)
        # A copy: the next run writes to dbias, too.
        return [bits(t) for t in (*y, *dx, *dz, dbias.clone())]

    assert_replays_draw_anew(run, rng)


def test_deferred_column_sums_are_the_same():
    case = Case(300, 512, torch.bfloat16)
    flat = torch.full((1024,), torch.nan, device="cuda")
    expected = [torch.empty(512, device="cuda") for _ in range(2)]
    for op, dbias in zip(("bwd", "relu_bwd"), expected, strict=True):
        case.run(op, "cuda", dbias)
    ops.defer_column_sums(flat)
    for op, dbias in zip(("bwd", "relu_bwd"), flat.view(2, 512), strict=True):
        case.run(op, "cuda", dbias)
    ops.flush_column_sums(flat, True)
    assert torch.equal(flat, torch.cat(expected))


def test_opcheck():
    case = Case(9, 48, torch.bfloat16)
    dropout, of_cast = ("relu", 0.3, make_rng(), SITE), case.of_cast("cuda")
    x, dy, bias = case.x.cuda(), case.dy.cuda(), case.bias.cuda()
    check_op("fp8_bias_activation_dropout_fwd", x, bias, *dropout, *of_cast)
    check_op("fp8_bias_activation_dropout_bwd", dy, x, bias, *dropout, bias * 0, True, *of_cast)
    check_op("fp8_relu_dropout_bwd", dy, case.y_transpose.cuda(), 0.3, None, False, *of_cast)


def test_refusals():
    case = Case(4, 64, torch.bfloat16)
    case.bias = torch.randn(128).bfloat16()[::2]
    with pytest.raises(RuntimeError, match="dropout_fwd: bias must be contiguous in its last dim"):
        case.run("fwd", "cuda")
    case.bias, case.dy = None, torch.randn(4, 80).bfloat16()[:, 3:67]
    with pytest.raises(RuntimeError, match="dropout_bwd: dy must be contiguous in its last dim"):
        case.run("bwd", "cuda")
    with pytest.raises(RuntimeError, match="fp8_relu_dropout_bwd: dy must be contiguous in its"):
        case.run("relu_bwd", "cuda")
    case.dy = case.x
    with pytest.raises(RuntimeError, match="fp8_relu_dropout_bwd: dbias must be contiguous"):
        case.run("relu_bwd", "cuda", torch.empty(128, device="cuda")[::2])
