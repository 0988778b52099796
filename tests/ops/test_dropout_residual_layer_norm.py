"""Bias, dropout, residual and LayerNorm compared with their composition in torch."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import (
    assert_as_good_as,
    assert_cast_of,
    check_gradients,
    leaf,
    make_cast,
    make_rng,
    poisoned,
)
from torch.nn import functional

from lightseq_fairseq import ops

T, C, SITE, EPS = 5, 11, 6, 1e-5
ALL = ("bias", "residual", "norm")


def inputs(dtype=torch.float64, rows=T, columns=C):
    torch.manual_seed(0)
    shapes = {
        "x": (rows, columns),
        "bias": (columns,),
        "residual": (rows, columns),
        "gamma": (columns,),
        "beta": (columns,),
    }
    return {name: torch.randn(*shape, dtype=dtype) for name, shape in shapes.items()}


def choose(tensors, parts):
    """The op's five tensors, with None for omitted parts."""
    return (
        tensors["x"],
        tensors["bias"] if "bias" in parts else None,
        tensors["residual"] if "residual" in parts else None,
        tensors["gamma"] if "norm" in parts else None,
        tensors["beta"] if "norm" in parts else None,
    )


def dropout(p):
    return ops.Dropout(p, make_rng(), SITE)


def fwd(tensors, parts, p, **cast):
    return ops.dropout_residual_layer_norm_fwd(*choose(tensors, parts), dropout(p), EPS, **cast)


def composed(tensors, parts, p):
    x, bias, residual, gamma, beta = choose(tensors, parts)
    total = x if bias is None else x + bias
    if p > 0:
        keep = ops.keep_mask(make_rng(), SITE, torch.arange(len(x)), x.shape[1], p)
        total = total * keep / (1 - p)
    if residual is not None:
        total = residual + total
    if gamma is None:
        return total, None
    return total, functional.layer_norm(total, gamma.shape, gamma, beta, EPS)


@pytest.mark.parametrize("parts", [ALL, ("norm",), ("bias", "residual"), ("residual", "norm")])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("grads", ["dy", "dsum", "both"])
def test_equals_torch(parts, p, grads):
    tensors = inputs()
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    expected_sum, expected_y = composed(leaves, parts, p)
    total, y, mean, rstd, values, transpose = fwd(tensors, parts, p)
    assert values.numel() == transpose.numel() == 0
    if parts == ("norm",) and p == 0:
        assert total.numel() == 0
        total = tensors["x"]
    torch.testing.assert_close(total, expected_sum.detach())
    if "norm" in parts:
        torch.testing.assert_close(y, expected_y.detach())
        torch.testing.assert_close(mean, total.mean(1))
        torch.testing.assert_close(rstd, (total.var(1, correction=0) + EPS).rsqrt())
    else:
        assert y.numel() == mean.numel() == rstd.numel() == 0

    dy = torch.randn_like(total) if grads != "dsum" and "norm" in parts else None
    dsum = torch.randn_like(total) if grads != "dy" or dy is None else None
    loss = 0.0
    if dy is not None:
        loss = loss + (expected_y * dy).sum()
    if dsum is not None:
        loss = loss + (expected_sum * dsum).sum()
    loss.backward()
    use_norm = dy is not None
    dgamma, dbeta = (poisoned(C), poisoned(C)) if use_norm else (None, None)
    dbias = poisoned(C) if "bias" in parts else None
    gamma = tensors["gamma"] if use_norm else None
    dx, dresidual, transpose = ops.dropout_residual_layer_norm_bwd(
        dy, dsum, total, gamma, mean, rstd, dropout(p), dgamma, dbeta, dbias, False
    )
    assert (dx.numel() == 0) == (p == 0) and transpose.numel() == 0
    torch.testing.assert_close(dx if p > 0 else dresidual, leaves["x"].grad)
    if "residual" in parts:
        torch.testing.assert_close(dresidual, leaves["residual"].grad)
    if "bias" in parts:
        torch.testing.assert_close(dbias, leaves["bias"].grad)
    if use_norm:
        torch.testing.assert_close(dgamma, leaves["gamma"].grad)
        torch.testing.assert_close(dbeta, leaves["beta"].grad)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_gradcheck(p):
    """Both outputs at once, all five inputs."""
    tensors = inputs()

    def backward(douts, saved, outputs):
        dy, dsum = douts[1].contiguous(), douts[0].contiguous()
        parameters = [poisoned(C) for _ in range(3)]
        dx, dresidual, _ = ops.dropout_residual_layer_norm_bwd(
            dy, dsum, outputs[0], saved[3], outputs[2], outputs[3], dropout(p), *parameters, False
        )
        dgamma, dbeta, dbias = parameters
        return (dx if p > 0 else dresidual), dbias, dresidual, dgamma, dbeta

    check_gradients(
        lambda *arguments: ops.dropout_residual_layer_norm_fwd(*arguments, dropout(p), EPS),
        backward,
        choose(tensors, ALL),
        differentiable=2,
    )


def test_accumulate_adds():
    tensors = inputs()
    total, _, mean, rstd, *_ = fwd(tensors, ALL, 0.3)
    dy = torch.randn_like(total)

    def backward(gradients, accumulate):
        ops.dropout_residual_layer_norm_bwd(
            dy, None, total, tensors["gamma"], mean, rstd, dropout(0.3), *gradients, accumulate
        )
        return gradients

    fresh = backward([poisoned(C) for _ in range(3)], False)
    before = [torch.randn(C, dtype=torch.float64) for _ in range(3)]
    after = backward([t.clone() for t in before], True)
    for new, old, gradient in zip(after, before, fresh, strict=True):
        torch.testing.assert_close(new, old + gradient)


def test_large_mean():
    """The mean is subtracted first, so a mean of 1000 costs no precision of the variance."""
    tensors = inputs(torch.float32, 16, 512)
    tensors["x"] += 1000.0
    y = fwd(tensors, ("norm",), 0.0)[1]
    exact = composed({name: x.double() for name, x in tensors.items()}, ("norm",), 0.0)[1]
    # Half a unit in the last place of 1000: the input itself is no more precise.
    assert (y.double() - exact).abs().max() < 1000 * 2.0**-24 * 10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_16_bit(dtype, p):
    tensors = inputs(dtype, 200, 128)
    dy, dsum = torch.randn(2, 200, 128).to(dtype)
    results = []
    for kind in (dtype, torch.float64):
        leaves = {name: leaf(x, kind) for name, x in tensors.items()}
        total, y = composed(leaves, ALL, p)
        torch.autograd.backward((y, total), (dy.to(kind), dsum.to(kind)))
        names = ("x", "bias", "residual", "gamma", "beta")
        results.append([total.detach(), y.detach(), *(leaves[name].grad for name in names)])
    total, y, mean, rstd, *_ = fwd(tensors, ALL, p)
    assert mean.dtype == rstd.dtype == torch.float32
    dgamma, dbeta, dbias = (poisoned(128, dtype=dtype) for _ in range(3))
    dx, dresidual, _ = ops.dropout_residual_layer_norm_bwd(
        dy, dsum, total, tensors["gamma"], mean, rstd, dropout(p), dgamma, dbeta, dbias, False
    )
    ours = (total, y, dx if p > 0 else dresidual, dbias, dresidual, dgamma, dbeta)
    for name, mine, plain, exact in zip(
        ("sum", "y", "dx", "dbias", "dresidual", "dgamma", "dbeta"), ours, *results, strict=True
    ):
        assert_as_good_as(mine, plain, exact, name)


def test_empty_batch():
    tensors = inputs(rows=0)
    total, y, mean, rstd, *_ = fwd(tensors, ALL, 0.1)
    assert total.shape == y.shape == (0, C) and mean.shape == rstd.shape == (0,)
    gradients = [poisoned(C) for _ in range(3)]
    ops.dropout_residual_layer_norm_bwd(
        y, None, total, tensors["gamma"], mean, rstd, dropout(0.1), *gradients, False
    )
    assert all(g.eq(0).all() for g in gradients)


def widened(*tensors):
    return [None if x is None else x.float() for x in tensors]


@pytest.mark.parametrize("keep_y", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("parts", [ALL, ("norm",)])
def test_casts_the_float32_result(parts, p, keep_y):
    """Not y, which is rounded to bfloat16; the other results are those without a cast."""
    tensors, cast = inputs(torch.bfloat16, 21, 48), make_cast()
    *ours, values, transpose = fwd(tensors, parts, p, keep_y=keep_y, cast=cast)
    plain = list(fwd(tensors, parts, p)[:4])
    if not keep_y:
        plain[1] = torch.empty(0)
    assert all(map(torch.equal, ours, plain))
    y = fwd({name: x.float() for name, x in tensors.items()}, parts, p)[1]
    assert y.bfloat16().ne(y).any()
    assert_cast_of(y, (values, transpose), cast)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("which", ["dy", "dsum", "both"])
def test_backward_casts_the_float32_gradient(which, p):
    tensors, cast = inputs(torch.bfloat16, 21, 48), make_cast()
    total, _, mean, rstd, *_ = fwd(tensors, ALL, p)
    dy, dsum = torch.randn(2, 21, 48).bfloat16()
    given = (None if which == "dsum" else dy, None if which == "dy" else dsum, total)
    given, rest = (*given, tensors["gamma"]), (mean, rstd, dropout(p))
    sums, exact = ([poisoned(48, dtype=torch.float32) for _ in range(3)] for _ in range(2))
    bwd = ops.dropout_residual_layer_norm_bwd
    values, dresidual, transpose = bwd(*given, *rest, *sums, accumulate=False, cast=cast)
    assert torch.equal(dresidual, bwd(*given, *rest, *exact, accumulate=False)[1])
    # Without dy, LayerNorm has no gradients, so dgamma and dbeta are not written.
    assert all(map(torch.equal, map(torch.nan_to_num, sums), map(torch.nan_to_num, exact)))
    dx = bwd(*widened(*given), *rest, None, None, None, accumulate=False)
    assert_cast_of(dx[0] if p > 0 else dx[1], (values, transpose), cast)


@pytest.mark.parametrize("is_cast", [False, True])
def test_without_beta_it_is_zero(is_cast):
    tensors = inputs(torch.bfloat16, T, 48)
    x, bias, residual, gamma, _ = choose(tensors, ALL)
    results = []
    for beta in (None, torch.zeros_like(gamma)):
        cast = (True, make_cast()) if is_cast else ()
        given = x, bias, residual, gamma, beta, dropout(0.3), EPS
        results.append(ops.dropout_residual_layer_norm_fwd(*given, *cast))
    for mine, other in zip(*results, strict=True):
        assert torch.equal(*(y.view(torch.uint8) for y in (mine, other)))


def test_cast_refusals():
    name, none = "dropout_residual_layer_norm", (None, None, None, False)
    tensors = inputs(torch.bfloat16, T, 40)
    with pytest.raises(ValueError, match=f"{name}_fwd: a cast needs gamma"):
        fwd(tensors, ("bias",), 0.3, cast=make_cast())
    with pytest.raises(ValueError, match=f"{name}_fwd: fp8 needs rows of a multiple of 16 numbers"):
        fwd(tensors, ALL, 0.3, cast=make_cast())
    total, y, mean, rstd, *_ = fwd(tensors, ALL, 0.3)
    rest = mean, rstd, dropout(0.3), *none, make_cast()
    with pytest.raises(ValueError, match=f"{name}_bwd: fp8 needs rows of a multiple of 16 numbers"):
        ops.dropout_residual_layer_norm_bwd(y, None, total, tensors["gamma"], *rest)
