"""The attention kernels that also cast their result: attention_fwd's results bit for bit, and those
of fp8_quantise."""

from __future__ import annotations

import pytest
import torch
from helpers.attention_cases import LENGTHS, Case, poison
from helpers.ops_testing import check_op, skip_without_fp8
from torch import Tensor

from lightseq_fairseq import library, ops

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def with_fp8() -> None:
    skip_without_fp8()


def statistics() -> tuple[Tensor, Tensor]:
    return torch.tensor(0.0).cuda(), torch.tensor(3).cuda()


def check(case: Case, scale: float = 2.0**-9) -> None:
    of_cast = torch.tensor(scale).cuda()
    expected, ours = statistics(), statistics()
    plain = ops.attention_fwd(*case.qkv, *case.settings())
    values, _ = ops.fp8_quantise(plain[0].flatten(1), of_cast, *expected)
    poison(case.q)
    out, lse, cast = ops.fp8_attention_fwd(*case.qkv, *case.settings(), of_cast, *ours)
    assert cast.shape == values.shape and cast.is_contiguous()
    assert torch.equal(cast.view(torch.uint8), values.view(torch.uint8))
    torch.testing.assert_close((out, lse), plain, rtol=0, atol=0, equal_nan=True)
    assert [x.item() for x in ours] == [x.item() for x in expected]
    assert ours[0] > 0


def test_kernel_is_loaded() -> None:
    assert "fp8_attention_fwd" in library.load().kernels


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(("causal", "p"), [(False, 0.0), (True, 0.1)])
def test_every_mix_of_lengths(lengths, causal: bool, p: float) -> None:
    check(Case(lengths, torch.bfloat16, causal, p, heads=4))


@pytest.mark.parametrize("width", [8, 16, 40, 64, 80, 96, 128])
def test_head_widths(width: int) -> None:
    for lengths in ([3, 30, 64, 1], [300, 129, 5, 700]):
        check(Case((lengths, None), torch.bfloat16, True, 0.1, heads=4, width=width))


def test_more_long_sentences_than_blocks() -> None:
    check(Case(([130, 257] * 40, None), torch.bfloat16, False, 0.1, heads=8))


@pytest.mark.parametrize("lengths", [[30, 2], [200, 2]])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e30, -1e30])
def test_numbers_that_do_not_fit(lengths: list[int], number: float) -> None:
    """They are counted once."""
    case = Case((lengths, None), torch.bfloat16, heads=4)
    case.v[0, 1, 5] = number
    check(case)


def test_same_input_same_bits() -> None:
    case = Case(([150, 30, 700, 2], None), torch.bfloat16, True, 0.1, heads=4)
    scale = torch.tensor(2.0**-6).cuda()
    runs = [
        ops.fp8_attention_fwd(*case.qkv, *case.settings(), scale, *statistics()) for _ in range(3)
    ]
    for out, _, values in runs[1:]:
        assert torch.equal(out, runs[0][0])
        assert torch.equal(values.view(torch.uint8), runs[0][2].view(torch.uint8))


def test_opcheck() -> None:
    case = Case(([5, 3], None), torch.bfloat16, True, heads=2, width=16)
    q, k, v = (x.nan_to_num(0.0) for x in case.qkv)
    scale = torch.tensor(2.0**-6).cuda()
    check_op("fp8_attention_fwd", q, k, v, *case.settings(), scale, *statistics())
