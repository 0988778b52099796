"""Attention with its result in E4M3: attention's results, and the cast of them."""

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


def test_opcheck() -> None:
    check_op("fp8_attention_fwd", *arguments([3, 4]), SCALE, *statistics())


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
