"""The cast to E4M3 compared with a table of all its numbers, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.ops import Cast

NAN = 0x7F
CODES = torch.arange(NAN)  # of the numbers from 0 to 448
EXPONENTS, MANTISSAS = CODES // 8, (CODES % 8).double()
NUMBERS = torch.where(
    EXPONENTS == 0, MANTISSAS * 2.0**-9, (1 + MANTISSAS / 8) * torch.exp2(EXPONENTS.double() - 7)
)


def cast_of(scale: float, amax: float = 0.0, saturated: int = 0) -> Cast:
    return Cast(torch.tensor(scale), torch.tensor(amax), torch.tensor(saturated))


def codes_of(x: Tensor, scale: float) -> Tensor:
    """The bytes of x / scale in E4M3, by a search of the nearest number in the table."""
    sizes = x.double().abs() / scale
    above = torch.searchsorted(NUMBERS, sizes.clamp(max=448)).clamp(max=NAN - 1)
    below = (above - 1).clamp(min=0)
    low, high = sizes - NUMBERS[below], NUMBERS[above] - sizes
    is_below = (low < high) | ((low == high) & (below % 2 == 0))
    codes = torch.where(is_below, below, above) + 128 * x.signbit()
    return torch.where(x.isfinite(), codes, NAN).to(torch.uint8)


def quantise(x: Tensor, scale: float) -> tuple[Tensor, Tensor, float, int]:
    cast = cast_of(scale)
    values, transpose = ops.fp8_quantise(x, cast)
    return values, transpose, cast.amax.item(), int(cast.saturated)


def test_the_table_is_torchs():
    numbers = CODES.to(torch.uint8).view(torch.float8_e4m3fn).double()
    assert torch.equal(numbers, NUMBERS) and NUMBERS[-1] == 448


@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**-20, 8.0, 2.0**60])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number(dtype, scale):
    """Among them NaN, infinities, zeros of both signs, ties, and numbers that are not normal."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(256, 256)
    values, transpose, amax, saturated = quantise(x, scale)
    expected = codes_of(x, scale)
    assert torch.equal(values.view(torch.uint8), expected)
    assert torch.equal(transpose.view(torch.uint8), expected.t())
    assert amax == torch.finfo(dtype).max
    finite = x[x.isfinite()].double()
    assert saturated == (finite.abs() > 448 * scale).sum()


def test_ties_round_to_even_and_their_neighbours_to_the_nearest():
    ties = ((NUMBERS[1:] + NUMBERS[:-1]) / 2).float()
    x = torch.stack([torch.nextafter(ties, ties - 1), ties, torch.nextafter(ties, ties + 1)])
    x = torch.cat([x, x.new_zeros(3, 2)], 1)  # 128 columns
    codes = quantise(x, 1.0)[0].view(torch.uint8)[:, :-2].int()
    below = CODES[:-1].int()
    assert torch.equal(codes[0], below) and torch.equal(codes[2], below + 1)
    assert torch.equal(codes[1], below + below % 2)


def test_float32_is_rounded_once():
    """Not first to 16 bits: 17 + 2^-14 is nearer to 18, but 17, a tie, becomes 16."""
    x = torch.tensor([17 + 2.0**-14, 17.0] * 8)[None]
    assert quantise(x, 1.0)[0].float()[0, :2].tolist() == [18, 16]


def test_infinity_and_nan_become_nan_and_are_not_counted():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, 449.0, -1e38, 448.0, -0.0] * 2)
    values, _, amax, saturated = quantise(x[None], 1.0)
    assert values.view(torch.uint8)[0, :8].tolist() == [NAN] * 4 + [0x7E, 0xFE, 0x7E, 0x80]
    assert amax == torch.tensor(1e38).item() and saturated == 4
    assert values.float()[0, :4].isnan().all()


def test_statistics_continue():
    """So that micro-batches of an update share them."""
    x = torch.full((2, 16), -3.0)
    cast = cast_of(2.0**-10, 2.0, 5)
    ops.fp8_quantise(x, cast)
    assert cast.amax == 3 and cast.saturated == 5 + 32
    ops.fp8_quantise(x / 2, cast._replace(scale=torch.tensor(1.0)))
    assert cast.amax == 3 and cast.saturated == 37


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17])
def test_transposes_are_padded_with_zeros(rows):
    x = torch.randn(rows, 48)
    values, transpose, _, _ = quantise(x, 0.25)
    size = (rows + 15) // 16 * 16
    assert values.shape == (rows, 48) and transpose.shape == (48, size)
    assert transpose.is_contiguous() and values.is_contiguous()
    bits = transpose.view(torch.uint8)
    assert torch.equal(bits[:, :rows], values.view(torch.uint8).t()) and not bits[:, rows:].any()


def test_strided_rows_and_inputs_are_not_written():
    wide = torch.randn(5, 64)
    before = wide.clone()
    ours = quantise(wide[:, 16:48], 0.5)
    assert torch.equal(wide, before)
    assert torch.equal(ours[0].float(), quantise(wide[:, 16:48].contiguous(), 0.5)[0].float())


@pytest.mark.parametrize("wrong", [0.75, -1.0, 0.0, 2.0**61, torch.nan, torch.inf])
def test_scales_that_are_refused(wrong):
    with pytest.raises(ValueError, match=r"scale must be a power of two from 2\^-60 to 2\^60"):
        ops.fp8_quantise(torch.randn(3, 16), cast_of(wrong))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_column_sums(dtype):
    """Of the numbers before the cast; it does not change."""
    x, cast = torch.randn(21, 48).to(dtype), cast_of(2.0**-6)
    held = torch.randn(48).to(dtype)
    for accumulate in (False, True):
        sums = held.clone()
        values, transpose = ops.fp8_quantise(x, cast, sums, accumulate)
        expected = x.float().sum(0) + (held.float() if accumulate else 0)
        torch.testing.assert_close(sums.float(), expected, rtol=1e-2, atol=1e-2)
        plain = ops.fp8_quantise(x, cast)
        for mine, other in zip((values, transpose), plain, strict=True):
            assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
