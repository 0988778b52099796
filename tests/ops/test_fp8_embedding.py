"""Embedding with its result in E4M3: the embedding's results, and the cast of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ops_testing import check_op, make_rng
from torch import Tensor

from lightseq_fairseq import ops

SCALE = torch.tensor(2.0**-6)
EPS = 1e-5


def tables(rows: int = 37, columns: int = 48) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    tokens, positions = torch.randint(0, 20, (rows,)), torch.arange(rows)
    return (
        tokens,
        torch.randn(20, columns).bfloat16() * 4,
        positions,
        torch.randn(rows, columns).bfloat16(),
    )


def norm(columns: int = 48) -> tuple[Tensor, Tensor]:
    return torch.randn(columns).bfloat16() * 4, torch.randn(columns).bfloat16()


def statistics() -> tuple[Tensor, Tensor]:
    return torch.tensor(1.0), torch.tensor(5)


def settings() -> tuple[Any, ...]:
    return 2.0, 0.1, make_rng(), 3


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("has_norm", [False, True])
def test_it_is_the_embedding_and_its_cast(rows: int, has_norm: bool) -> None:
    ours, expected = statistics(), statistics()
    if has_norm:
        given = *tables(rows), *norm(), *settings(), EPS
        plain = ops.embedding_layer_norm_fwd(*given)
        *results, values = ops.fp8_embedding_layer_norm_fwd(*given, SCALE, *ours)
    else:
        given = *tables(rows), *settings()
        plain = (ops.embedding_fwd(*given),)
        *results, values = ops.fp8_embedding_fwd(*given, SCALE, *ours)
    cast, _ = ops.fp8_quantise(plain[0], SCALE, *expected)
    assert all(map(torch.equal, results, plain))
    assert torch.equal(values.view(torch.uint8), cast.view(torch.uint8))
    assert all(map(torch.equal, ours, expected))
    assert rows == 0 or ours[0] > 2
    assert rows < 37 or ours[1] > 5  # numbers saturated


def test_opcheck() -> None:
    check_op("fp8_embedding_fwd", *tables(), *settings(), SCALE, *statistics())
    given = *tables(), *norm(), *settings(), EPS
    check_op("fp8_embedding_layer_norm_fwd", *given, SCALE, *statistics())


def test_refusals() -> None:
    tokens, weight, *places = tables()
    of_cast = SCALE, *statistics()
    with pytest.raises(ValueError, match="fp8_embedding_fwd: weight must be bfloat16, got float32"):
        ops.fp8_embedding_fwd(tokens, weight.float(), *places, *settings(), *of_cast)
    narrow = (x[:, :40].contiguous() for x in (weight, places[1]))
    with pytest.raises(ValueError, match="fp8 needs rows of a multiple of 16 numbers, got 40"):
        ops.fp8_embedding_fwd(tokens, next(narrow), places[0], next(narrow), *settings(), *of_cast)
    with pytest.raises(ValueError, match="scale must be a power of two"):
        ops.fp8_embedding_fwd(tokens, weight, *places, *settings(), SCALE * 3, *statistics())
    with pytest.raises(ValueError, match="fp8_embedding_layer_norm_fwd: amax must be float32"):
        ops.fp8_embedding_layer_norm_fwd(
            tokens, weight, *places, *norm(), *settings(), EPS, SCALE, SCALE.double(), of_cast[2]
        )
