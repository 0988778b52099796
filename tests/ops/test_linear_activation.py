"""A GEMM with activation and dropout, and its slope, compared with autograd; also in fp8."""

from __future__ import annotations

import pytest
import torch
from helpers.fp8_operands import assert_is_cast, numbers, quantised
from helpers.ops_testing import assert_as_good_as, leaf, make_cast, make_rng
from torch.nn import functional

from lightseq_fairseq import ops
from lightseq_fairseq.ops import Dropout
from lightseq_fairseq.ops.casting import E4M3
from lightseq_fairseq.ops.linear_activation import read_slope, store_slope

T, C, F, SITE = 21, 32, 48, 2
BF16, F64 = torch.bfloat16, torch.float64
ACTIVATIONS = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_accurate": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}
WITH_SLOPE = ["gelu", "gelu_accurate", "silu"]
KINDS = pytest.mark.parametrize("kind", [F64, E4M3], ids=["float64", "fp8"])


def inputs(kind=F64, rows=T, c=C, f=F):
    """x, weight, bias"""
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*s, dtype=F64) for s in ((rows, c), (f, c), (f,)))
    if kind == E4M3:
        weight = quantised((2 * c**-0.5 * weight).float(), 2.0**-8)
        return quantised(x.float(), 2.0**-6), weight, bias.to(BF16)
    return [t.to(kind) for t in (x, weight, bias)]


def run(operands, activation, p=0.0, need_slope=True, cast=None):
    """y, transpose and slope; in fp8 with a cast."""
    if cast is None and isinstance(operands[0], ops.Quantised):
        cast = make_cast()
    dropout = Dropout(p, make_rng(), SITE)
    return ops.linear_activation_fwd(*operands, activation, dropout, need_slope, cast)


def composed(operands, activation, p, dtype=F64):
    """y and the slope."""
    x, weight, bias = (numbers(t).to(dtype) for t in operands)
    z = leaf(functional.linear(x, weight, bias), dtype)
    y = ACTIVATIONS[activation](z)
    if p > 0:
        y = y * ops.keep_mask(make_rng(), SITE, torch.arange(len(x)), y.shape[1], p)
    y.sum().backward()
    return y.detach() / (1 - p), z.grad


@KINDS
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_equals_torch(activation, p, kind):
    cast = make_cast() if kind == E4M3 else None
    y, transpose, slope = run(inputs(kind), activation, p, cast=cast)
    expected, true = composed(inputs(kind), activation, p)
    if cast is not None:
        assert_is_cast(y, transpose, cast, expected, 1e-5)
    else:
        torch.testing.assert_close(y, expected)
        assert transpose.numel() == 0
    if activation == "relu":
        assert slope.numel() == 0
    elif kind == E4M3:
        assert slope.dtype == torch.uint8 and (read_slope(slope) - true).abs().max() < 1 / 399
    else:
        torch.testing.assert_close(slope, true)


def test_the_two_gelus_differ():
    for one, other in zip(run(inputs(), "gelu"), run(inputs(), "gelu_accurate"), strict=True):
        assert one.numel() == 0 or (one - other).abs().max() > 1e-5


@KINDS
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_y_is_the_same_without_slope(activation, kind):
    *results, slope = run(inputs(kind), activation, 0.3, need_slope=False)
    for x, y in zip(results, run(inputs(kind), activation, 0.3), strict=False):
        assert torch.equal(x.float(), y.float())
    assert slope.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("activation", WITH_SLOPE)
def test_16_bits(activation, dtype):
    operands = inputs(dtype, 300, 64, 72)
    plain, exact = (composed(operands, activation, 0.1, kind) for kind in (dtype, F64))
    y, _, slope = run(operands, activation, 0.1)
    for three in zip((y, read_slope(slope).to(dtype)), plain, exact, strict=True):
        assert_as_good_as(*three, activation)


def test_bytes_of_a_slope():
    """Only of bfloat16. 0 and 1 are exact, and nothing is off by more than half a step."""
    slope = torch.linspace(-0.13, 1.13, 10001, dtype=F64)
    stored = store_slope(slope, BF16)
    assert stored.dtype == torch.uint8 and (read_slope(stored) - slope).abs().max() < 1 / 399
    exact = torch.tensor([0.0, 1.0])
    assert torch.equal(read_slope(store_slope(exact, BF16)), exact)
    assert store_slope(torch.tensor([torch.nan]), BF16).item() == 255
    for dtype in (torch.float16, torch.float32, F64):
        assert torch.equal(store_slope(slope, dtype), slope.to(dtype))
        assert read_slope(slope.to(dtype)).dtype == dtype


@KINDS
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_not_a_number_stays_visible(activation, kind):
    """Also where y is dropped. An overflow must reach the gradient norm."""
    for place in range(3):
        operands = list(inputs(kind))
        part = operands[place]
        if isinstance(part, ops.Quantised):
            part.values.view(torch.uint8)[0, 0] = 0x7F
        else:
            part.view(-1)[0] = torch.nan
        y, transpose, slope = run(operands, activation, 0.3)
        exact = composed(operands, activation, 0.0)[0].isnan()
        assert exact.any() and torch.equal(y.isnan(), exact)
        assert kind == F64 or torch.equal(transpose.float()[:, :T].isnan(), exact.t())
        assert activation == "relu" or torch.equal(read_nan(slope), exact)


def read_nan(slope):
    return slope == 255 if slope.dtype == torch.uint8 else slope.isnan()


@pytest.mark.parametrize("activation", WITH_SLOPE)
@pytest.mark.parametrize("dtype", [torch.float32, F64, BF16])
def test_infinities_have_their_limit(activation, dtype):
    z = torch.tensor([torch.inf, -torch.inf, 3e38, -3e38, 200, -200, torch.nan, 0], dtype=dtype)
    y, _, slope = run((z[:, None], torch.ones(1, 1, dtype=dtype), z[-1:]), activation)
    limits = z[:6].clamp_min(0), torch.tensor([1, 0] * 3, dtype=dtype)
    for found, limit in zip((y, read_slope(slope).to(dtype)), limits, strict=True):
        # silu(-128) is 0 in float32 only
        torch.testing.assert_close(found[:6, 0], limit, rtol=0, atol=1e-50)
    assert y[6].isnan()
    assert read_nan(slope)[6]


def test_inputs_are_not_written():
    operands = inputs()
    copies = [t.clone() for t in operands]
    for activation in ACTIVATIONS:
        run(operands, activation, 0.3)
    assert all(torch.equal(t, c) for t, c in zip(operands, copies, strict=True))


@KINDS
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_rows(activation, kind):
    operands = inputs(kind, rows=0)
    y, transpose, slope = run(operands, activation, 0.3)
    assert y.shape == (0, F) and slope.shape == ((0,) if activation == "relu" else (0, F))
    assert transpose.shape == ((F, 0) if kind == E4M3 else (0,))
