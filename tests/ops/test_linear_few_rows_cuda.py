"""The kernel for GEMMs of few rows: any size; and it may start before the kernel before it has
ended.

Within a graph, after kernels that it knows, it may read its weights early. Otherwise it does not,
and computes the same bits: so results of graphs are compared with eager ones.
"""

from __future__ import annotations

import pytest
import torch
from helpers.linear_cases import (
    NORM_EPS,
    Chain,
    assert_replays_have_new_weights,
    assert_same_bits,
    captured,
    drawn,
    inside,
    positive_part,
)
from helpers.ops_testing import assert_as_good_as, make_rng, poison_cache
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops

MOST = 16  # most rows of the kernel; larger GEMMs use cuBLASLt
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu_accurate": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}
# Inputs and outputs: one tile; an incomplete chunk of inputs; blocks of one to four tiles; more
# inputs than are in flight; more blocks than run at the same time.
SIZES = [
    (8, 8), (8, 40_000), (40_000, 8), (72, 24), (1024, 1024), (1032, 1048), (1024, 3072),
    (1024, 4096), (4096, 1024), (4096, 4096), (1024, 40_000), (40_008, 1024), (4096, 40_008),
]  # fmt: skip


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(6)


@DTYPES
@pytest.mark.parametrize(("k", "n"), SIZES)
def test_errs_no_more_than_torch(k: int, n: int, dtype: torch.dtype) -> None:
    """Every number of rows, with and without bias and ReLU, strided or not."""
    x = drawn(MOST + 1, k, dtype=dtype)
    weight, bias = drawn(n, k, dtype=dtype, scale=k**-0.5), drawn(n, dtype=dtype)
    product = x.double() @ weight.double().t()
    wide_x, wide_weight = inside(x), inside(weight)
    for rows in range(1, MOST + 2):
        few, exact = x[:rows], product[:rows]
        poison_cache()
        y = ops.linear_fwd(few, weight, None)
        assert y.is_contiguous()
        assert_as_good_as(y, functional.linear(few, weight), exact, f"{rows} rows")
        y = ops.linear_fwd(wide_x[:rows], wide_weight, bias)
        plain, exact = functional.linear(few, weight, bias), exact + bias.double()
        assert_as_good_as(y, plain, exact, f"{rows} rows, bias")
        y = positive_part(wide_x[:rows], weight, bias)
        assert_as_good_as(y, plain.relu(), exact.relu(), f"{rows} rows, positive part")
        assert y.ge(0).all()


@DTYPES
@pytest.mark.parametrize(("k", "n"), [(8, 8), (136, 1048), (1024, 4096), (4096, 1024)])
def test_a_row_does_not_depend_on_the_others(k: int, n: int, dtype: torch.dtype) -> None:
    x, weight = drawn(MOST, k, dtype=dtype), drawn(n, k, dtype=dtype)
    bias = drawn(n, dtype=dtype)
    y = ops.linear_fwd(x, weight, bias)
    for rows in range(1, MOST + 1):
        for first in {0, MOST - rows}:
            few = ops.linear_fwd(x[first : first + rows], weight, bias)
            assert torch.equal(few, y[first : first + rows])
    x[3, 5] = torch.nan
    assert ops.linear_fwd(x, weight, bias).isnan().nonzero()[:, 0].unique().tolist() == [3]


@DTYPES
@pytest.mark.parametrize(("k", "n"), [(97, 131), (1032, 97), (36, 1)])
def test_padded_widths(k: int, n: int, dtype: torch.dtype) -> None:
    x, weight, bias = drawn(5, k, dtype=dtype), drawn(n, k, dtype=dtype), drawn(n, dtype=dtype)
    exact = functional.linear(x.double(), weight.double(), bias.double())
    poison_cache()
    assert_as_good_as(ops.linear_fwd(x, weight, bias), functional.linear(x, weight, bias), exact)


@DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("k", "n"), [(768, 3072), (72, 136)])
def test_activation_in_the_same_kernel(k: int, n: int, activation: str, dtype: torch.dtype) -> None:
    x, weight = drawn(MOST, k, dtype=dtype), drawn(n, k, dtype=dtype, scale=k**-0.5)
    bias, none = drawn(n, dtype=dtype), ops.Dropout(0.0, make_rng(device="cuda"), 1)
    function = ACTIVATIONS[activation]
    exact = function(functional.linear(x.double(), weight.double(), bias.double()))
    plain = function(functional.linear(x, weight, bias))
    for rows in (1, 7, MOST):
        poison_cache()
        given = x[:rows], weight, bias, activation, none
        y, _, slope = ops.linear_activation_fwd(*given, False)
        assert_as_good_as(y, plain[:rows], exact[:rows], f"{rows} rows")
        assert slope.numel() == 0
        with_slope, _, _ = ops.linear_activation_fwd(*given, True)  # by two kernels
        torch.testing.assert_close(y, with_slope, rtol=2e-2, atol=2e-2)
    x[3, 5] = torch.nan
    y, _, _ = ops.linear_activation_fwd(x, weight, bias, activation, none, False)
    assert y.isnan().nonzero()[:, 0].unique().tolist() == [3]


# --- Within a graph, started early -----------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("rows", [1, 4, 8, 16])
@pytest.mark.parametrize("sizes", [(1024, 4096, 40_000), (256, 520, 1000)], ids=["big", "small"])
def test_weights_rewritten_between_replays(
    sizes: tuple[int, int, int], rows: int, dtype: torch.dtype
) -> None:
    chain = Chain(rows, *sizes, dtype)
    graph, results = captured(chain)
    assert_replays_have_new_weights(chain, graph, results)
    before = [x.clone() for x in chain()]
    for _ in range(50):  # in quick succession; weights are rewritten with their own values
        for weight in chain.weights:
            weight.copy_(weight.clone())
        graph.replay()
    assert_same_bits(results, before)


@DTYPES
@pytest.mark.parametrize("norm_between", [True, False])
def test_weights_written_within_the_graph(norm_between: bool, dtype: torch.dtype) -> None:
    """By the kernel just before, or by the one before that, which lets later kernels start early.

    The weights change from replay to replay: a kernel that reads too early would read those of the
    last replay.
    """
    k, n, rows = 2048, 8192, 4
    x, gamma, beta = (drawn(*s, dtype=dtype) for s in ((rows, k), (k,), (k,)))
    parts = [torch.empty(n // 2, k, dtype=dtype, device="cuda") for _ in range(2)]
    rng = make_rng(device="cuda")

    def call() -> list[Tensor]:
        y, weight = x, torch.cat(parts)
        if norm_between:
            norm = None, None, gamma, beta, ops.Dropout(0.0, rng, 1), NORM_EPS
            y = ops.dropout_residual_layer_norm_fwd(x, *norm)[1]
        return [y, ops.linear_fwd(y, weight, None)]

    graph, results = captured(call)
    for _ in range(50):
        for part in parts:
            part.normal_(std=k**-0.5)
        graph.replay()
        assert_same_bits(results, call())


@DTYPES
def test_results_of_one_product_are_the_next_ones_rows(dtype: torch.dtype) -> None:
    """GEMMs one after the other, each of which lets the next one start at once."""
    weights = [drawn(1024, 1024, dtype=dtype, scale=1024**-0.5) for _ in range(24)]
    x = drawn(4, 1024, dtype=dtype)

    def call() -> list[Tensor]:
        results = [x]
        for weight in weights:
            results.append(ops.linear_fwd(results[-1], weight, None))
        return results

    graph, results = captured(call)
    for _ in range(20):
        x.normal_()
        for result in results[1:]:
            result.fill_(torch.nan)
        graph.replay()
        assert_same_bits(results, call())
