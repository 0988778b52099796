"""The kernel that makes the transpose in E4M3, compared with its reference and with the cast."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import check_op, make_rng, on_gpu, poison_cache, skip_without_fp8
from torch import Tensor

from lightseq_fairseq import library, ops

pytestmark = pytest.mark.gpu

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


def normed(rows: int, columns: int) -> tuple[Tensor, list[Tensor]]:
    """x, and the arguments of its LayerNorm."""
    generator = torch.Generator("cuda").manual_seed(rows + columns)
    x, vectors = (
        torch.randn(*shape, generator=generator, device="cuda").bfloat16()
        for shape in ((rows, columns), (2, columns))
    )
    gamma, beta = vectors
    arguments = (None, None, gamma, beta, 0.0, make_rng().cuda(), 0, 1e-5)
    _, _, mean, rstd = ops.dropout_residual_layer_norm_fwd(x, *arguments)
    return x, [mean, rstd, gamma, beta]


def test_kernel_is_loaded() -> None:
    assert "fp8_transpose" in library.load().kernels


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_of_a_matrix_it_is_that_of_the_cast(rows: int, columns: int) -> None:
    x = normed(rows, columns)[0] * 40
    x[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    statistics = torch.tensor(0.0).cuda(), torch.tensor(0).cuda()
    expected = ops.fp8_quantise(x, scale(), *statistics)[1]
    poison_cache()
    ours = ops.fp8_transpose(x, scale())
    assert ours.shape == expected.shape and ours.is_contiguous()
    assert torch.equal(bits(ours), bits(expected))


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_of_a_layer_norm_it_is_the_reference_but_for_roundings(rows: int, columns: int) -> None:
    x, norm = normed(rows, columns)
    poison_cache()
    ours = bits(ops.fp8_transpose(x, scale(), *norm)).cpu()
    expected = bits(ops.fp8_transpose(x.cpu(), scale().cpu(), *(t.cpu() for t in norm)))
    assert ours.shape == expected.shape
    differ = int((ours != expected).sum())
    assert differ <= 2 + 1e-4 * x.numel(), f"{differ} numbers of {x.numel()} differ"
    numbers = (t.view(torch.float8_e4m3fn).float() for t in (ours, expected))
    torch.testing.assert_close(*numbers, rtol=0.126, atol=2.0**-9)
    assert not ours[:, rows:].any()


@pytest.mark.parametrize("rows", [200, 3000])
def test_it_is_that_of_forwards_values_but_for_roundings(rows: int) -> None:
    """Forward computes y from the sum before it is rounded."""
    x, (_, _, gamma, beta) = normed(rows, 1024)
    residual, bias = torch.randn_like(x), torch.randn_like(gamma)
    statistics = torch.tensor(0.0).cuda(), torch.tensor(0).cuda()
    total, _, mean, rstd, values = ops.fp8_dropout_residual_layer_norm_fwd(
        x, bias, residual, gamma, beta, p=0.1, rng=make_rng().cuda(), site=3, eps=1e-5,
        keep_y=False, scale=scale(), amax=statistics[0], saturated=statistics[1],
    )  # fmt: skip
    ours = ops.fp8_transpose(total, scale(), mean, rstd, gamma, beta)
    numbers = ours.cpu().float()[:, :rows].t(), values.cpu().float()
    torch.testing.assert_close(*numbers, rtol=0.126, atol=2.0)
    assert (numbers[0] != numbers[1]).double().mean() < 0.1


def test_same_input_same_bits() -> None:
    x, norm = normed(3001, 1040)
    first = ops.fp8_transpose(x, scale(), *norm)
    for _ in range(2):
        assert torch.equal(bits(ops.fp8_transpose(x, scale(), *norm)), bits(first))


def test_no_rows() -> None:
    x, norm = normed(0, 64)
    assert ops.fp8_transpose(x, scale()).shape == (64, 0)
    assert ops.fp8_transpose(x, scale(), *norm).shape == (64, 0)


def test_strided_rows() -> None:
    x, norm = normed(90, 144)
    wide = torch.full((90, 320), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide[:, 8:152] = x
    for given in ([], norm):
        ours, expected = (bits(ops.fp8_transpose(t, scale(), *given)) for t in (wide[:, 8:152], x))
        assert torch.equal(ours, expected)


def test_opcheck() -> None:
    x, norm = normed(5, 32)
    check_op("fp8_transpose", x, scale())
    check_op("fp8_transpose", x, scale(), *norm)


def test_refusals() -> None:
    with pytest.raises(RuntimeError, match="fp8_transpose: x must be contiguous in its last dim"):
        ops.fp8_transpose(on_gpu(torch.randn(4, 40).bfloat16())[:, 3:35], scale())
    with pytest.raises(ValueError, match="fp8_transpose: fp8 needs rows of a multiple of 16"):
        ops.fp8_transpose(torch.randn(4, 24).bfloat16().cuda(), scale())
