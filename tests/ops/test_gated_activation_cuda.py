"""The kernel of gated activations compared with float64 and with plain torch's error."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import assert_kernel_as_good_as, leaf, make_rng, poison_cache
from torch.nn import functional

from lightseq_fairseq import ops

SITE = 2
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ACTIVATIONS = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_accurate": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}
# (tokens, columns of y): one row; fewer columns than a block has, and more; more rows than a grid.
SIZES = [(1, 8), (5, 264), (700, 1032), (70, 16384), (600_000, 8)]


class Inner:
    """x is a product's result."""

    def __init__(self, tokens, columns, dtype, activation="gelu", p=0.1):
        generator = torch.Generator("cuda").manual_seed(tokens + columns)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

        self.x, self.dy = 2 * normal(tokens, 2 * columns), normal(tokens, columns)
        self.activation, self.p = activation, p

    def results(self):
        """y and dx."""
        settings = self.activation, ops.Dropout(self.p, make_rng(device="cuda"), SITE)
        poison_cache()
        y = ops.gated_activation_fwd(self.x, *settings)
        poison_cache()
        return y, ops.gated_activation_bwd(self.dy, self.x, *settings)

    def plain(self, dtype):
        x = leaf(self.x, dtype)
        a, b = x.chunk(2, 1)
        y = ACTIVATIONS[self.activation](a) * b
        if self.p > 0:
            y = y * ops.dropout_mask(make_rng(), SITE, *y.shape, self.p).cuda() / (1 - self.p)
        y.backward(self.dy.to(dtype))
        return y.detach(), x.grad


def check(inner, dtype):
    results = inner.results(), inner.plain(dtype), inner.plain(torch.float64)
    for name, *three in zip(("y", "dx"), *results, strict=True):
        assert_kernel_as_good_as(*three, name, half_roundings=0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "columns"), SIZES)
def test_errs_no_more_than_plain_torch(tokens, columns, dtype):
    check(Inner(tokens, columns, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation, p, dtype):
    check(Inner(300, 520, dtype, activation, p), dtype)


def test_drops_what_the_reference_drops():
    (y, dx), (all_y, all_dx) = (Inner(70, 1032, torch.float32, p=p).results() for p in (0.5, 0.0))
    mask = ops.dropout_mask(make_rng(), SITE, 70, 1032, 0.5).cuda()
    assert torch.equal(y, 2 * all_y * mask)
    assert torch.equal(dx, 2 * all_dx * mask.repeat(1, 2))
    assert 0.4 < mask.float().mean() < 0.6


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_not_a_number_stays_visible(activation):
    inner = Inner(40, 256, torch.float16, activation, 0.5)
    inner.x[3] = torch.nan
    assert all(x[3].isnan().all() and x[:3].isfinite().all() for x in inner.results())


def test_rows_may_be_strided():
    inner, strided = (Inner(90, 520, torch.bfloat16) for _ in range(2))
    wide = [torch.full((90, 2080), torch.nan, dtype=torch.bfloat16).cuda() for _ in range(2)]
    strided.x, strided.dy = wide[0][:, 8:1048].copy_(inner.x), wide[1][:, :520].copy_(inner.dy)
    assert all(torch.equal(a, b) for a, b in zip(inner.results(), strided.results(), strict=True))


def test_no_tokens():
    y, dx = Inner(0, 64, torch.bfloat16).results()
    assert y.shape == (0, 64) and dx.shape == (0, 128)


@pytest.mark.parametrize(
    ("columns", "change", "message"),
    [
        (12, lambda x: x, "x has rows of 24 elements; .* must be a multiple of 16"),
        (32, lambda x: x.double(), "x must be float32, float16 or bfloat16 on a GPU"),
        (32, lambda x: torch.cat((x, x), 1)[:, 3:67], "x must be contiguous in its last dimension"),
    ],
)
def test_refusals(columns, change, message):
    inner = Inner(4, columns, torch.float32)
    inner.x = change(inner.x)
    with pytest.raises(RuntimeError, match=f"gated_activation_fwd: {message}"):
        inner.results()
