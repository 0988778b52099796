"""Bias, activation and dropout compared with their composition in torch."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import assert_as_good_as, check_gradients, leaf, make_rng, poisoned
from torch.nn import functional

from lightseq_fairseq import ops

T, F, SITE = 6, 9, 2
ACTIVATIONS = {
    "identity": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_accurate": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}


def inputs(dtype=torch.float64, rows=T, columns=F):
    torch.manual_seed(0)
    return [2 * torch.randn(*s, dtype=dtype) for s in ((rows, columns), (columns,))]


def composed(x, bias, activation, p):
    y = ACTIVATIONS[activation](x if bias is None else x + bias)
    keep = ops.keep_mask(make_rng(), SITE, torch.arange(len(x)), x.shape[1], p)
    return y * keep / (1 - p) if p > 0 else y


def dropout(p):
    return ops.Dropout(p, make_rng(), SITE)


def fwd(x, bias, activation, p):
    return ops.bias_activation_dropout_fwd(x, bias, activation, dropout(p))


def bwd(dy, x, bias, activation, p, dbias, accumulate=False):
    return ops.bias_activation_dropout_bwd(dy, x, bias, activation, dropout(p), dbias, accumulate)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_equals_torch(activation, with_bias, p):
    x, bias = inputs()
    leaves = [t.clone().requires_grad_() for t in (x, bias)]
    expected = composed(leaves[0], leaves[1] if with_bias else None, activation, p)
    torch.testing.assert_close(
        fwd(x, bias if with_bias else None, activation, p), expected.detach()
    )
    dy = torch.randn_like(x)
    expected.backward(dy)
    dbias = poisoned(F) if with_bias else None
    dx = bwd(dy, x, bias if with_bias else None, activation, p, dbias)
    torch.testing.assert_close(dx, leaves[0].grad)
    if with_bias:
        torch.testing.assert_close(dbias, leaves[1].grad)


def test_the_two_gelus_differ():
    x, bias = inputs()
    assert (fwd(x, bias, "gelu", 0.0) - fwd(x, bias, "gelu_accurate", 0.0)).abs().max() > 1e-5


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_not_a_number_stays_visible(activation):
    """An overflow must reach the gradient norm, so that the update is skipped."""
    x, bias = inputs()
    x[1, 1] = torch.nan
    assert fwd(x, bias, activation, 0.0)[1, 1].isnan()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation):
    def backward(douts, saved, outputs):
        dbias = poisoned(F)
        return bwd(douts[0].contiguous(), saved[0], saved[1], activation, 0.3, dbias), dbias

    check_gradients(lambda x, bias: (fwd(x, bias, activation, 0.3),), backward, inputs())


def test_accumulate_adds():
    x, bias = inputs()
    dy, before, fresh = torch.randn_like(x), torch.randn_like(bias), poisoned(F)
    bwd(dy, x, bias, "gelu", 0.3, fresh)
    after = before.clone()
    bwd(dy, x, bias, "gelu", 0.3, after, True)
    torch.testing.assert_close(after, before + fresh)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_16_bit(dtype, activation):
    x, bias = inputs(dtype, 300, 64)
    dy = torch.randn(300, 64).to(dtype)
    results = []
    for kind in (dtype, torch.float64):
        leaves = [leaf(t, kind) for t in (x, bias)]
        y = composed(*leaves, activation, 0.1)
        y.backward(dy.to(kind))
        results.append([y.detach(), *(t.grad for t in leaves)])
    dbias = poisoned(64, dtype=dtype)
    ours = (fwd(x, bias, activation, 0.1), bwd(dy, x, bias, activation, 0.1, dbias), dbias)
    for mine, plain, exact in zip(ours, *results, strict=True):
        assert_as_good_as(mine, plain, exact, activation)


def test_inputs_are_not_written():
    x, bias = inputs()
    dy = torch.randn_like(x)
    copies = [t.clone() for t in (x, bias, dy)]
    for activation in ACTIVATIONS:
        fwd(x, None, activation, 0.0)
        bwd(dy, x, None, activation, 0.0, None)
        bwd(dy, x, bias, activation, 0.3, poisoned(F))
    assert all(torch.equal(t, c) for t, c in zip((x, bias, dy), copies, strict=True))


@pytest.mark.parametrize("activation", ["gelu", "gelu_accurate", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_infinities_have_their_limit(activation, dtype):
    x = torch.tensor([[torch.inf, -torch.inf, 3e38, -3e38, 200, -200, torch.nan, 0]], dtype=dtype)
    y = ops.bias_activation_dropout_fwd(x, None, activation, dropout(0.0))
    limits = x[0, :6].clamp_min(0), torch.tensor([1, 0] * 3, dtype=dtype)
    tolerance = {"rtol": 0, "atol": 1e-50}  # silu(-128) is 0 in float32 only
    torch.testing.assert_close(y[0, :6], limits[0], **tolerance)
    assert y[0, 6].isnan()
    dx = ops.bias_activation_dropout_bwd(
        torch.ones_like(x), x, None, activation, dropout(0.0), None, False
    )
    torch.testing.assert_close(dx[0, :6], limits[1], **tolerance)
    assert dx[0, 6].isnan()
