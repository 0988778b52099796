"""Attention with its results in E4M3: attention's results, and the casts of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ops_testing import check_op, make_rng
from torch import Tensor

from lightseq_fairseq import ops

SCALE = torch.tensor(2.0**-6)


def arguments(lengths: list[int], width: int = 16, tail: int = 2) -> tuple[Any, ...]:
    torch.manual_seed(0)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = (torch.randn(sum(lengths) + tail, 3, width).bfloat16() * 9 for _ in range(3))
    longest = max(lengths)
    return q, k, v, cu, cu, longest, longest, True, width**-0.5, 0.1, make_rng(), 3


def statistics() -> tuple[Tensor, Tensor]:
    return torch.tensor(1.0), torch.tensor(5)


def test_it_is_attention_and_its_cast() -> None:
    given = arguments([5, 0, 9, 1])
    ours, expected = statistics(), statistics()
    out, lse, values = ops.fp8_attention_fwd(*given, SCALE, *ours)
    plain_out, plain_lse = ops.attention_fwd(*given)
    cast, _ = ops.fp8_quantise(plain_out.flatten(1), SCALE, *expected)
    assert torch.equal(out, plain_out) and torch.equal(lse, plain_lse)
    assert torch.equal(values.view(torch.uint8), cast.view(torch.uint8))
    assert all(map(torch.equal, ours, expected))
    assert ours[0] > 7 and ours[1] > 5  # numbers saturated
    assert not values[15:].view(torch.uint8).any()


def gradients(given: tuple[Any, ...]) -> tuple[tuple[Any, ...], Tensor]:
    """The arguments of backward up to dq, dk and dv, and memory for these side by side."""
    out, lse = ops.attention_fwd(*given)
    dout = torch.randn(out.shape).bfloat16()
    memory = torch.full((len(out), 3 * out[0].numel()), 0x7F, dtype=torch.uint8)
    return (dout, *given[:3], out, lse, *given[3:]), memory.view(torch.float8_e4m3fn)


def parts(memory: Tensor) -> tuple[Tensor, ...]:
    return memory.unflatten(1, (3, 3, -1)).unbind(1)


@pytest.mark.parametrize("shared", [False, True])
def test_backward_is_that_of_attention_and_the_casts(shared: bool) -> None:
    """Scalars of queries and of keys may be the same."""
    given, memory = gradients(arguments([5, 0, 9, 1]))
    scales = SCALE, SCALE if shared else SCALE * 4
    ours, expected = ((statistics(), statistics()) for _ in range(2))
    if shared:
        ours, expected = (ours[0],) * 2, (expected[0],) * 2
    ops.fp8_attention_bwd(*given, *parts(memory), scales[0], *ours[0], scales[1], *ours[1])
    plain = [torch.empty_like(x) for x in given[1:4]]
    ops.attention_bwd(*given, *plain)
    for mine, exact, which in zip(parts(memory), plain, (0, 1, 1), strict=True):
        cast, _ = ops.fp8_quantise(exact.flatten(1), scales[which], *expected[which])
        assert torch.equal(mine.flatten(1).view(torch.uint8), cast.view(torch.uint8))
        assert not mine[15:].view(torch.uint8).any() and mine[:15].view(torch.uint8).any()
    for of_ours, of_expected in zip(ours, expected, strict=True):
        assert all(map(torch.equal, of_ours, of_expected))
        assert of_ours[0] > 1 and of_ours[1] > 5  # numbers saturated


def test_opcheck() -> None:
    check_op("fp8_attention_fwd", *arguments([3, 4]), SCALE, *statistics())
    given, memory = gradients(arguments([3, 4]))
    scalars = SCALE, *statistics(), SCALE, *statistics()
    check_op("fp8_attention_bwd", *given, *parts(memory.fill_(0)), *scalars)


def test_refusals() -> None:
    q, k, v, *rest = arguments([5, 9])
    of_cast = SCALE, *statistics()
    with pytest.raises(ValueError, match="fp8_attention_fwd: q must be bfloat16, got float32"):
        ops.fp8_attention_fwd(q.float(), k.float(), v.float(), *rest, *of_cast)
    narrow = (x[..., :8].contiguous() for x in (q, k, v))
    with pytest.raises(ValueError, match="fp8 needs rows of a multiple of 16 numbers, got 24"):
        ops.fp8_attention_fwd(*narrow, *rest, *of_cast)
    with pytest.raises(ValueError, match="scale must be a power of two"):
        ops.fp8_attention_fwd(q, k, v, *rest, SCALE * 3, *statistics())
    with pytest.raises(ValueError, match="fp8_attention_fwd: amax must be float32"):
        ops.fp8_attention_fwd(q, k, v, *rest, SCALE, torch.tensor(1.0).double(), of_cast[2])


def test_refusals_of_backward() -> None:
    given, memory = gradients(arguments([5, 9]))
    scalars = SCALE, *statistics(), SCALE, *statistics()
    dq, dk, dv = parts(memory)
    with pytest.raises(ValueError, match="fp8_attention_bwd: dk must be float8_e4m3fn, got bfloat"):
        ops.fp8_attention_bwd(*given, dq, dk.bfloat16(), dv, *scalars)
    with pytest.raises(ValueError, match=r"dq must have shape \[16, 3, 16\], got \[15, 3, 16\]"):
        ops.fp8_attention_bwd(*given, dq[1:], dk, dv, *scalars)
    apart = torch.zeros((16, 16, 3), dtype=torch.uint8).view(torch.float8_e4m3fn).transpose(1, 2)
    with pytest.raises(ValueError, match="dv must have adjacent heads, and rows at multiples of"):
        ops.fp8_attention_bwd(*given, dq, dk, apart, *scalars)
    with pytest.raises(ValueError, match="scale must be a power of two"):
        ops.fp8_attention_bwd(*given, dq, dk, dv, *scalars[:3], SCALE * 3, *scalars[4:])
