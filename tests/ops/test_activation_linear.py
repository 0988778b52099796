"""The backward pass of an activation and the GEMM after it, compared with autograd."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import assert_as_good_as, check_op, poisoned
from torch.nn import functional

from lightseq_fairseq import ops
from lightseq_fairseq.ops.linear_activation import store_slope

T, K, N = 7, 5, 6


def inputs(t=T, k=K, n=N):
    """z, weight, dy"""
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64) for shape in ((t, k), (n, k), (t, n))]


def formula(z, weight, dy, factors=1.0, activation=functional.relu):
    z, weight = z.clone().requires_grad_(), weight.clone().requires_grad_()
    ((activation(z) * factors) @ weight.t()).backward(dy)
    return z.grad, weight.grad, z.grad.sum(0)


def gelu_with_slope(z):
    x = z.clone().requires_grad_()
    y = functional.gelu(x)
    y.sum().backward()
    return y.detach(), x.grad


def test_equals_autograd():
    z, weight, dy = inputs()
    dweight, dbias = poisoned(N, K), poisoned(K)
    dz = ops.activation_linear_bwd(dy, z.relu(), weight, None, 0.0, dweight, dbias, False)
    for ours, theirs in zip((dz, dweight, dbias), formula(z, weight, dy), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert dz.eq(0).any() and torch.equal(dz.eq(0), z.le(0))


def test_slope():
    """The slope is 0 where dropout drops, and does not include its factor."""
    z, weight, dy = inputs()
    keep = (torch.rand(T, K) > 0.3).double()
    factors = keep / 0.7
    (y, slope), dweight, dbias = gelu_with_slope(z), poisoned(N, K), poisoned(K)
    dz = ops.activation_linear_bwd(
        dy, y * factors, weight, slope * keep, 0.3, dweight, dbias, False
    )
    expected = formula(z, weight, dy, factors, functional.gelu)
    for ours, theirs in zip((dz, dweight, dbias), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_dropout():
    """Dropped elements are zero, so no mask is needed."""
    z, weight, dy = inputs()
    p = 0.3
    factors = (torch.rand(T, K) > p).double() / (1 - p)
    dweight, dbias = poisoned(N, K), poisoned(K)
    dz = ops.activation_linear_bwd(dy, z.relu() * factors, weight, None, p, dweight, dbias, False)
    for ours, theirs in zip((dz, dweight, dbias), formula(z, weight, dy, factors), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("grad_dtype", [torch.float64, torch.float32])
def test_accumulate_adds(grad_dtype):
    """Also into a buffer of another dtype than the GEMM's."""
    z, weight, dy = inputs()
    before = [torch.randn(N, K, dtype=grad_dtype), torch.randn(K, dtype=grad_dtype)]
    after = [t.clone() for t in before]
    ops.activation_linear_bwd(dy, z.relu(), weight, None, 0.0, *after, True)
    for new, old, gradient in zip(after, before, formula(z, weight, dy)[1:], strict=True):
        torch.testing.assert_close(new, (old + gradient).to(grad_dtype))


def test_nan_stays():
    z, weight, dy = inputs()
    x = z.relu()
    x[0, 0] = torch.nan
    dz = ops.activation_linear_bwd(dy, x, weight, None, 0.0, None, None, False)
    torch.testing.assert_close(dz[0, 0], (dy @ weight)[0, 0])
    dy[1] = torch.nan
    dbias = poisoned(K)
    dz = ops.activation_linear_bwd(dy, z.relu(), weight, None, 0.0, None, dbias, False)
    assert torch.equal(dz[1].isnan(), z[1] > 0) and torch.equal(dbias.isnan(), z[1] > 0)
    dy, slope = inputs()[2], torch.ones_like(x)
    slope[2, 3] = torch.nan
    dz = ops.activation_linear_bwd(dy, z, weight, slope, 0.0, None, dbias, False)
    assert torch.equal(dz.isnan(), slope.isnan()) and dbias[3].isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_slope", [False, True])
def test_16_bits(with_slope, dtype):
    z, weight, dy = (t.to(dtype) for t in inputs(300, 64, 40))
    dweight, dbias = torch.empty_like(weight), torch.empty_like(z[0])
    activation = functional.gelu if with_slope else functional.relu
    y, slope = gelu_with_slope(z) if with_slope else (z.relu(), None)
    if slope is not None:
        slope = store_slope(slope, dtype)
    dz = ops.activation_linear_bwd(dy, y, weight, slope, 0.0, dweight, dbias, False)
    plain, exact = (
        formula(*(t.to(kind) for t in (z, weight, dy)), activation=activation)
        for kind in (dtype, torch.float64)
    )
    for ours, theirs, truth in zip((dz, dweight, dbias), plain, exact, strict=True):
        assert ours.dtype == dtype
        assert_as_good_as(ours, theirs, truth)


@pytest.mark.parametrize("accumulate", [True, False])
def test_op_schema(accumulate):
    z, weight, dy = inputs()
    gradients = weight.clone(), z[0].clone()
    for x, slope in ((z.relu(), None), (z, z.clone())):
        check_op("activation_linear_bwd", dy, x, weight, slope, 0.0, *gradients, accumulate)
        check_op("activation_linear_bwd", dy, x, weight, slope, 0.0, None, None, accumulate)


def test_refuses_what_does_not_fit():
    z, weight, dy = inputs()
    with pytest.raises(ValueError, match=r"activation_linear_bwd: weight must have shape \[N, 5\]"):
        ops.activation_linear_bwd(dy, z, weight.t(), None, 0.0, None, None, False)
    with pytest.raises(ValueError, match=r"activation_linear_bwd: dy must have shape \[7, 6\]"):
        ops.activation_linear_bwd(dy[1:], z, weight, None, 0.0, None, None, False)
    with pytest.raises(ValueError, match=r"activation_linear_bwd: dbias must have shape \[5\]"):
        ops.activation_linear_bwd(dy, z, weight, None, 0.0, None, dy[0], False)
    with pytest.raises(ValueError, match="activation_linear_bwd: dy must be float64, got float32"):
        ops.activation_linear_bwd(dy.float(), z, weight, None, 0.0, None, None, False)
    with pytest.raises(ValueError, match=r"activation_linear_bwd: slope must have shape \[7, 5\]"):
        ops.activation_linear_bwd(dy, z, weight, z[:0], 0.0, None, None, False)
    with pytest.raises(ValueError, match="slope must be contiguous in its last dimension"):
        ops.activation_linear_bwd(dy, z, weight, z.t().contiguous().t(), 0.0, None, None, False)
    narrow = [t.bfloat16() for t in (dy, z, weight)]
    with pytest.raises(ValueError, match="slope must be uint8, got bfloat16"):
        ops.activation_linear_bwd(*narrow, narrow[1], 0.0, None, None, False)
    wide = torch.zeros(T, 2 * K, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"slope must be contiguous, its strides are \(10, 1\)"):
        ops.activation_linear_bwd(*narrow, wide[:, :K], 0.0, None, None, False)
    with pytest.raises(ValueError, match=r"activation_linear_bwd: p must be in \[0, 1\), got 1"):
        ops.activation_linear_bwd(dy, z, weight, None, 1.0, None, None, False)


def test_no_rows():
    z, weight, dy = inputs()
    dweight, dbias = poisoned(N, K), poisoned(K)
    dz = ops.activation_linear_bwd(dy[:0], z[:0], weight, None, 0.0, dweight, dbias, False)
    assert dz.shape == (0, K) and not dweight.any() and not dbias.any()


def test_a_nan_in_the_bias_shows_in_its_gradient():
    """On a GPU the GEMM's ReLU makes NaN zero, and x does not show it either."""
    dy, x, weight = torch.randn(6, 5), torch.randn(6, 8).relu(), torch.randn(5, 8)
    bias, dbias = torch.zeros(8), torch.empty(8)
    bias[3] = torch.nan
    dz = ops.activation_linear_bwd(dy, x, weight, None, 0.0, None, dbias, False, bias)
    assert not dz.isnan().any()
    assert dbias.isnan().tolist() == bias.isnan().tolist()
