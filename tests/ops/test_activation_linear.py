"""The backward pass of an activation and the GEMM after it, compared with autograd; also in fp8."""

from __future__ import annotations

import pytest
import torch
from helpers.fp8_operands import assert_is_cast, numbers, quantised, with_nan
from helpers.ops_testing import assert_as_good_as, leaf, make_cast, make_rng, poisoned
from torch.nn import functional

from lightseq_fairseq import ops
from lightseq_fairseq.ops import Dropout, Quantised
from lightseq_fairseq.ops.casting import E4M3
from lightseq_fairseq.ops.linear_activation import read_slope, store_slope

T, K, N = 21, 48, 32
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
KINDS = pytest.mark.parametrize("kind", [F64, E4M3], ids=["float64", "fp8"])
GRAD_DTYPES = {F64: [F64, F32], E4M3: [BF16, F32]}
ACTIVATIONS = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_accurate": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}


def inputs(kind=F64, t=T, k=K, n=N):
    """z, weight, dy; z is float64."""
    torch.manual_seed(0)
    z, weight, dy = (torch.randn(*shape, dtype=F64) for shape in ((t, k), (n, k), (t, n)))
    if kind == E4M3:
        return z, quantised(weight.float() * n**-0.5, 2.0**-8), quantised(dy.float(), 2.0**-6)
    return z, weight, dy


def in_kind(x, kind):
    return quantised(x.float(), 2.0**-6) if kind == E4M3 else x


def gradients(kind):
    """Memory for dweight and dbias."""
    dtype = F32 if kind == E4M3 else F64
    return poisoned(N, K, dtype=dtype), poisoned(K, dtype=dtype)


def run(dy, x, weight, slope=None, p=0.0, dweight=None, dbias=None, accumulate=False, **named):
    """dz and transpose; in fp8 with a cast."""
    if isinstance(x, Quantised):
        named = {"cast": make_cast()} | named
    return ops.activation_linear_bwd(dy, x, weight, slope, p, dweight, dbias, accumulate, **named)


def formula(z, weight, dy, factors=1.0, activation=functional.relu):
    z, weight = leaf(z, z.dtype), leaf(weight, weight.dtype)
    ((activation(z) * factors) @ weight.t()).backward(dy)
    return z.grad, weight.grad, z.grad.sum(0)


def check(kind, x, weight, dy, slope, p, dz):
    """The results, if dz is exact."""
    cast = {"cast": make_cast()} if kind == E4M3 else {}
    dweight, dbias = gradients(kind)
    ours, transpose = run(dy, x, weight, slope, p, dweight, dbias, **cast)
    if cast:
        assert_is_cast(ours, transpose, cast["cast"], dz, 1e-5)
    else:
        torch.testing.assert_close(ours, dz)
        assert transpose.numel() == 0
    near = {"rtol": 1e-4, "atol": 1e-4} if cast else {}
    expected = numbers(dy).t() @ numbers(x)
    torch.testing.assert_close(dweight, expected.to(dweight.dtype), **near)
    torch.testing.assert_close(dbias, dz.sum(0).to(dbias.dtype), **near)


@KINDS
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_relu(p, kind):
    """Dropped elements are zero, so no mask is needed."""
    z, weight, dy = inputs(kind)
    factors = (torch.rand(T, K) >= p).double() / (1 - p)
    dz, *_ = formula(z, numbers(weight), numbers(dy), factors)
    check(kind, in_kind(z.relu() * factors, kind), weight, dy, None, p, dz)
    assert torch.equal(dz.eq(0), z.le(0) | factors.eq(0))


@KINDS
def test_slope(kind):
    """The slope is 0 where dropout drops, and does not include its factor."""
    z, weight, dy = inputs(kind)
    keep = (torch.rand(T, K) > 0.3).double()
    at = leaf(z, F64)
    functional.gelu(at).sum().backward()
    x = in_kind(functional.gelu(z) * keep / 0.7, kind)
    slope = store_slope(at.grad * keep, BF16 if kind == E4M3 else F64)
    dz, *_ = formula(z, numbers(weight), numbers(dy), keep / 0.7, functional.gelu)
    if kind == E4M3:
        dz = numbers(dy) @ numbers(weight) * read_slope(slope) / 0.7
    check(kind, x, weight, dy, slope, 0.3, dz)


def test_relu_passes_no_gradient_where_the_result_is_zero_in_fp8():
    z, weight, dy = inputs(E4M3)
    x = quantised(z.relu().float(), 2.0**6)  # many numbers become zero
    is_zero = numbers(x) == 0
    assert (is_zero & (z > 0)).any() and not is_zero.all()
    dz, _ = run(dy, x, weight)
    dx = numbers(dy) @ numbers(weight)
    assert torch.equal(dz.float() != 0, ~is_zero & (dx.abs() > 2.0**-16))


@KINDS
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_feed_forward_sublayer(activation, p, kind):
    """Both products and their gradients are autograd's; in fp8 they are near them."""
    torch.manual_seed(0)
    rows, width, ffn = 80, 64, 128
    shapes = (rows, width), (rows, width), (ffn, width), (ffn,), (width, ffn)
    x, dy, w1, b1, w2 = (torch.randn(*shape).to(BF16).double() for shape in shapes)
    w1, w2 = w1 / 8, w2 / 8
    leaves = [leaf(t, F64) for t in (x, w1, b1, w2)]
    dropout = Dropout(p, make_rng(), 1)
    h = ACTIVATIONS[activation](functional.linear(*leaves[:3]))
    h = h * ops.keep_mask(dropout.rng, 1, torch.arange(rows), ffn, p) / (1 - p)
    y = functional.linear(h, leaves[3])
    y.backward(dy)
    exact = [y.detach(), *(t.grad for t in leaves)]

    dtype, cast, of_dz = F64, None, None
    if kind == E4M3:
        dtype, cast, of_dz = BF16, make_cast(2.0**-4), make_cast(2.0**-4)
        x, dy = (quantised(t.float(), 2.0**-5) for t in (x, dy))
        w1, w2 = (quantised(t.float(), 2.0**-8) for t in (w1, w2))
    dw1, db1, dw2 = (poisoned(*shape, dtype=dtype) for shape in shapes[2:])
    h, transpose, slope = ops.linear_activation_fwd(
        x, w1, b1.to(dtype), activation, dropout, True, cast
    )
    h = h if cast is None else Quantised(h, transpose, cast.scale)
    y = ops.linear_fwd(h, w2, None)
    slope = None if activation == "relu" else slope
    dz, transpose = ops.activation_linear_bwd(
        dy, h, w2, slope, p, dw2, db1, accumulate=False, cast=of_dz
    )
    dz = dz if of_dz is None else Quantised(dz, transpose, of_dz.scale)
    dx = ops.linear_bwd(dz, x, w1, dw1, None, None, False, True)
    for ours, theirs in zip((y, dx, dw1, db1, dw2), exact, strict=True):
        if kind == F64:
            torch.testing.assert_close(ours, theirs)
            continue
        error = (ours.double() - theirs).norm() / theirs.norm()
        # ReLU's derivative jumps: near 0 an error of its input changes all of a gradient.
        assert 0.001 < error < (0.2 if activation == "relu" else 0.07)


@KINDS
@pytest.mark.parametrize("place", [0, 1])
def test_accumulate_adds(place, kind):
    """Also into a buffer of another dtype than the GEMM's."""
    z, weight, dy = inputs(kind)
    grad_dtype, x, fresh = GRAD_DTYPES[kind][place], in_kind(z.relu(), kind), gradients(kind)
    run(dy, x, weight, None, 0.0, *fresh)
    before = [torch.randn(t.shape).to(grad_dtype) for t in fresh]
    after = [t.clone() for t in before]
    run(dy, x, weight, None, 0.0, *after, True)
    for new, old, gradient in zip(after, before, fresh, strict=True):
        torch.testing.assert_close(new, (old + gradient).to(grad_dtype))


@KINDS
def test_nan_stays(kind):
    """An overflow must reach the gradient norm, so that the update is skipped."""
    z, weight, dy = inputs(kind)
    x = in_kind(z.relu(), kind)
    dz, _ = run(dy, with_nan(x, 0, 0), weight)
    dz = Quantised(dz, None, 2.0**-6) if kind == E4M3 else dz
    expected = numbers(in_kind(numbers(dy) @ numbers(weight), kind))
    torch.testing.assert_close(numbers(dz)[0, 0], expected[0, 0])
    _, dbias = gradients(kind)
    dz, _ = run(with_nan(dy, 1, 3), x, weight, dbias=dbias)
    assert torch.equal(dz.isnan()[1], z[1] > 0) and int(dz.isnan().sum()) == int((z[1] > 0).sum())
    assert torch.equal(dbias.isnan(), z[1] > 0)


def test_nan_of_a_slope_stays():
    z, weight, dy = inputs()
    dbias, slope = poisoned(K), torch.ones_like(z)
    slope[2, 3] = torch.nan
    dz, _ = run(dy, z, weight, slope, dbias=dbias)
    assert torch.equal(dz.isnan(), slope.isnan()) and dbias[3].isnan()


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("with_slope", [False, True])
def test_16_bits(with_slope, dtype):
    z, weight, dy = (t.to(dtype) for t in inputs(t=300, k=64, n=40))
    dweight, dbias = torch.empty_like(weight), torch.empty_like(z[0])
    activation = functional.gelu if with_slope else functional.relu
    slope, at = None, leaf(z, dtype)
    y = activation(at)
    if with_slope:
        y.sum().backward()
        slope = store_slope(at.grad, dtype)
    dz, _ = run(dy, y.detach(), weight, slope, 0.0, dweight, dbias)
    plain, exact = (
        formula(*(t.to(kind) for t in (z, weight, dy)), activation=activation)
        for kind in (dtype, F64)
    )
    for ours, theirs, truth in zip((dz, dweight, dbias), plain, exact, strict=True):
        assert ours.dtype == dtype
        assert_as_good_as(ours, theirs, truth)


def test_a_cast_of_a_product_in_float64_is_refused():
    z, weight, dy = inputs()
    with pytest.raises(ValueError, match="_bwd: the result is cast exactly if operands are"):
        run(dy, z.relu(), weight, cast=make_cast())


@KINDS
def test_no_rows(kind):
    z, weight, dy = inputs(kind, t=0)
    dweight, dbias = gradients(kind)
    dz, transpose = run(dy, in_kind(z, kind), weight, None, 0.0, dweight, dbias)
    assert dz.shape == (0, K) and not dweight.any() and not dbias.any()
    assert transpose.shape == ((K, 0) if kind == E4M3 else (0,))


@KINDS
def test_a_nan_in_the_bias_shows_in_its_gradient(kind):
    """On a GPU the GEMM's ReLU makes NaN zero, and x does not show it either; but not in fp8."""
    z, weight, dy = inputs(kind)
    bias, (_, dbias) = torch.zeros(K), gradients(kind)
    bias[3] = torch.nan
    dz, _ = run(dy, in_kind(z.relu(), kind), weight, dbias=dbias, bias=bias)
    assert not dz.isnan().any()
    assert dbias.isnan().tolist() == (bias.isnan() if kind == F64 else torch.zeros(K) > 0).tolist()
