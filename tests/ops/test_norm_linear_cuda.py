"""The kernel for the end of a sublayer with the product behind it."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from helpers.linear_cases import assert_same_bits, captured, inside
from helpers.linear_cases import drawn as drawn_of
from helpers.ops_testing import assert_as_good_as, poison_cache
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops

MOST, EPS = 6, 1e-5  # most rows
BF16 = torch.bfloat16
drawn = functools.partial(drawn_of, dtype=BF16)
FUNCTIONS = {
    "identity": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_accurate": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}
# Inputs and outputs: one tile; an incomplete chunk; the models' widths; the most inputs; blocks of
# one to four tiles; more blocks than run at the same time; outputs that are padded.
SIZES = [
    (8, 8), (72, 24), (512, 1536), (768, 2304), (1024, 1024), (1024, 4096), (1600, 6400),
    (2048, 8192), (1032, 40_000), (520, 1003),
]  # fmt: skip


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(6)


class Case:
    """Arguments of the op, and what torch computes of them."""

    def __init__(self, k: int, n: int, has: tuple[bool, ...] = (True,) * 4):
        self.x, self.residual = drawn(MOST, k), drawn(MOST, k)
        self.weight, self.gamma = drawn(n, k, scale=k**-0.5), drawn(k)
        self.bias, self.beta = drawn(k), drawn(k)
        self.weight_bias: Tensor | None = drawn(n)
        for name, exists in zip(("residual", "bias", "beta", "weight_bias"), has, strict=True):
            if not exists:
                setattr(self, name, None)

    def run(
        self, rows: int, activation: str, keep_result: bool, residual: Any = None
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = None if self.residual is None else self.residual[:rows]
        return ops.norm_linear_fwd(
            self.x[:rows], self.bias, residual, self.gamma, self.beta, EPS, self.weight,
            self.weight_bias, activation, keep_result,
        )  # fmt: skip

    def formula(self, activation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """sum, LayerNorm and y in float32 steps, with the LayerNorm rounded to ``dtype``, or all in
        float64."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32

        def of(x: Tensor | None) -> Any:
            return 0 if x is None else x.to(exact)

        total = of(self.x) + of(self.bias) + of(self.residual)
        beta = None if self.beta is None else of(self.beta)
        result = functional.layer_norm(total, total.shape[1:], of(self.gamma), beta, EPS)
        rounded = result.to(dtype).to(exact)
        z = rounded @ of(self.weight).t() + of(self.weight_bias)
        return total, result, FUNCTIONS[activation](z)


@pytest.mark.parametrize(("k", "n"), SIZES)
def test_errs_no_more_than_torch(k: int, n: int) -> None:
    """Every number of rows, with and without the end's parts."""
    for has in itertools.product([True, False], repeat=4):
        case = Case(k, n, has)
        activation = list(FUNCTIONS)[sum(has)]
        plain, exact = (case.formula(activation, d) for d in (BF16, torch.float64))
        for rows in range(1, MOST + 1):
            for keep_result in (False, True):
                poison_cache()
                kept, y = case.run(rows, activation, keep_result)
                assert y.is_contiguous() and y.shape == (rows, n)
                of_y = plain[2][:rows].to(BF16)
                assert_as_good_as(y, of_y, exact[2][:rows], f"{rows} rows, {has}")
                if keep_result or has[0] or has[1]:
                    place = int(keep_result)
                    of_kept = plain[place][:rows].to(BF16)
                    assert_as_good_as(kept, of_kept, exact[place][:rows], f"{rows} rows, {has}")
                else:
                    assert kept.numel() == 0


@pytest.mark.parametrize(("k", "n"), [(8, 8), (1024, 4096), (768, 2304)])
def test_a_row_does_not_depend_on_the_others(k: int, n: int) -> None:
    case = Case(k, n)
    kept, y = case.run(MOST, "gelu", False)
    for rows in range(1, MOST):
        few_kept, few = case.run(rows, "gelu", False)
        assert torch.equal(few_kept, kept[:rows]) and torch.equal(few, y[:rows])
    case.x[3, 5] = torch.nan
    kept, y = case.run(MOST, "gelu", True)
    assert y.isnan().nonzero()[:, 0].unique().tolist() == [3]
    assert kept.isnan().nonzero()[:, 0].unique().tolist() == [3]


def test_strided_rows_and_weights() -> None:
    case = Case(1024, 1536)
    expected = case.run(MOST, "silu", False)
    case.x, case.weight = inside(case.x), inside(case.weight)
    found = case.run(MOST, "silu", False, inside(case.residual))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("width", [512, 1024])
@pytest.mark.parametrize("is_pre_norm", [True, False])
def test_a_chain_in_a_graph(is_pre_norm: bool, width: int) -> None:
    """Each kernel lets the next one start at once; their weights change from replay to replay."""
    cases = [Case(width, 4 * width) for _ in range(12)]
    back = [drawn(width, 4 * width, scale=(4 * width) ** -0.5) for _ in cases]
    x = drawn(4, width)

    def call() -> list[Tensor]:
        results, h, residual = [], x, None
        for case, weight in zip(cases, back, strict=True):
            kept, y = ops.norm_linear_fwd(
                h, case.bias, residual, case.gamma, case.beta, EPS, case.weight, case.weight_bias,
                "relu", not is_pre_norm,
            )  # fmt: skip
            h, residual = ops.linear_fwd(y, weight, None), kept
            results += [kept, y, h]
        return results

    graph, results = captured(call)
    for _ in range(20):
        x.normal_()
        for case in cases:
            case.weight.normal_(std=width**-0.5)
            case.gamma.normal_()
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        assert_same_bits(results, call())
