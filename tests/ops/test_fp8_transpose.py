"""The transpose in E4M3, compared with that of `fp8_quantise`."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import make_cast
from torch import Tensor

from lightseq_fairseq import ops

SCALE = torch.tensor(2.0**-5)


def cast(x: Tensor) -> Tensor:
    """The transpose of x, as bytes."""
    return ops.fp8_quantise(x, make_cast(SCALE.item()))[1].view(torch.uint8)


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 37])
def test_of_a_matrix_it_is_that_of_the_cast(rows: int) -> None:
    x = torch.randn(rows, 48).bfloat16()
    x[:1, :3] = torch.tensor([torch.nan, torch.inf, 1e30])
    assert torch.equal(ops.fp8_transpose(x, SCALE).view(torch.uint8), cast(x))


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 37])
@pytest.mark.parametrize("accumulate", [False, True])
def test_of_values_it_is_that_of_the_cast(rows: int, accumulate: bool) -> None:
    x = torch.randn(rows, 48).bfloat16()
    x[:1, :3] = torch.tensor([torch.nan, torch.inf, 1e30])
    values, expected = ops.fp8_quantise(x, make_cast(SCALE.item()))
    before = torch.randn(48)
    sums = before.clone()
    ours = ops.fp8_transpose(values, SCALE, sums=sums, accumulate=accumulate)
    assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))
    exact = (values.double() * SCALE).sum(0) + (before if accumulate else 0)
    torch.testing.assert_close(sums.double(), exact, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(ops.fp8_transpose(values, SCALE).view(torch.uint8), ours.view(torch.uint8))


def test_strided_rows() -> None:
    wide = torch.randn(20, 96).bfloat16()
    ours = ops.fp8_transpose(wide[:, 16:64], SCALE)
    assert torch.equal(ours.view(torch.uint8), cast(wide[:, 16:64].contiguous()))


def test_sums_of_what_is_not_cast_are_refused() -> None:
    with pytest.raises(ValueError, match="for sums, got torch"):
        ops.fp8_transpose(torch.randn(21, 48).bfloat16(), SCALE, sums=torch.zeros(48))
