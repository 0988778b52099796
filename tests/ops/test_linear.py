"""GEMMs with a weight compared with torch's."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import (
    assert_as_good_as,
    check_gradients,
    check_op,
    leaf,
    make_rng,
    poisoned,
)
from torch.nn import functional

from lightseq_fairseq import ops

T, K, N = 7, 5, 6


def inputs(dtype=torch.float64, rows=T, scale=1.0):
    torch.manual_seed(0)
    shapes = ((rows, K), (N, K), (N,), (rows, N))
    return [torch.randn(*shape, dtype=dtype) * scale for shape in shapes]


@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_torch(with_bias):
    x, weight, bias, dy = inputs()
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    expected = functional.linear(leaves[0], leaves[1], leaves[2] if with_bias else None)
    expected.backward(dy)
    y = ops.linear_fwd(x, weight, bias if with_bias else None)
    torch.testing.assert_close(y, expected.detach())
    dweight, dbias = poisoned(N, K), poisoned(N) if with_bias else None
    dx = ops.linear_bwd(dy, x, weight, dweight, dbias, False, True)
    torch.testing.assert_close(dx, leaves[0].grad)
    torch.testing.assert_close(dweight, leaves[1].grad)
    if with_bias:
        torch.testing.assert_close(dbias, leaves[2].grad)


@pytest.mark.parametrize("with_bias", [True, False])
def test_positive_part(with_bias):
    x, weight, bias, _ = inputs()
    bias = bias if with_bias else None
    y = ops.linear_fwd(x, weight, bias, relu=True)
    assert torch.equal(y, ops.linear_fwd(x, weight, bias).relu()) and y.eq(0).any()


@pytest.mark.parametrize("grad_dtype", [torch.float64, torch.float32])
def test_accumulate_adds(grad_dtype):
    """Also into a buffer of another dtype than the GEMM's."""
    x, weight, _, dy = inputs()
    fresh = [poisoned(N, K), poisoned(N)]
    ops.linear_bwd(dy, x, weight, *fresh, False, False)
    before = [torch.randn(N, K, dtype=grad_dtype), torch.randn(N, dtype=grad_dtype)]
    after = [t.clone() for t in before]
    ops.linear_bwd(dy, x, weight, *after, True, False)
    for new, old, gradient in zip(after, before, fresh, strict=True):
        torch.testing.assert_close(new, (old + gradient).to(grad_dtype))


def test_writes_into_a_view_of_a_flat_buffer():
    x, weight, _, dy = inputs()
    flat = poisoned(2 * N * K + 3)
    ops.linear_bwd(dy, x, weight, flat[3 : 3 + N * K].view(N, K), None, False, False)
    assert flat[:3].isnan().all() and flat[3 + N * K :].isnan().all()
    torch.testing.assert_close(flat[3 : 3 + N * K].view(N, K), dy.t() @ x)


def test_dx_is_added_to_another_gradient():
    x, weight, _, dy = inputs()
    other = torch.randn_like(x)
    onto = other.clone()
    assert ops.linear_bwd(dy, x, weight, None, None, False, False, onto).numel() == 0
    torch.testing.assert_close(onto, other + dy @ weight)
    with pytest.raises(ValueError, match="linear_bwd: dx is either returned or added to onto"):
        ops.linear_bwd(dy, x, weight, None, None, False, True, onto)


def test_dx_only_on_request():
    x, weight, _, dy = inputs()
    assert ops.linear_bwd(dy, x, weight, None, None, False, False).numel() == 0


def test_strided_rows():
    """Views of a wider GEMM's output, as attention's q, k and v are."""
    x, weight, bias, dy = inputs()
    wide, wide_dy = poisoned(T, 2 * K), poisoned(T, 3 * N)
    wide[:, K:], wide_dy[:, N : 2 * N] = x, dy
    y = ops.linear_fwd(wide[:, K:], weight, bias)
    torch.testing.assert_close(y, functional.linear(x, weight, bias))
    dx = ops.linear_bwd(wide_dy[:, N : 2 * N], wide[:, K:], weight, None, None, False, True)
    torch.testing.assert_close(dx, dy @ weight)


def test_gradcheck():
    def backward(douts, saved, outputs):
        x, weight, _ = saved
        dweight, dbias = poisoned(N, K), poisoned(N)
        dx = ops.linear_bwd(douts[0].contiguous(), x, weight, dweight, dbias, False, True)
        return dx, dweight, dbias

    check_gradients(lambda *arguments: (ops.linear_fwd(*arguments),), backward, inputs()[:3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit(dtype):
    x, weight, bias, dy = inputs(dtype, rows=300, scale=0.5)
    results = []
    for kind in (dtype, torch.float64):
        leaves = [leaf(t, kind) for t in (x, weight, bias)]
        y = functional.linear(*leaves)
        y.backward(dy.to(kind))
        results.append([y.detach(), *(t.grad for t in leaves)])
    dweight, dbias = poisoned(N, K, dtype=dtype), poisoned(N, dtype=dtype)
    y = ops.linear_fwd(x, weight, bias)
    dx = ops.linear_bwd(dy, x, weight, dweight, dbias, False, True)
    for ours, plain, exact in zip((y, dx, dweight, dbias), *results, strict=True):
        assert_as_good_as(ours, plain, exact)


def test_empty():
    x, weight, bias, dy = inputs(rows=0)
    assert ops.linear_fwd(x, weight, bias).shape == (0, N)
    dweight, dbias = poisoned(N, K), poisoned(N)
    assert ops.linear_bwd(dy, x, weight, dweight, dbias, False, True).shape == (0, K)
    assert dweight.eq(0).all() and dbias.eq(0).all()


@pytest.mark.parametrize("accumulate", [True, False])
def test_opcheck(accumulate):
    x, weight, bias, dy = inputs()
    check_op("linear_fwd", x, weight, bias, True)
    check_op("linear_fwd", x, weight, None, False)
    check_op("linear_bwd", dy, x, weight, torch.ones(N, K).double(), bias, None, accumulate, True)
    check_op("linear_bwd", dy, x, weight, None, None, torch.ones_like(x), accumulate, False)


def test_refusals():
    x, weight, bias, dy = inputs(torch.float32)
    with pytest.raises(ValueError, match=r"linear_fwd: weight must have shape \[N, 5\]"):
        ops.linear_fwd(x, weight.t().contiguous(), bias)
    with pytest.raises(ValueError, match=r"linear_fwd: x must have shape \[T, K\]"):
        ops.linear_fwd(x[None], weight, bias)
    with pytest.raises(ValueError, match="linear_fwd: weight must be float32, got float16"):
        ops.linear_fwd(x, weight.half(), bias)
    with pytest.raises(ValueError, match=r"linear_fwd: bias must have shape \[6\], got \[5\]"):
        ops.linear_fwd(x, weight, bias[:5])
    with pytest.raises(ValueError, match=r"linear_fwd: x must be float16 or .*, got int64"):
        ops.linear_fwd(make_rng()[None], weight, bias)
    with pytest.raises(ValueError, match="linear_bwd: dy must be contiguous in its last dimension"):
        ops.linear_bwd(dy.t().contiguous().t(), x, weight, None, None, False, True)
    with pytest.raises(ValueError, match=r"linear_bwd: dweight must have shape \[6, 5\]"):
        ops.linear_bwd(dy, x, weight, dy, None, False, True)
