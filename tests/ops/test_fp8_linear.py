"""Products of E4M3 operands compared with float64 products of the same numbers."""

from __future__ import annotations

import pytest
import torch
from helpers.fp8_operands import Operand
from helpers.ops_testing import check_op, make_rng, poisoned
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops

T, K, N = 21, 48, 32
BF16 = torch.bfloat16


def operands(rows: int = T) -> tuple[Operand, Operand, Operand, Tensor]:
    """x, weight, dy and bias."""
    torch.manual_seed(0)
    x = Operand(torch.randn(rows, K), 2.0**-6)
    weight = Operand(torch.randn(N, K) * K**-0.5, 2.0**-9)
    dy = Operand(torch.randn(rows, N) * 1e-4, 2.0**-19)
    return x, weight, dy, torch.randn(N).to(BF16)


def fwd(x: Operand, weight: Operand, bias: Tensor | None) -> Tensor:
    return ops.fp8_linear_fwd(x.values, x.scale, weight.values, weight.scale, bias)


def bwd(dy, x, weight, dweight=None, onto=None, accumulate=False, need_dx=True):
    return ops.fp8_linear_bwd(
        *(dy.values, dy.transpose, dy.scale, x.transpose, x.scale),
        weight_transpose=weight.transpose,
        weight_scale=weight.scale,
        dweight=dweight,
        onto=onto,
        accumulate=accumulate,
        need_dx=need_dx,
    )


def assert_near(ours: Tensor, exact: Tensor, sizes: Tensor, terms: int) -> None:
    """Equal to float64 but for one rounding and the error of a sum in float32.

    sizes: the sums of the absolute terms.
    """
    rounding = torch.finfo(ours.dtype).eps / 2 * exact.abs()
    of_sum = terms * torch.finfo(torch.float32).eps * sizes
    assert ((ours.double() - exact).abs() <= 1.01 * (rounding + of_sum)).all()


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_equals_float64(with_bias, dtype):
    x, weight, dy, bias = operands()
    leaves = [t.numbers.clone().requires_grad_() for t in (x, weight)]
    exact = functional.linear(*leaves, bias.double() if with_bias else None)
    exact.backward(dy.numbers)
    y = fwd(x, weight, bias if with_bias else None)
    dweight = poisoned(N, K, dtype=dtype)
    dx = bwd(dy, x, weight, dweight)
    assert y.dtype == dx.dtype == BF16
    sizes = [t.numbers.abs() for t in (x, weight, dy)]
    assert_near(y, exact.detach(), sizes[0] @ sizes[1].t() + bias.double().abs(), K + 1)
    assert_near(dx, leaves[0].grad, sizes[2] @ sizes[1], N)
    assert_near(dweight, leaves[1].grad, sizes[2].t() @ sizes[0], T)


def test_exact_sums_are_rounded_once_to_nearest_even():
    """Sums of small integers have no error in float32, so the bits are known."""
    torch.manual_seed(0)
    x = Operand(torch.randint(-15, 16, (T, K)).float(), 1.0)
    weight = Operand(torch.randint(-15, 16, (N, K)).float() * 2.0**-10, 2.0**-10)
    exact = x.numbers @ weight.numbers.t()
    assert torch.equal(fwd(x, weight, None), exact.float().to(BF16))
    assert not torch.equal(exact.float().to(BF16).double(), exact)  # some are rounded


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_accumulate_adds_and_rounds_once(dtype):
    x, weight, dy, _ = operands()
    before, fresh = torch.randn(N, K).to(dtype), poisoned(N, K, dtype=torch.float32)
    bwd(dy, x, weight, fresh)
    after = before.clone()
    bwd(dy, x, weight, after, accumulate=True)
    assert torch.equal(after, (before.float() + fresh).to(dtype))


def test_dx_is_added_to_another_gradient():
    x, weight, dy, _ = operands()
    other = torch.randn(T, K).to(BF16)
    onto = other.clone()
    assert bwd(dy, x, weight, onto=onto, need_dx=False).numel() == 0
    exact = other.double() + dy.numbers @ weight.numbers
    torch.testing.assert_close(onto.double(), exact, rtol=2.0**-8, atol=1e-6)
    with pytest.raises(ValueError, match="fp8_linear_bwd: dx is either returned or added to onto"):
        bwd(dy, x, weight, onto=onto)


def test_dx_only_on_request():
    x, weight, dy, _ = operands()
    assert bwd(dy, x, weight, need_dx=False).numel() == 0


def test_not_a_number_stays_visible():
    x, weight, dy, _ = operands()
    for operand in (x, dy):
        operand.values.view(torch.uint8)[3, 5] = operand.transpose.view(torch.uint8)[5, 3] = 0x7F
    dweight = poisoned(N, K, dtype=BF16)
    assert fwd(x, weight, None)[3].isnan().all()
    assert bwd(dy, x, weight, dweight)[3].isnan().all()
    assert dweight[5].isnan().all() and dweight[:, 5].isnan().all()
    assert int(dweight.isnan().sum()) == N + K - 1


def test_views_of_wider_operands():
    x, weight, dy, bias = operands()
    expected = fwd(x, weight, bias), bwd(dy, x, weight)
    for operand in (x, weight, dy):
        for name in ("values", "transpose"):
            matrix = getattr(operand, name)
            wide = torch.full((len(matrix), matrix.shape[1] + 32), 0x7F, dtype=torch.uint8)
            wide[:, 16:-16] = matrix.view(torch.uint8)
            setattr(operand, name, wide.view(matrix.dtype)[:, 16:-16])
    assert torch.equal(fwd(x, weight, bias), expected[0])
    assert torch.equal(bwd(dy, x, weight), expected[1])


def test_empty():
    x, weight, dy, bias = operands(rows=0)
    assert fwd(x, weight, bias).shape == (0, N)
    dweight = poisoned(N, K, dtype=BF16)
    assert bwd(dy, x, weight, dweight).shape == (0, K)
    assert dweight.eq(0).all()


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_feed_forward_sublayer(activation):
    """All fp8 ops together: gradients are near those of float64 without fp8."""
    torch.manual_seed(0)
    rows, width, ffn, p = 80, 64, 128, 0.1
    x, dy = torch.randn(rows, width).to(BF16), torch.randn(rows, width).to(BF16)
    w1, b1 = torch.randn(ffn, width).div(8).to(BF16), torch.randn(ffn).to(BF16)
    w2 = torch.randn(width, ffn).div(8).to(BF16)
    dropout = (p, make_rng(), 1)

    leaves = [t.double().requires_grad_() for t in (x, w1, b1, w2)]
    h = getattr(functional, activation)(functional.linear(*leaves[:3]))
    keep = ops.keep_mask(dropout[1], 1, torch.arange(rows), ffn, p)
    y = functional.linear(h * keep / (1 - p), leaves[3])
    y.backward(dy.double())

    def of_cast(amax: float) -> tuple[Tensor, Tensor, Tensor]:
        scale = torch.exp2(torch.tensor(amax / 224).log2().ceil())
        return scale, torch.tensor(0.0), torch.tensor(0)

    def cast(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scalars = of_cast(float(t.abs().max()))
        return (*ops.fp8_quantise(t, *scalars), scalars[0])

    (xv, xt, xs), (w1v, w1t, w1s), (w2v, w2t, w2s) = cast(x), cast(w1), cast(w2)
    scalars = of_cast(8.0)
    h2v, h2t, slope = ops.fp8_linear_activation_fwd(
        xv, xs, w1v, w1s, b1, activation, *dropout, need_slope=True,
        scale=scalars[0], amax=scalars[1], saturated=scalars[2],
    )  # fmt: skip
    ours = [ops.fp8_linear_fwd(h2v, scalars[0], w2v, w2s, None)]
    dyv, dyt, dys = cast(dy)
    dw2, dw1, db1 = (poisoned(*t.shape, dtype=BF16) for t in (w2, w1, b1))
    ops.fp8_linear_bwd(dyv, dyt, dys, h2t, scalars[0], w2t, w2s, dw2, onto=None,
                       accumulate=False, need_dx=False)  # fmt: skip
    of_dh1 = of_cast(8.0)
    given = None if activation == "relu" else slope
    dh1v, dh1t = ops.fp8_activation_linear_bwd(
        dyv, dys, w2t, w2s, h2t, given, p, db1, False, *of_dh1
    )
    dx = ops.fp8_linear_bwd(dh1v, dh1t, of_dh1[0], xt, xs, w1t, w1s, dw1, onto=None,
                            accumulate=False, need_dx=True)  # fmt: skip
    ours += [dx, dw1, db1, dw2]
    for mine, exact in zip(ours, [y.detach(), *(t.grad for t in leaves)], strict=True):
        error = (mine.double() - exact).norm() / exact.norm()
        # ReLU's derivative jumps: near 0 an error of its input changes all of a gradient.
        assert 0.001 < error < (0.2 if activation == "relu" else 0.07)


@pytest.mark.parametrize("accumulate", [True, False])
def test_opcheck(accumulate):
    x, weight, dy, bias = operands()
    check_op("fp8_linear_fwd", x.values, x.scale, weight.values, weight.scale, bias)
    check_op("fp8_linear_fwd", x.values, x.scale, weight.values, weight.scale, None)
    given = (dy.values, dy.transpose, dy.scale, x.transpose, x.scale)
    given += (weight.transpose, weight.scale)
    check_op("fp8_linear_bwd", *given, torch.ones(N, K).to(BF16), None, accumulate, True)
    check_op("fp8_linear_bwd", *given, None, torch.ones(T, K).to(BF16), accumulate, False)


def test_refusals():
    x, weight, dy, bias = operands()
    with pytest.raises(ValueError, match="fp8_linear_fwd: x must be float8_e4m3fn, got bfloat16"):
        ops.fp8_linear_fwd(x.values.to(BF16), x.scale, weight.values, weight.scale, None)
    with pytest.raises(ValueError, match=r"weight must have shape \[N, 48\], got \[48, 32\]"):
        ops.fp8_linear_fwd(x.values, x.scale, weight.transpose, weight.scale, None)
    with pytest.raises(ValueError, match="widths that are multiples of 16, got 40"):
        ops.fp8_linear_fwd(x.values[:, :40], x.scale, weight.values[:, :40], weight.scale, None)
    with pytest.raises(ValueError, match="widths that are multiples of 16, got 20"):
        ops.fp8_linear_fwd(x.values, x.scale, weight.values[:20], weight.scale, None)
    with pytest.raises(ValueError, match="weight_scale must be a power of two"):
        ops.fp8_linear_fwd(x.values, x.scale, weight.values, weight.scale * 3, None)
    with pytest.raises(ValueError, match="bias must be bfloat16, got float32"):
        fwd(x, weight, bias.float())
    with pytest.raises(ValueError, match=r"dweight must have shape \[32, 48\], got \[48, 32\]"):
        bwd(dy, x, weight, torch.ones(K, N))
    dy.transpose = dy.transpose[:, :16]
    with pytest.raises(ValueError, match=r"bwd: dy_transpose must have shape \[32, 32\]"):
        bwd(dy, x, weight)
