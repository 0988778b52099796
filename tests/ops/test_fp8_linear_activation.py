"""A product in fp8 with activation and dropout, and its backward, compared with the composition."""

from __future__ import annotations

import pytest
import torch
from helpers.fp8_operands import OfCast, Operand, assert_is_cast
from helpers.ops_testing import check_op, make_rng, poisoned
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.ops.linear_activation import read_slope

T, C, F, N, SITE, SCALE = 21, 32, 48, 16, 2, 2.0**-6
ACTIVATIONS = ["relu", "gelu", "gelu_accurate"]


def operands() -> tuple[Operand, Operand, Tensor]:
    """x, weight and bias."""
    torch.manual_seed(0)
    weight = Operand(2 * torch.randn(F, C) * C**-0.5, 2.0**-8)
    return Operand(torch.randn(T, C), 2.0**-6), weight, torch.randn(F).bfloat16()


def backward_operands() -> tuple[Operand, Operand]:
    """dy and the weight of the next product."""
    torch.manual_seed(1)
    return Operand(torch.randn(T, N), 2.0**-6), Operand(torch.randn(N, F) * N**-0.5, 2.0**-8)


def forward(activation, p=0.0, need_slope=True, given=None, scale=SCALE):
    x, weight, bias = operands() if given is None else given
    of_cast = OfCast(scale)
    results = ops.fp8_linear_activation_fwd(
        *(x.values, x.scale, weight.values, weight.scale, bias),
        *(activation, p, make_rng(), SITE, need_slope, *of_cast),
    )
    return *results, of_cast


def backward(y_transpose, slope, p=0.0, dbias=None, accumulate=False, dy=None):
    made, weight = backward_operands()
    dy, of_cast = made if dy is None else dy, OfCast(SCALE)
    results = ops.fp8_activation_linear_bwd(
        *(dy.values, dy.scale, weight.transpose, weight.scale, y_transpose, slope, p),
        *(dbias, accumulate, *of_cast),
    )
    return *results, of_cast


def z_of(given=None) -> Tensor:
    x, weight, bias = operands() if given is None else given
    return x.numbers @ weight.numbers.t() + bias


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_equals_the_composition(activation, p):
    z = z_of()
    dropout = (activation, ops.Dropout(p, make_rng(), SITE))
    exact = ops.bias_activation_dropout_fwd(z, None, *dropout)
    values, transpose, slope, of_cast = forward(activation, p)
    assert_is_cast(values, transpose, of_cast, exact, 1e-5)

    dy, weight = backward_operands()
    dx = dy.numbers @ weight.numbers
    dbias = poisoned(F, dtype=torch.float32)
    slope = None if activation == "relu" else slope
    results = backward(transpose, slope, p, dbias)
    if slope is None:
        exact = ops.bias_activation_dropout_bwd(dx, z, None, *dropout, None, False)
        exact = exact.where(values.float() != 0, 0)  # numbers that are zero in E4M3
    else:
        exact = dx * read_slope(slope) / (1 - p)
        kept = ops.dropout_mask(make_rng(), SITE, T, F, p) if p else torch.ones(T, F) > 0
        ones = torch.ones_like(z)
        true = ops.bias_activation_dropout_bwd(
            ones, z, None, activation, ops.Dropout(0.0, make_rng(), SITE), None, False
        )
        assert (read_slope(slope) - true.where(kept, 0)).abs().max() < 1 / 399
    assert_is_cast(*results, exact, 1e-5)
    torch.testing.assert_close(dbias, exact.sum(0).float(), rtol=1e-4, atol=1e-4)


def test_y_is_the_same_without_slope():
    with_slope, without = forward("gelu", 0.3), forward("gelu", 0.3, need_slope=False)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(with_slope[:2], without[:2]))
    assert without[2].numel() == forward("relu")[2].numel() == 0


def test_relu_passes_no_gradient_where_the_result_is_zero_in_fp8():
    _, transpose, _, _ = forward("relu", scale=2.0**6)  # many numbers become zero
    y = transpose[:, :T].t().float()
    assert ((y == 0) & (z_of() > 0)).any() and (y > 0).any()
    values, *_ = backward(transpose, None)
    dy, weight = backward_operands()
    assert torch.equal(values.float() != 0, (y > 0) & (dy.numbers @ weight.numbers != 0))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_not_a_number_stays_visible(activation):
    """An overflow must reach the gradient norm, so that the update is skipped."""
    x, weight, bias = operands()
    bias[1] = torch.nan
    values, transpose, slope, _ = forward(activation, 0.3, given=(x, weight, bias))
    assert values.float()[:, 1].isnan().all() and transpose.float()[1, :T].isnan().all()
    dy, _ = backward_operands()
    dy.values.view(torch.uint8)[2] = 0x7F
    slope = None if activation == "relu" else slope
    dbias = poisoned(F, dtype=torch.float32)
    values, *_ = backward(transpose, slope, 0.3, dbias, dy=dy)
    assert values.float()[2, 1].isnan() and dbias[1].isnan()


def test_accumulate_adds():
    _, transpose, *_ = forward("relu")
    before, fresh = torch.randn(F), poisoned(F, dtype=torch.float32)
    backward(transpose, None, dbias=fresh)
    after = before.clone()
    backward(transpose, None, dbias=after, accumulate=True)
    torch.testing.assert_close(after, before + fresh)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_opcheck(activation):
    x, weight, bias = operands()
    given = (x.values, x.scale, weight.values, weight.scale, bias, activation, 0.3, make_rng())
    _, transpose, slope, _ = forward(activation, 0.3)
    for need_slope in (True, False):
        check_op("fp8_linear_activation_fwd", *given, SITE, need_slope, *OfCast(SCALE))
    dy, other = backward_operands()
    given = dy.values, dy.scale, other.transpose, other.scale, transpose
    slope = None if activation == "relu" else slope
    for dbias in (None, bias.clone()):
        of_cast = OfCast(SCALE)
        check_op("fp8_activation_linear_bwd", *given, slope, 0.3, dbias, True, *of_cast)


def test_refusals():
    x, weight, bias = operands()
    given = [x.values, x.scale, weight.values, weight.scale]
    more = (0.1, make_rng(), SITE, True, *OfCast(SCALE))
    name = "fp8_linear_activation_fwd"
    with pytest.raises(ValueError, match=rf"{name}: activation must be one of .*, got 'swish'"):
        ops.fp8_linear_activation_fwd(*given, bias, "swish", *more)
    with pytest.raises(ValueError, match=rf"{name}: bias must have shape \[48\]"):
        ops.fp8_linear_activation_fwd(*given, bias[:3], "gelu", *more)
    with pytest.raises(ValueError, match=rf"{name}: x must be float8_e4m3fn, got float32"):
        ops.fp8_linear_activation_fwd(x.values.float(), *given[1:], bias, "gelu", *more)
    with pytest.raises(ValueError, match=f"{name}: scale must be a power of two"):
        ops.fp8_linear_activation_fwd(
            *given, bias, "gelu", *more[:-3], torch.tensor(3.0), *more[-2:]
        )
    with pytest.raises(ValueError, match=f"{name}: p must be at least 0 and below 1"):
        ops.fp8_linear_activation_fwd(*given, bias, "gelu", 1.0, *more[1:])
    _, y, slope, _ = forward("gelu")
    with pytest.raises(ValueError, match=r"y_transpose must have shape \[48, 32\], got \[48, 16\]"):
        backward(y[:, :16], None)
    with pytest.raises(ValueError, match="fp8_activation_linear_bwd: slope must be uint8"):
        backward(y, slope.float())
    with pytest.raises(ValueError, match=r"slope must have shape \[21, 48\], got \[20, 48\]"):
        backward(y, slope[1:])
    with pytest.raises(ValueError, match=r"fp8_activation_linear_bwd: p must be in \[0, 1\)"):
        backward(y, slope, 1.0)
    with pytest.raises(ValueError, match=r"dbias must have shape \[48\], got \[21, 48\]"):
        backward(y, slope, dbias=torch.zeros(T, F))


def test_no_rows():
    x, weight, bias = operands()
    x.values = x.values[:0]
    values, transpose, slope, _ = forward("gelu", given=(x, weight, bias))
    assert values.shape == slope.shape == (0, F) and transpose.shape == (F, 0)
