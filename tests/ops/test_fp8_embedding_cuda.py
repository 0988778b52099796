"""The embedding kernels that also cast their result: the embedding's results bit for bit, and those
of fp8_quantise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ops_testing import check_op, make_rng, poison_cache, skip_without_fp8
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.base import library

pytestmark = pytest.mark.gpu

EPS = 1e-5
SIZES = [(1, 16), (3, 48), (33, 144), (129, 272), (777, 1040), (3712, 1024), (301, 4096), (9, 8192)]


@pytest.fixture(autouse=True)
def with_fp8() -> None:
    skip_without_fp8()


def statistics() -> tuple[Tensor, Tensor]:
    return torch.tensor(0.0).cuda(), torch.tensor(3).cuda()


def arguments(rows: int, columns: int, has_norm: bool, p: float = 0.1) -> tuple[Any, ...]:
    torch.manual_seed(rows + columns)
    tokens = torch.randint(0, 50, (rows,)).cuda()
    positions = torch.arange(rows).cuda() % 64
    weight, places = (torch.randn(n, columns).bfloat16().cuda() * 9 for n in (50, 64))
    norm = [torch.randn(columns).bfloat16().cuda() * 9 for _ in range(2)] if has_norm else []
    settings = 1.5, p, make_rng().cuda(), 7
    return tokens, weight, positions, places, *norm, *settings, *([EPS] if has_norm else [])


def check(given: tuple[Any, ...], has_norm: bool, scale: float = 2.0**-4) -> None:
    kind = "embedding_layer_norm_fwd" if has_norm else "embedding_fwd"
    of_cast = torch.tensor(scale).cuda()
    expected, ours = statistics(), statistics()
    plain = getattr(ops, kind)(*given)
    plain = plain if has_norm else (plain,)
    values, _ = ops.fp8_quantise(plain[0], of_cast, *expected)
    poison_cache()
    *results, cast = getattr(ops, f"fp8_{kind}")(*given, of_cast, *ours)
    torch.testing.assert_close(tuple(results), plain, rtol=0, atol=0, equal_nan=True)
    assert cast.shape == values.shape and cast.is_contiguous()
    assert torch.equal(cast.view(torch.uint8), values.view(torch.uint8))
    assert [x.item() for x in ours] == [x.item() for x in expected]
    assert ours[0] > 0


def test_kernels_are_loaded() -> None:
    wanted = {"fp8_embedding_fwd", "fp8_embedding_layer_norm_fwd"}
    assert wanted <= set(library.load().kernels)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_sizes(rows: int, columns: int, p: float, has_norm: bool) -> None:
    check(arguments(rows, columns, has_norm, p), has_norm)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e30, -1e30])
def test_numbers_that_do_not_fit(number: float, has_norm: bool) -> None:
    """They are counted once."""
    tokens, weight, *rest = arguments(50, 272, has_norm, 0.0)
    weight[tokens[3], 17] = number
    check((tokens, weight, *rest), has_norm)


def test_opcheck() -> None:
    scale = torch.tensor(2.0**-4).cuda()
    for has_norm, name in ((False, "fp8_embedding_fwd"), (True, "fp8_embedding_layer_norm_fwd")):
        check_op(name, *arguments(21, 48, has_norm), scale, *statistics())
