"""GEMMs with a weight compared with torch's in float64, of float64 and of E4M3 operands."""

from __future__ import annotations

import pytest
import torch
from helpers.fp8_operands import numbers, quantised, widened, with_nan
from helpers.ops_testing import assert_as_good_as, check_gradients, leaf, poisoned
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops
from lightseq_fairseq.ops.casting import E4M3

T, K, N = 21, 48, 32
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
KINDS = pytest.mark.parametrize("kind", [F64, E4M3], ids=["float64", "fp8"])
# Also into a buffer of another dtype than the GEMM's.
KINDS_OF_GRADIENTS = pytest.mark.parametrize(
    ("kind", "grad_dtype"), [(F64, F64), (F64, F32), (E4M3, BF16), (E4M3, F32)]
)


def inputs(kind=F64, rows=T, k=K, n=N):
    """x, weight, bias, dy"""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, k), torch.randn(n, k) * k**-0.5, torch.randn(n)
    dy = torch.randn(rows, n)
    if kind != E4M3:
        return [t.to(kind) for t in (x, weight, bias, dy)]
    dy = quantised(dy * 1e-4, 2.0**-19)
    return [quantised(x, 2.0**-6), quantised(weight, 2.0**-9), bias.to(BF16), dy]


def gradients(kind, dtype=F64):
    """Memory for dweight and dbias. The op that casts dy computes dbias."""
    return [poisoned(N, K, dtype=dtype), None if kind == E4M3 else poisoned(N, dtype=dtype)]


def assert_near(ours: Tensor, exact: Tensor, sizes: Tensor, terms: int) -> None:
    """Equal to float64 but for one rounding and the error of a sum in float32 or float64.

    sizes: the sums of the absolute terms.
    """
    rounding = torch.finfo(ours.dtype).eps / 2 * exact.abs()
    of_sum = terms * torch.finfo(F64 if ours.dtype == F64 else F32).eps * sizes
    assert ((ours.double() - exact).abs() <= 1.01 * (rounding + of_sum)).all()


@pytest.mark.parametrize("with_bias", [True, False])
@KINDS_OF_GRADIENTS
def test_equals_torch(kind, grad_dtype, with_bias):
    x, weight, bias, dy = inputs(kind)
    leaves = [leaf(numbers(t), F64) for t in (x, weight, bias)]
    exact = functional.linear(*leaves[:2], leaves[2] if with_bias else None)
    exact.backward(numbers(dy))
    y = ops.linear_fwd(x, weight, bias if with_bias else None)
    dweight, dbias = gradients(kind, grad_dtype)
    dx = ops.linear_bwd(dy, x, weight, dweight, dbias if with_bias else None, None, False, True)
    assert y.dtype == dx.dtype == (BF16 if kind == E4M3 else kind)
    sizes = [numbers(t).abs() for t in (x, weight, dy)]
    assert_near(y, exact.detach(), sizes[0] @ sizes[1].t() + bias.double().abs(), K + 1)
    assert_near(dx, leaves[0].grad, sizes[2] @ sizes[1], N)
    assert_near(dweight, leaves[1].grad, sizes[2].t() @ sizes[0], T)
    if with_bias and dbias is not None:
        assert_near(dbias, leaves[2].grad, sizes[2].sum(0), T)


def test_exact_sums_in_fp8_are_rounded_once_to_nearest_even():
    """Sums of small integers have no error in float32, so the bits are known."""
    torch.manual_seed(0)
    x = quantised(torch.randint(-15, 16, (T, K)).float(), 1.0)
    weight = quantised(torch.randint(-15, 16, (N, K)).float() * 2.0**-10, 2.0**-10)
    exact = numbers(x) @ numbers(weight).t()
    assert torch.equal(ops.linear_fwd(x, weight, None), exact.float().to(BF16))
    assert not torch.equal(exact.float().to(BF16).double(), exact)  # some are rounded


@KINDS_OF_GRADIENTS
def test_accumulate_adds_and_rounds_once(kind, grad_dtype):
    x, weight, _, dy = inputs(kind)
    fresh = gradients(kind, F32 if kind == E4M3 else F64)
    ops.linear_bwd(dy, x, weight, *fresh, None, False, False)
    before = [None if t is None else torch.randn(t.shape).to(grad_dtype) for t in fresh]
    after = [None if t is None else t.clone() for t in before]
    ops.linear_bwd(dy, x, weight, *after, None, True, False)
    for new, old, gradient in zip(after, before, fresh, strict=True):
        if kind == E4M3 and new is not None:
            assert torch.equal(new, (old.float() + gradient).to(grad_dtype))
        elif new is not None:
            torch.testing.assert_close(new, (old + gradient).to(grad_dtype))


def test_writes_into_a_view_of_a_flat_buffer():
    x, weight, _, dy = inputs()
    flat = poisoned(2 * N * K + 3)
    ops.linear_bwd(dy, x, weight, flat[3 : 3 + N * K].view(N, K), None, None, False, False)
    assert flat[:3].isnan().all() and flat[3 + N * K :].isnan().all()
    torch.testing.assert_close(flat[3 : 3 + N * K].view(N, K), dy.t() @ x)


@KINDS
def test_dx_is_added_to_another_gradient(kind):
    x, weight, _, dy = inputs(kind)
    other = torch.randn(T, K).to(BF16 if kind == E4M3 else kind)
    onto = other.clone()
    assert ops.linear_bwd(dy, x, weight, None, None, onto, False, False).numel() == 0
    exact = other.double() + numbers(dy) @ numbers(weight)
    sizes = other.double().abs() + numbers(dy).abs() @ numbers(weight).abs()
    assert_near(onto, exact, sizes, N + 1)
    with pytest.raises(ValueError, match="linear_bwd: dx is either returned or added to onto"):
        ops.linear_bwd(dy, x, weight, None, None, onto, False, True)


@KINDS
def test_dx_only_on_request(kind):
    x, weight, _, dy = inputs(kind)
    assert ops.linear_bwd(dy, x, weight, None, None, None, False, False).numel() == 0


@KINDS
def test_not_a_number_stays_visible(kind):
    x, weight, _, dy = inputs(kind)
    x, dy = with_nan(x, 3, 5), with_nan(dy, 3, 5)
    dweight, dbias = gradients(kind)
    if kind == E4M3:
        dweight = dweight.to(BF16)
    assert ops.linear_fwd(x, weight, None)[3].isnan().all()
    assert ops.linear_bwd(dy, x, weight, dweight, dbias, None, False, True)[3].isnan().all()
    assert dweight[5].isnan().all() and dweight[:, 5].isnan().all()
    assert int(dweight.isnan().sum()) == N + K - 1
    assert dbias is None or dbias.isnan().nonzero().tolist() == [[5]]


@KINDS
def test_strided_rows(kind):
    """Views of a wider GEMM's output, as attention's q, k and v are."""
    x, weight, bias, dy = inputs(kind)
    expected = (
        ops.linear_fwd(x, weight, bias),
        ops.linear_bwd(dy, x, weight, None, None, None, False, True),
    )
    x, weight, dy = (widened(t) for t in (x, weight, dy))
    torch.testing.assert_close(ops.linear_fwd(x, weight, bias), expected[0])
    dx = ops.linear_bwd(dy, x, weight, None, None, None, False, True)
    torch.testing.assert_close(dx, expected[1])


def test_gradcheck():
    def backward(douts, saved, outputs):
        x, weight, _ = saved
        dweight, dbias = poisoned(6, 5), poisoned(6)
        dx = ops.linear_bwd(douts[0].contiguous(), x, weight, dweight, dbias, None, False, True)
        return dx, dweight, dbias

    few = inputs(rows=7, k=5, n=6)[:3]
    check_gradients(lambda *arguments: (ops.linear_fwd(*arguments),), backward, few)


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_16_bit(dtype):
    x, weight, bias, dy = inputs(dtype, rows=300)
    results = []
    for kind in (dtype, F64):
        leaves = [leaf(t, kind) for t in (x, weight, bias)]
        y = functional.linear(*leaves)
        y.backward(dy.to(kind))
        results.append([y.detach(), *(t.grad for t in leaves)])
    dweight, dbias = gradients(dtype, dtype)
    y = ops.linear_fwd(x, weight, bias)
    dx = ops.linear_bwd(dy, x, weight, dweight, dbias, None, False, True)
    for ours, plain, exact in zip((y, dx, dweight, dbias), *results, strict=True):
        assert_as_good_as(ours, plain, exact)


@KINDS
def test_empty(kind):
    x, weight, bias, dy = inputs(kind, rows=0)
    assert ops.linear_fwd(x, weight, bias).shape == (0, N)
    dweight, dbias = gradients(kind, F32)
    assert ops.linear_bwd(dy, x, weight, dweight, dbias, None, False, True).shape == (0, K)
    assert dweight.eq(0).all() and (dbias is None or dbias.eq(0).all())


def test_refusals_in_fp8():
    x, weight, bias, dy = inputs(E4M3)
    for mixed in ((numbers(x), weight), (x, numbers(weight)), (x, weight.values)):
        with pytest.raises(ValueError, match="either all operands are Quantised or none"):
            ops.linear_fwd(*mixed, None)
    with pytest.raises(ValueError, match="dbias must be None in fp8"):
        ops.linear_bwd(dy, x, weight, None, bias, None, False, True)
