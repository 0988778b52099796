"""The attention kernels that cast their results: attention's results bit for bit, and those of
fp8_quantise."""

from __future__ import annotations

import pytest
import torch
from helpers.attention_cases import LENGTHS, Case, poison
from helpers.ops_testing import check_op, skip_without_fp8
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.base import library

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def with_fp8() -> None:
    skip_without_fp8()


def statistics() -> tuple[Tensor, Tensor]:
    return torch.tensor(0.0).cuda(), torch.tensor(3).cuda()


def check(case: Case, scale: float = 2.0**-9) -> None:
    out, lse = check_forward(case, scale)
    check_backward(case, scale, out, lse)


def check_forward(case: Case, scale: float) -> tuple[Tensor, Tensor]:
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
    return out, lse


def cast_memory(case: Case) -> list[Tensor]:
    """For dq, dk and dv: column slices as in the layers, all NaN before."""
    rows_q, rows_k = len(case.q), len(case.k)
    blocks = [(rows_q, 3)] if case.lengths_q is case.lengths_k else [(rows_q, 1), (rows_k, 2)]
    heads, width = case.q.shape[1:]
    memory = [torch.full((r, n, heads, width), 0x7F, dtype=torch.uint8) for r, n in blocks]
    return [x for m in memory for x in m.cuda().view(torch.float8_e4m3fn).unbind(1)]


def check_backward(case: Case, scale: float, out: Tensor, lse: Tensor) -> None:
    """Queries and keys have scales of their own, 16 times as large and as small."""
    scales = torch.tensor([scale * 16, scale / 16]).cuda().unbind()
    expected, ours = ((statistics(), statistics()) for _ in range(2))
    given = case.dout, *case.qkv, out, lse, *case.settings()
    plain, cast = [torch.empty_like(x) for x in case.qkv], cast_memory(case)
    ops.attention_bwd(*given, *plain)
    ops.fp8_attention_bwd(*given, *cast, scales[0], *ours[0], scales[1], *ours[1])
    for mine, exact, which in zip(cast, plain, (0, 1, 1), strict=True):
        values, _ = ops.fp8_quantise(exact.flatten(1), scales[which], *expected[which])
        assert torch.equal(mine.flatten(1).view(torch.uint8), values.view(torch.uint8))
    for of_ours, of_expected in zip(ours, expected, strict=True):
        assert [x.item() for x in of_ours] == [x.item() for x in of_expected]
        assert of_ours[0] > 0


def test_kernel_is_loaded() -> None:
    assert {"fp8_attention_fwd", "fp8_attention_bwd"} <= set(library.load().kernels)


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
    out, lse = ops.attention_fwd(*case.qkv, *case.settings())
    case.dout[0, 1, 5] = number
    check_backward(case, 2.0**-9, out, lse)
    case.v[0, 1, 5] = number
    check_forward(case, 2.0**-9)


def test_same_input_same_bits() -> None:
    case = Case(([150, 30, 700, 2], None), torch.bfloat16, True, 0.1, heads=4)
    scale = torch.tensor(2.0**-6).cuda()
    runs = [
        ops.fp8_attention_fwd(*case.qkv, *case.settings(), scale, *statistics()) for _ in range(3)
    ]
    for out, _, values in runs[1:]:
        assert torch.equal(out, runs[0][0])
        assert torch.equal(values.view(torch.uint8), runs[0][2].view(torch.uint8))
    given, gradients = (case.dout, *case.qkv, *runs[0][:2], *case.settings()), []
    for _ in range(3):
        gradients.append(cast_memory(case))
        ops.fp8_attention_bwd(
            *given, *gradients[-1], scale, *statistics(), scale / 8, *statistics()
        )
    for other in gradients[1:]:
        for x, first in zip(other, gradients[0], strict=True):
            assert torch.equal(x.view(torch.uint8), first.view(torch.uint8))


def test_opcheck() -> None:
    case = Case(([5, 3], None), torch.bfloat16, True, heads=2, width=16)
    q, k, v = (x.nan_to_num(0.0) for x in case.qkv)
    scale = torch.tensor(2.0**-6).cuda()
    check_op("fp8_attention_fwd", q, k, v, *case.settings(), scale, *statistics())
    out, lse = ops.attention_fwd(q, k, v, *case.settings())
    given = case.dout.nan_to_num(0.0), q, k, v, out, lse, *case.settings()
    cast = [x.view(torch.uint8).fill_(0).view(x.dtype) for x in cast_memory(case)]
    check_op("fp8_attention_bwd", *given, *cast, *(scale, *statistics()) * 2)


def test_refusals() -> None:
    case = Case(([5, 3], None), torch.bfloat16, heads=4, width=8)
    out, lse = ops.attention_fwd(*case.qkv, *case.settings())
    scale = torch.tensor(2.0**-6).cuda()
    given = case.dout, *case.qkv, out, lse, *case.settings()
    dq, dk, dv = cast_memory(case)
    wide = torch.zeros(len(dq) * 96 + 8, dtype=torch.uint8).cuda().view(dq.dtype)
    shifted = wide[8:].view(len(dq), 3, 4, 8)[:, 0]
    with pytest.raises(RuntimeError, match="dq must be aligned to 16 bytes"):
        ops.fp8_attention_bwd(*given, shifted, dk, dv, *(scale, *statistics()) * 2)
