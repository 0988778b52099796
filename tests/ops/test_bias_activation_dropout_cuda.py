"""The kernels between the GEMMs of a feed-forward, compared with float64 and with plain torch's
error."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from helpers.ops_testing import assert_kernel_as_good_as, leaf, on_gpu, poison_cache
from helpers.ops_testing import make_rng as rng_on
from torch.nn import functional

from lightseq_fairseq import ops

make_rng = functools.partial(rng_on, device="cuda")


SITE = 2
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ACTIVATIONS = {
    "identity": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_accurate": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}

# (tokens, width): one token; fewer rows than a block takes at a time; more columns than a block
# has, with an incomplete rest; several steps per block; the widest.
SIZES = [(1, 1024), (5, 8), (37, 264), (700, 1032), (5000, 4096), (9, 65536)]


def dropout(p, rng=None):
    return ops.Dropout(p, make_rng() if rng is None else rng, SITE)


class Inner:
    """x is the output of the first GEMM; its bias; and dy."""

    def __init__(self, tokens, width, dtype, activation="relu", p=0.1, with_bias=True):
        generator = torch.Generator("cuda").manual_seed(tokens + width)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

        self.x, self.dy = 2 * normal(tokens, width), normal(tokens, width)
        self.bias = normal(width) if with_bias else None
        self.activation, self.p = activation, p

    def forward(self, rng=None):
        poison_cache()
        return ops.bias_activation_dropout_fwd(
            self.x, self.bias, self.activation, dropout(self.p, rng)
        )

    def backward(self, dbias=None, accumulate=False, rng=None):
        poison_cache()
        return ops.bias_activation_dropout_bwd(
            self.dy, self.x, self.bias, self.activation, dropout(self.p, rng), dbias, accumulate
        )

    def results(self):
        """y, dx, dbias."""
        dbias = torch.full_like(self.x[0] if self.bias is None else self.bias, math.nan)
        return self.forward(), self.backward(dbias), dbias

    def plain(self, dtype):
        """The same in plain torch, with our dropout's mask."""
        x = leaf(self.x, dtype)
        bias = leaf(torch.zeros_like(self.x[0]) if self.bias is None else self.bias, dtype)
        y = ACTIVATIONS[self.activation](x + bias)
        if self.p > 0:
            keep = ops.dropout_mask(make_rng(device="cpu"), SITE, *x.shape, self.p).cuda()
            y = y * keep / (1 - self.p)
        y.backward(self.dy.to(dtype))
        return y.detach(), x.grad, bias.grad


def check_inner(inner, dtype):
    results = inner.results(), inner.plain(dtype), inner.plain(torch.float64)
    for name, *three in zip(("y", "dx", "dbias"), *results, strict=True):
        assert_kernel_as_good_as(*three, name, half_roundings=0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_errs_no_more_than_plain_torch(tokens, width, dtype):
    check_inner(Inner(tokens, width, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation, p, with_bias, dtype):
    check_inner(Inner(300, 520, dtype, activation, p, with_bias), dtype)


@pytest.mark.parametrize("activation", ["gelu", "gelu_accurate", "silu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_number(dtype, activation):
    """Forward within one rounding and a tenth; the derivative's error is at most plain torch's."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda").view(dtype).view(8, -1)
    numbers = torch.where(every.abs() < 1e4, every, torch.zeros_like(every))
    inner = Inner(8, 8192, dtype, activation, 0.0, with_bias=False)
    inner.x, inner.dy = numbers, torch.ones_like(numbers)
    y, dx, _ = inner.results()
    exact_y, exact_dx, _ = inner.plain(torch.float64)
    info = torch.finfo(dtype)
    unit = (exact_y.abs() * info.eps).clamp_min(info.tiny * info.eps)  # at least a unit of exact_y
    assert ((y.double() - exact_y).abs() <= 0.6 * unit + 1e-7).all()
    assert_kernel_as_good_as(dx, inner.plain(dtype)[1], exact_dx, "dx", half_roundings=0.5)


def test_drops_what_the_reference_drops():
    inner = Inner(70, 1032, torch.float32, "identity", 0.5)
    expected = ops.dropout_mask(make_rng(device="cpu"), SITE, 70, 1032, 0.5).cuda()
    assert torch.equal(inner.forward() != 0, expected & (inner.x + inner.bias != 0))
    assert torch.equal(inner.backward() != 0, expected & (inner.dy != 0))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_not_a_number_stays_visible(activation, p):
    inner = Inner(40, 256, torch.float16, activation, p)
    inner.x[3] = math.nan
    inner.dy[3] = math.nan
    dbias = torch.zeros(256, device="cuda")
    assert inner.forward().isnan().sum() == 256
    assert inner.backward(dbias)[3].isnan().all()
    assert dbias.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["gelu", "gelu_accurate", "silu"])
def test_infinities_have_their_limit(activation, dtype):
    inner = Inner(1, 8, dtype, activation, 0.0, with_bias=False)
    numbers = torch.tensor([[math.inf, -math.inf, 3e38, -3e38, 200, -200, math.nan, 0]])
    inner.x, inner.dy = numbers.to("cuda", dtype), torch.ones(1, 8, device="cuda", dtype=dtype)
    y, dx = inner.forward()[0].float(), inner.backward()[0].float()
    expected = inner.x[0, :6].float().clamp_min(0)
    assert torch.allclose(y[:6], expected, rtol=0, atol=1e-30) and y[6].isnan()
    assert torch.allclose(dx[:6].cpu(), torch.tensor([1.0, 0] * 3), rtol=0, atol=1e-30)
    assert dx[6].isnan()


@pytest.mark.parametrize("grad_dtype", [*DTYPES, torch.float64])
def test_dbias_has_any_float_type_and_accumulates(grad_dtype):
    inner = Inner(500, 512, torch.float16)
    fresh = torch.full((512,), math.nan, device="cuda")
    inner.backward(fresh)
    held = torch.randn(512, device="cuda").to(grad_dtype)
    expected = held.clone().add_(fresh)
    inner.backward(held, accumulate=True)
    assert torch.equal(held, expected)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_same_input_same_bits(activation):
    inner = Inner(3001, 2056, torch.bfloat16, activation)
    one, other = inner.results(), inner.results()
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_rows_may_be_strided():
    inner, strided = (Inner(90, 520, torch.bfloat16) for _ in range(2))
    wide = [torch.full((90, 1040), math.nan, dtype=torch.bfloat16).cuda() for _ in range(2)]
    strided.x, strided.dy = wide[0][:, 8:528].copy_(inner.x), wide[1][:, :520].copy_(inner.dy)
    for a, b in zip(inner.results(), strided.results(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.large
def test_more_elements_than_32_bits_count():
    tokens, width = 2**19 + 5, 4096
    x = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
    last = slice(tokens - 5, tokens)
    keep = ops.keep_mask(make_rng(device="cpu"), SITE, torch.arange(tokens)[last], width, 0.5)
    y = ops.bias_activation_dropout_fwd(x, None, "relu", dropout(0.5))
    assert torch.equal(y[last], x[last].relu() * keep.cuda() * 2)
    dbias = torch.empty(width, device="cuda")
    dx = ops.bias_activation_dropout_bwd(x, x, None, "relu", dropout(0.5), dbias, False)
    assert torch.equal(dx[last], y[last])
    exact = sum(part.sum(0, dtype=torch.float64) for part in dx.split(2**16))
    torch.testing.assert_close(dbias.double(), exact, rtol=1e-3, atol=1.0)


def test_no_tokens():
    inner = Inner(0, 64, torch.bfloat16)
    dbias = torch.full((64,), math.nan, device="cuda")
    assert inner.forward().shape == inner.backward(dbias).shape == (0, 64)
    assert dbias.eq(0).all()
    inner.backward(dbias.fill_(1), accumulate=True)
    assert dbias.eq(1).all()


def test_replayed_graph_draws_anew():
    inner, rng = Inner(200, 512, torch.bfloat16, p=0.5), make_rng(micro_batch=0)
    dbias = torch.empty(512, device="cuda")

    def run():
        y = ops.bias_activation_dropout_fwd(inner.x, inner.bias, "relu", dropout(0.5, rng))
        dx = ops.bias_activation_dropout_bwd(
            inner.dy, inner.x, inner.bias, "relu", dropout(0.5, rng), dbias, False
        )
        return y, dx

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = run()
    for micro_batch in (1, 2):
        rng[1] = micro_batch
        graph.replay()
        captured = dbias.clone()
        expected = run()
        assert torch.equal(y, expected[0]) and torch.equal(dx, expected[1])
        assert torch.equal(captured, dbias)


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.randn(4, 12), None, "x has rows of 12 elements; .* must be a multiple of 8"),
        (
            torch.randn(4, 40)[:, 3:35],
            None,
            "x must be contiguous in its last dimension, with rows",
        ),
        (torch.randn(4, 32), torch.randn(64)[::2], "bias must be contiguous in its last dimension"),
        (torch.randn(4, 32).double(), None, "x must be float32, float16 or bfloat16 on a GPU"),
    ],
)
def test_refusals(x, bias, message):
    bias = None if bias is None else on_gpu(bias)
    with pytest.raises(RuntimeError, match=f"bias_activation_dropout_fwd: {message}"):
        ops.bias_activation_dropout_fwd(on_gpu(x), bias, "relu", dropout(0.1))


def test_backward_refuses_a_gradient_with_gaps():
    with pytest.raises(RuntimeError, match="bias_activation_dropout_bwd: dbias must be contiguous"):
        Inner(4, 32, torch.float32).backward(torch.empty(64, device="cuda")[::2])
