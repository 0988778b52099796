"""The kernel that makes the transpose in E4M3, compared with its reference and with the cast."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import make_cast, on_gpu, poison_cache, skip_without_fp8
from torch import Tensor

from lightseq_fairseq import ops

SIZES = [
    (1, 16), (7, 48), (16, 144), (127, 128), (129, 272), (777, 1040), (3712, 1024), (16384, 1024),
    (301, 4096), (9, 8192),
]  # fmt: skip


@pytest.fixture(autouse=True)
def with_fp8() -> None:
    skip_without_fp8()


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def scale() -> Tensor:
    return torch.tensor(2.0**-6).cuda()


def matrix(rows: int, columns: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(rows + columns)
    return torch.randn(rows, columns, generator=generator, device="cuda").bfloat16()


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_of_a_matrix_it_is_that_of_the_cast(rows: int, columns: int) -> None:
    x = matrix(rows, columns) * 40
    x[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    expected = ops.fp8_quantise(x, make_cast(2.0**-6, "cuda"))[1]
    poison_cache()
    ours = ops.fp8_transpose(x, scale())
    assert ours.shape == expected.shape and ours.is_contiguous()
    assert torch.equal(bits(ours), bits(expected))


def test_same_input_same_bits() -> None:
    x = matrix(3001, 1040)
    first = ops.fp8_transpose(x, scale())
    for _ in range(2):
        assert torch.equal(bits(ops.fp8_transpose(x, scale())), bits(first))


def test_no_rows() -> None:
    assert ops.fp8_transpose(matrix(0, 64), scale()).shape == (64, 0)


def test_strided_rows() -> None:
    x = matrix(90, 144)
    wide = torch.full((90, 320), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide[:, 8:152] = x
    ours, expected = (bits(ops.fp8_transpose(t, scale())) for t in (wide[:, 8:152], x))
    assert torch.equal(ours, expected)


def test_refusals() -> None:
    with pytest.raises(RuntimeError, match="fp8_transpose: x must be contiguous in its last dim"):
        ops.fp8_transpose(on_gpu(torch.randn(4, 40).bfloat16())[:, 3:35], scale())
    with pytest.raises(ValueError, match="fp8_transpose: fp8 needs rows of a multiple of 16"):
        ops.fp8_transpose(torch.randn(4, 24).bfloat16().cuda(), scale())
