"""Gated activation and dropout compared with their composition in torch."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import assert_as_good_as, check_gradients, leaf, make_rng
from torch.nn import functional

from lightseq_fairseq import ops

T, F, SITE = 6, 9, 2
ACTIVATIONS = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_accurate": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}


def composed(x, activation, p):
    a, b = x.chunk(2, 1)
    y = ACTIVATIONS[activation](a) * b
    keep = ops.keep_mask(make_rng(), SITE, torch.arange(len(x)), y.shape[1], p)
    return y * keep / (1 - p) if p > 0 else y


def dropout(p):
    return ops.Dropout(p, make_rng(), SITE)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_equals_torch(activation, p):
    x = leaf(2 * torch.randn(T, 2 * F), torch.float64)
    expected, settings = composed(x, activation, p), (activation, dropout(p))
    torch.testing.assert_close(ops.gated_activation_fwd(x.detach(), *settings), expected.detach())
    dy = torch.randn(T, F).double()
    expected.backward(dy)
    torch.testing.assert_close(ops.gated_activation_bwd(dy, x.detach(), *settings), x.grad)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation):
    settings = activation, dropout(0.3)
    check_gradients(
        lambda x: (ops.gated_activation_fwd(x, *settings),),
        lambda douts, saved, _: (
            ops.gated_activation_bwd(douts[0].contiguous(), *saved[:1], *settings),
        ),
        [2 * torch.randn(T, 2 * F).double()],
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_16_bit(dtype, activation):
    x, dy = (2 * torch.randn(300, 128)).to(dtype), torch.randn(300, 64).to(dtype)
    results = []
    for kind in (dtype, torch.float64):
        given = leaf(x, kind)
        y = composed(given, activation, 0.1)
        y.backward(dy.to(kind))
        results.append((y.detach(), given.grad))
    settings = activation, dropout(0.1)
    ours = ops.gated_activation_fwd(x, *settings), ops.gated_activation_bwd(dy, x, *settings)
    for mine, plain, exact in zip(ours, *results, strict=True):
        assert_as_good_as(mine, plain, exact, activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("column", [1, F + 1])
def test_not_a_number_stays_visible(activation, column):
    x = torch.randn(T, 2 * F)
    x[1, column] = torch.nan
    assert ops.gated_activation_fwd(x, activation, dropout(0.0))[1, 1].isnan()
    dx = ops.gated_activation_bwd(torch.ones(T, F), x, activation, dropout(0.0))
    assert dx[1].isnan().any() and dx[2:].isfinite().all()
