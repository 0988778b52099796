"""The transpose in E4M3, compared with that of `fp8_quantise`."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import check_op, make_rng
from torch import Tensor

from lightseq_fairseq import ops

SCALE = torch.tensor(2.0**-5)


def cast(x: Tensor) -> Tensor:
    """The transpose of x, as bytes."""
    statistics = torch.tensor(0.0), torch.tensor(0)
    return ops.fp8_quantise(x, SCALE, *statistics)[1].view(torch.uint8)


def normed(rows: int, columns: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """x, the arguments of its LayerNorm, and the LayerNorm in float32."""
    torch.manual_seed(rows)
    x = torch.randn(rows, columns).bfloat16()
    gamma, beta = torch.randn(columns).bfloat16(), torch.randn(columns).bfloat16()
    arguments = (None, None, gamma, beta, 0.0, make_rng(), 0, 1e-5)
    _, _, mean, rstd = ops.dropout_residual_layer_norm_fwd(x, *arguments)
    y = torch.nn.functional.layer_norm(x.float(), (columns,), gamma.float(), beta.float(), 1e-5)
    return x, [mean, rstd, gamma, beta], y


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 37])
def test_of_a_matrix_it_is_that_of_the_cast(rows: int) -> None:
    x = torch.randn(rows, 48).bfloat16()
    x[:1, :3] = torch.tensor([torch.nan, torch.inf, 1e30])
    assert torch.equal(ops.fp8_transpose(x, SCALE).view(torch.uint8), cast(x))


@pytest.mark.parametrize("rows", [0, 1, 37])
def test_of_a_layer_norm_it_is_that_of_the_cast_but_for_roundings(rows: int) -> None:
    x, norm, y = normed(rows, 48)
    ours, expected = ops.fp8_transpose(x, SCALE, *norm).view(torch.uint8), cast(y)
    assert ours.shape == expected.shape
    assert int((ours != expected).sum()) <= 2 + 1e-3 * y.numel()


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 37])
@pytest.mark.parametrize("accumulate", [False, True])
def test_of_values_it_is_that_of_the_cast(rows: int, accumulate: bool) -> None:
    x = torch.randn(rows, 48).bfloat16()
    x[:1, :3] = torch.tensor([torch.nan, torch.inf, 1e30])
    statistics = torch.tensor(0.0), torch.tensor(0)
    values, expected = ops.fp8_quantise(x, SCALE, *statistics)
    before = torch.randn(48)
    sums = before.clone()
    ours = ops.fp8_transpose(values, SCALE, sums=sums, accumulate=accumulate)
    assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))
    exact = (values.double() * SCALE).sum(0) + (before if accumulate else 0)
    torch.testing.assert_close(sums.double(), exact, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(ops.fp8_transpose(values, SCALE).view(torch.uint8), ours.view(torch.uint8))


def test_a_layer_norm_of_another_matrix_differs() -> None:
    x, norm, y = normed(37, 48)
    for place in range(4):
        wrong = [t * 1.5 if i == place else t for i, t in enumerate(norm)]
        other = ops.fp8_transpose(x, SCALE, *wrong).view(torch.uint8)
        assert int((other != cast(y)).sum()) > 0.2 * y.numel()


def test_strided_rows() -> None:
    wide = torch.randn(20, 96).bfloat16()
    ours = ops.fp8_transpose(wide[:, 16:64], SCALE)
    assert torch.equal(ours.view(torch.uint8), cast(wide[:, 16:64].contiguous()))


def test_opcheck() -> None:
    x, norm, _ = normed(21, 48)
    check_op("fp8_transpose", x, SCALE)
    check_op("fp8_transpose", x, SCALE, *norm)
    values = torch.zeros(21, 48, dtype=torch.uint8).view(torch.float8_e4m3fn)
    check_op("fp8_transpose", values, SCALE, *[None] * 4, torch.randn(48), True)


def test_refusals() -> None:
    x, (mean, rstd, gamma, beta), _ = normed(21, 48)
    with pytest.raises(ValueError, match="fp8_transpose: x must be bfloat16 or float8"):
        ops.fp8_transpose(x.float(), SCALE)
    with pytest.raises(ValueError, match="fp8 needs rows of a multiple of 16 numbers, got 40"):
        ops.fp8_transpose(x[:, :40], SCALE)
    with pytest.raises(ValueError, match="give all of mean, rstd, gamma and beta, or none"):
        ops.fp8_transpose(x, SCALE, mean, rstd)
    with pytest.raises(ValueError, match=r"mean must have shape \[21\], got \[20\]"):
        ops.fp8_transpose(x, SCALE, mean[1:], rstd, gamma, beta)
    with pytest.raises(ValueError, match="gamma must be bfloat16, got float32"):
        ops.fp8_transpose(x, SCALE, mean, rstd, gamma.float(), beta)
    with pytest.raises(ValueError, match="scale must be a power of two"):
        ops.fp8_transpose(x, SCALE * 3)
    values, sums = x.to(torch.float8_e4m3fn), torch.zeros(48)
    with pytest.raises(ValueError, match="x must be bfloat16 for a LayerNorm, got"):
        ops.fp8_transpose(values, SCALE, mean, rstd, gamma, beta)
    with pytest.raises(ValueError, match="for sums, got torch"):
        ops.fp8_transpose(x, SCALE, sums=sums)
    with pytest.raises(ValueError, match=r"sums must have shape \[48\], got \[47\]"):
        ops.fp8_transpose(values, SCALE, sums=sums[1:])
