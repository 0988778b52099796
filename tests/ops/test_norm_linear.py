"""The end of a sublayer with the product behind it: the numbers of the two ops."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.ops_testing import make_rng
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.ops.norm_linear import takes_rows

EPS = 1e-5


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize("activation", ["identity", "relu", "gelu", "gelu_accurate", "silu"])
@pytest.mark.parametrize("keep_result", [False, True])
def test_equals_the_ops_one_after_the_other(keep_result: bool, activation: str) -> None:
    torch.manual_seed(3)
    no_dropout = ops.Dropout(0.0, make_rng(), 1)
    x, residual, weight = (drawn(*shape) for shape in ((5, 48), (5, 48), (24, 48)))
    gamma, *vectors = (drawn(size) for size in (48, 48, 48, 24))
    for which in itertools.product([True, False], repeat=4):
        bias, beta, weight_bias = (v if has else None for v, has in zip(vectors, which[1:]))
        other = residual if which[0] else None
        total, result, *_ = ops.dropout_residual_layer_norm_fwd(
            x, bias, other, gamma, beta, no_dropout, EPS
        )
        expected = ops.bias_activation_dropout_fwd(
            ops.linear_fwd(result, weight, weight_bias), None, activation, no_dropout
        )
        kept, y = ops.norm_linear_fwd(
            x, bias, other, gamma, beta, EPS, weight, weight_bias, activation, keep_result
        )
        assert torch.equal(kept, result if keep_result else total)
        # The two ops round before the activation.
        torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)
        if activation in ("identity", "relu"):
            assert torch.equal(y, expected)


def test_rows_that_it_takes() -> None:
    assert takes_rows(drawn(6, 2048))
    for x in (drawn(7, 8), drawn(1, 2056), drawn(1, 12), drawn(1, 8, dtype=torch.float16)):
        assert not takes_rows(x)
        n = x.shape[1]
        vector, weight = torch.zeros_like(x[0]), x.new_zeros(8, n)
        with pytest.raises(ValueError, match=r"norm_linear_fwd: x must (have|be)"):
            ops.norm_linear_fwd(x, *[vector, None] * 2, EPS, weight, None, "relu", False)
