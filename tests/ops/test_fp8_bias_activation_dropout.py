"""Bias, activation and dropout with fp8 results: the float32 composition, cast once."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import check_op, make_rng, poisoned
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.ops.bias_activation_dropout import ACTIVATIONS

T, F, SITE, SCALE = 21, 48, 2, 2.0**-5


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """x, bias and dy."""
    torch.manual_seed(0)
    return tuple(2 * torch.randn(*s).to(dtype) for s in ((T, F), (F,), (T, F)))


def of_cast() -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(SCALE), torch.tensor(0.5), torch.tensor(3)


def assert_is_cast_of(ours: tuple[Tensor, Tensor], scalars: tuple[Tensor, ...], x: Tensor) -> None:
    """Bit for bit, with amax and saturation count."""
    expected = of_cast()
    results = ops.fp8_quantise(x, *expected)
    for mine, other in zip((*ours, *scalars), (*results, *expected), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("with_bias", [True, False])
def test_is_the_cast_of_the_float32_op(activation, p, with_bias):
    """Not of its 16-bit result, which is rounded."""
    x, bias, dy = inputs()
    wide = bias.float() if with_bias else None
    bias = bias if with_bias else None
    dropout, scalars = (activation, p, make_rng(), SITE), of_cast()
    ours = ops.fp8_bias_activation_dropout_fwd(x, bias, *dropout, *scalars)
    plain = ops.bias_activation_dropout_fwd(x.float(), wide, *dropout)
    assert_is_cast_of(ours, scalars, plain)

    dbias, scalars = poisoned(F, dtype=torch.bfloat16), of_cast()
    expected = poisoned(F, dtype=torch.float32)
    dx = ops.bias_activation_dropout_bwd(dy.float(), x.float(), wide, *dropout, expected, False)
    ours = ops.fp8_bias_activation_dropout_bwd(dy, x, bias, *dropout, dbias, False, *scalars)
    assert_is_cast_of(ours, scalars, dx)
    assert torch.equal(dbias, expected.bfloat16())


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_relu_and_dropout_backwards_from_the_result(p):
    x, bias, dy = inputs()
    dropout = ("relu", p, make_rng(), SITE)
    _, y_transpose = ops.fp8_bias_activation_dropout_fwd(x, bias, *dropout, *of_cast())
    dbias, scalars = poisoned(F, dtype=torch.float32), of_cast()
    ours = ops.fp8_relu_dropout_bwd(dy, y_transpose, p, dbias, False, *scalars)

    expected = poisoned(F, dtype=torch.float32)
    dz = ops.bias_activation_dropout_bwd(
        dy.float(), x.float(), bias.float(), *dropout, expected, False
    )
    y = y_transpose[:, :T].t().float()
    assert (y > 0).any() and torch.equal(y > 0, (dz != 0) & (dy != 0))
    assert_is_cast_of(ours, scalars, dz)
    assert torch.equal(dbias, expected)


def test_relu_passes_no_gradient_where_the_result_is_zero_in_fp8():
    x = torch.tensor([2.0**-10, 2.0**-10 + 2.0**-20, 1.0, -1.0] * 4)[None] * SCALE
    none = ("relu", 0.0, make_rng(), SITE)
    _, y_transpose = ops.fp8_bias_activation_dropout_fwd(x, None, *none, *of_cast())
    dz, _ = ops.fp8_relu_dropout_bwd(
        torch.full_like(x, SCALE), y_transpose, 0.0, None, False, *of_cast()
    )
    assert dz.float()[0, :4].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_not_a_number_stays_visible(activation):
    """An overflow must reach the gradient norm, so that the update is skipped."""
    x, bias, dy = inputs()
    x[1, 1] = torch.nan
    values, y_transpose = ops.fp8_bias_activation_dropout_fwd(
        x, bias, activation, 0.0, make_rng(), SITE, *of_cast()
    )
    assert values.float()[1, 1].isnan() and y_transpose.float()[1, 1].isnan()
    dy[1, 1] = torch.nan
    dz, transpose = ops.fp8_relu_dropout_bwd(dy, y_transpose, 0.0, None, False, *of_cast())
    assert dz.float()[1, 1].isnan() and transpose.float()[1, 1].isnan()


def test_accumulate_adds():
    x, bias, dy = inputs(torch.float32)
    dropout = ("gelu", 0.3, make_rng(), SITE)
    _, y_transpose = ops.fp8_bias_activation_dropout_fwd(x, bias, *dropout, *of_cast())
    for backward in (
        lambda *to: ops.fp8_bias_activation_dropout_bwd(dy, x, bias, *dropout, *to, *of_cast()),
        lambda *to: ops.fp8_relu_dropout_bwd(dy, y_transpose, 0.3, *to, *of_cast()),
    ):
        before, fresh = torch.randn(F), poisoned(F, dtype=torch.float32)
        backward(fresh, False)
        after = before.clone()
        backward(after, True)
        torch.testing.assert_close(after, before + fresh)


def test_inputs_are_not_written():
    x, bias, dy = inputs(torch.float32)
    copies = [t.clone() for t in (x, bias, dy)]
    for activation in ACTIVATIONS:
        dropout = (activation, 0.3, make_rng(), SITE)
        _, y = ops.fp8_bias_activation_dropout_fwd(x, None, *dropout, *of_cast())
        ops.fp8_bias_activation_dropout_bwd(dy, x, bias, *dropout, None, False, *of_cast())
        ops.fp8_relu_dropout_bwd(dy, y, 0.0, None, False, *of_cast())
    assert all(torch.equal(t, c) for t, c in zip((x, bias, dy), copies, strict=True))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_opcheck(activation):
    (x, bias, dy), dropout = inputs(), (activation, 0.3, make_rng(), SITE)
    _, y = ops.fp8_bias_activation_dropout_fwd(x, bias, *dropout, *of_cast())
    check_op("fp8_bias_activation_dropout_fwd", x, bias, *dropout, *of_cast())
    check_op("fp8_bias_activation_dropout_fwd", x, None, *dropout, *of_cast())
    for dbias in (None, bias.clone()):
        given = (dy, x, bias, *dropout, dbias, True, *of_cast())
        check_op("fp8_bias_activation_dropout_bwd", *given)
        check_op("fp8_relu_dropout_bwd", dy, y, 0.3, dbias, True, *of_cast())


def test_refusals():
    (x, bias, dy), dropout = inputs(), ("relu", 0.1, make_rng(), SITE)
    name = "fp8_bias_activation_dropout_fwd"
    with pytest.raises(ValueError, match=rf"{name}: activation must be one of .*, got 'swish'"):
        ops.fp8_bias_activation_dropout_fwd(x, bias, "swish", *dropout[1:], *of_cast())
    with pytest.raises(ValueError, match=rf"{name}: bias must have shape \[48\]"):
        ops.fp8_bias_activation_dropout_fwd(x, bias[:3], *dropout, *of_cast())
    with pytest.raises(ValueError, match=rf"{name}: fp8 needs rows of a multiple of 16 numbers"):
        ops.fp8_bias_activation_dropout_fwd(x[:, :40], bias[:40], *dropout, *of_cast())
    with pytest.raises(ValueError, match=f"{name}: x must be float16 or .*, got float64"):
        ops.fp8_bias_activation_dropout_fwd(x.double(), bias, *dropout, *of_cast())
    with pytest.raises(ValueError, match=f"{name}: scale must be a power of two"):
        ops.fp8_bias_activation_dropout_fwd(x, bias, *dropout, torch.tensor(3.0), *of_cast()[1:])
    with pytest.raises(ValueError, match=r"dropout_bwd: dy must have shape \[21, 48\]"):
        ops.fp8_bias_activation_dropout_bwd(dy[:5], x, bias, *dropout, None, False, *of_cast())
    _, y = ops.fp8_bias_activation_dropout_fwd(x, bias, *dropout, *of_cast())
    with pytest.raises(ValueError, match=r"y_transpose must have shape \[48, 32\], got \[48, 16\]"):
        ops.fp8_relu_dropout_bwd(dy, y[:, :16], 0.1, None, False, *of_cast())
    with pytest.raises(ValueError, match="fp8_relu_dropout_bwd: p must be at least 0 and below 1"):
        ops.fp8_relu_dropout_bwd(dy, y, 1.0, None, False, *of_cast())
    with pytest.raises(ValueError, match=r"dbias must have shape \[48\], got \[21, 48\]"):
        ops.fp8_relu_dropout_bwd(dy, y, 0.1, x, False, *of_cast())
