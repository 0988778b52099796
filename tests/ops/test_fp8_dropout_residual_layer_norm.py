"""The end of a sublayer with fp8 results: the op in bfloat16, and the cast of that in float32."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import check_op, make_rng, poisoned
from torch import Tensor

from lightseq_fairseq import ops

T, C, SITE, SCALE, EPS = 21, 48, 2, 2.0**-5, 1e-5


def rows(*names: str) -> list[Tensor]:
    torch.manual_seed(len(names))
    return [torch.randn(T, C).bfloat16() for _ in names]


def vectors() -> tuple[Tensor, Tensor, Tensor]:
    """bias, gamma and beta."""
    torch.manual_seed(9)
    bias, gamma, beta = (torch.randn(C).bfloat16() for _ in range(3))
    return bias, gamma, beta


def of_cast() -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(SCALE), torch.tensor(0.5), torch.tensor(3)


def wide(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.float() for x in tensors]


def assert_is_cast_of(ours: tuple[Tensor, ...], scalars: tuple[Tensor, ...], x: Tensor) -> None:
    """Bit for bit, with amax and saturation count. ours: values and transpose."""
    expected = of_cast()
    results = ops.fp8_quantise(x, *expected)
    for mine, other in zip((*ours, *scalars), (*results, *expected), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("keep_y", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("is_whole", [True, False])
def test_forward_casts_the_float32_result(p: float, is_whole: bool, keep_y: bool) -> None:
    """Not y, which is rounded to bfloat16; the other results do not change."""
    (x, residual), (bias, gamma, beta) = rows("x", "residual"), vectors()
    given = (x, bias, residual) if is_whole else (x, None, None)
    dropout, scalars = (p, make_rng(), SITE, EPS), of_cast()
    *ours, values, transpose = ops.fp8_dropout_residual_layer_norm_fwd(
        *given, gamma, beta, p=p, rng=make_rng(), site=SITE, eps=EPS,
        keep_y=keep_y, scale=scalars[0], amax=scalars[1], saturated=scalars[2],
    )  # fmt: skip
    plain = list(ops.dropout_residual_layer_norm_fwd(*given, gamma, beta, *dropout))
    if not keep_y:
        plain[1] = torch.empty(0)
    assert all(map(torch.equal, ours, plain))
    y = ops.dropout_residual_layer_norm_fwd(*wide(*given, gamma, beta), *dropout)[1]
    assert y.bfloat16().ne(y).any()
    assert_is_cast_of((values, transpose), scalars, y)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("which", ["dy", "dsum", "both"])
def test_backward_casts_the_float32_gradient(which: str, p: float) -> None:
    (dy, dsum, total), (_, gamma, _) = rows("dy", "dsum", "total"), vectors()
    given = None if which == "dsum" else dy, None if which == "dy" else dsum
    mean = total.float().mean(1)
    rstd = (total.float().var(1, correction=0) + EPS).rsqrt()
    sums = [poisoned(C, dtype=torch.float32) for _ in range(3)]
    exact = [poisoned(C, dtype=torch.float32) for _ in range(3)]
    scalars = of_cast()
    values, transpose, dresidual = ops.fp8_dropout_residual_layer_norm_bwd(
        *given, total, gamma, mean, rstd, p, make_rng(), SITE, *sums, False, *scalars
    )
    arguments = (mean, rstd, p, make_rng(), SITE)
    plain = ops.dropout_residual_layer_norm_bwd(*given, total, gamma, *arguments, *exact, False)
    assert torch.equal(dresidual, plain[1])
    # Without dy, LayerNorm has no gradients, so dgamma and dbeta are not written.
    assert all(map(torch.equal, map(torch.nan_to_num, sums), map(torch.nan_to_num, exact)))
    dx = ops.dropout_residual_layer_norm_bwd(
        *wide(*given, total, gamma), *arguments, None, None, None, False
    )
    assert_is_cast_of((values, transpose), scalars, dx[0] if p > 0 else dx[1])


def test_opcheck() -> None:
    (x, residual, dy), (bias, gamma, beta) = rows("x", "residual", "dy"), vectors()
    dropout = 0.3, make_rng(), SITE
    fwd = (x, bias, residual, gamma, beta, *dropout, EPS, True, *of_cast())
    check_op("fp8_dropout_residual_layer_norm_fwd", *fwd)
    total, _, mean, rstd = ops.dropout_residual_layer_norm_fwd(*fwd[:9])
    check_op(
        "fp8_dropout_residual_layer_norm_bwd", dy, None, total, gamma, mean, rstd, *dropout,
        bias * 0, None, bias * 0, True, *of_cast(),
    )  # fmt: skip


def test_refusals() -> None:
    (x, dy), (_, gamma, beta) = rows("x", "dy"), vectors()
    dropout = 0.3, make_rng(), SITE
    forward, backward = (
        getattr(ops, f"fp8_dropout_residual_layer_norm_{way}") for way in ("fwd", "bwd")
    )
    with pytest.raises(ValueError, match="x must be bfloat16, got float32"):
        forward(x.float(), None, None, *wide(gamma, beta), *dropout, EPS, True, *of_cast())
    with pytest.raises(ValueError, match="fp8 needs rows of a multiple of 16 numbers, got 40"):
        forward(x[:, :40], None, None, gamma[:40], beta[:40], *dropout, EPS, True, *of_cast())
    statistics = torch.zeros(T), torch.ones(T)
    for given, name in (((dy.float(), None), "dy"), ((None, dy.float()), "dsum")):
        with pytest.raises(ValueError, match=f"{name} must be bfloat16, got float32"):
            backward(
                *given, x.float(), gamma.float(), *statistics, *dropout, None, None, None, False,
                *of_cast(),
            )  # fmt: skip
    with pytest.raises(ValueError, match="one of dy and dsum must be given"):
        backward(
            None, None, x, gamma, *statistics, *dropout, None, None, None, False, *of_cast()
        )  # fmt: skip
