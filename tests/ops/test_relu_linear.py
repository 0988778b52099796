"""The backward pass of a GEMM with ReLU compared with autograd."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import assert_as_good_as, check_op, poisoned

from lightseq_fairseq import ops

T, K, N = 7, 5, 6


def inputs(dtype=torch.float64):
    """z, weight, dy"""
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=dtype) for shape in ((T, K), (N, K), (T, N))]


def formula(z, weight, dy, factors=1.0):
    z, weight = z.clone().requires_grad_(), weight.clone().requires_grad_()
    ((z.relu() * factors) @ weight.t()).backward(dy)
    return z.grad, weight.grad, z.grad.sum(0)


def test_equals_autograd():
    z, weight, dy = inputs()
    dweight, dbias = poisoned(N, K), poisoned(K)
    dz = ops.relu_linear_bwd(dy, z.relu(), weight, 0.0, dweight, dbias, False)
    for ours, theirs in zip((dz, dweight, dbias), formula(z, weight, dy), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert dz.eq(0).any() and torch.equal(dz.eq(0), z.le(0))


def test_dropout():
    """Dropped elements are zero, so no mask is needed."""
    z, weight, dy = inputs()
    p = 0.3
    factors = (torch.rand(T, K) > p).double() / (1 - p)
    dweight, dbias = poisoned(N, K), poisoned(K)
    dz = ops.relu_linear_bwd(dy, z.relu() * factors, weight, p, dweight, dbias, False)
    for ours, theirs in zip((dz, dweight, dbias), formula(z, weight, dy, factors), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("grad_dtype", [torch.float64, torch.float32])
def test_accumulate_adds(grad_dtype):
    """Also into a buffer of another dtype than the GEMM's."""
    z, weight, dy = inputs()
    before = [torch.randn(N, K, dtype=grad_dtype), torch.randn(K, dtype=grad_dtype)]
    after = [t.clone() for t in before]
    ops.relu_linear_bwd(dy, z.relu(), weight, 0.0, *after, True)
    for new, old, gradient in zip(after, before, formula(z, weight, dy)[1:], strict=True):
        torch.testing.assert_close(new, (old + gradient).to(grad_dtype))


def test_nan_stays():
    z, weight, dy = inputs()
    x = z.relu()
    x[0, 0] = torch.nan
    dz = ops.relu_linear_bwd(dy, x, weight, 0.0, None, None, False)
    torch.testing.assert_close(dz[0, 0], (dy @ weight)[0, 0])
    dy[1] = torch.nan
    dbias = poisoned(K)
    dz = ops.relu_linear_bwd(dy, z.relu(), weight, 0.0, None, dbias, False)
    assert torch.equal(dz[1].isnan(), z[1] > 0) and torch.equal(dbias.isnan(), z[1] > 0)


def test_16_bits():
    z, weight, dy = (t.half() for t in inputs())
    dweight, dbias = torch.empty_like(weight), torch.empty_like(z[0])
    dz = ops.relu_linear_bwd(dy, z.relu(), weight, 0.0, dweight, dbias, False)
    exact = formula(*(t.double() for t in (z, weight, dy)))
    for ours, theirs, truth in zip(
        (dz, dweight, dbias), formula(z, weight, dy), exact, strict=True
    ):
        assert ours.dtype == torch.float16
        assert_as_good_as(ours, theirs, truth)


@pytest.mark.parametrize("accumulate", [True, False])
def test_op_schema(accumulate):
    z, weight, dy = inputs()
    check_op("relu_linear_bwd", dy, z.relu(), weight, 0.0, weight.clone(), z[0].clone(), accumulate)
    check_op("relu_linear_bwd", dy, z.relu(), weight, 0.0, None, None, accumulate)


def test_refuses_what_does_not_fit():
    z, weight, dy = inputs()
    with pytest.raises(ValueError, match=r"relu_linear_bwd: weight must have shape \[N, 5\]"):
        ops.relu_linear_bwd(dy, z, weight.t(), 0.0, None, None, False)
    with pytest.raises(ValueError, match=r"relu_linear_bwd: dy must have shape \[7, 6\]"):
        ops.relu_linear_bwd(dy[1:], z, weight, 0.0, None, None, False)
    with pytest.raises(ValueError, match=r"relu_linear_bwd: dbias must have shape \[5\]"):
        ops.relu_linear_bwd(dy, z, weight, 0.0, None, dy[0], False)
    with pytest.raises(ValueError, match="relu_linear_bwd: dy must be float64, got float32"):
        ops.relu_linear_bwd(dy.float(), z, weight, 0.0, None, None, False)
    with pytest.raises(ValueError, match=r"relu_linear_bwd: p must be in \[0, 1\), got 1"):
        ops.relu_linear_bwd(dy, z, weight, 1.0, None, None, False)


def test_no_rows():
    z, weight, dy = inputs()
    dweight, dbias = poisoned(N, K), poisoned(K)
    dz = ops.relu_linear_bwd(dy[:0], z[:0], weight, 0.0, dweight, dbias, False)
    assert dz.shape == (0, K) and not dweight.any() and not dbias.any()


def test_a_nan_in_the_bias_shows_in_its_gradient():
    """On a GPU the GEMM's ReLU makes NaN zero, and x does not show it either."""
    dy, x, weight = torch.randn(6, 5), torch.randn(6, 8).relu(), torch.randn(5, 8)
    bias, dbias = torch.zeros(8), torch.empty(8)
    bias[3] = torch.nan
    dz = ops.relu_linear_bwd(dy, x, weight, 0.0, None, dbias, False, bias)
    assert not dz.isnan().any()
    assert dbias.isnan().tolist() == bias.isnan().tolist()
