"""The kernel of rotary positions compared with the reference."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import flat

from lightseq_fairseq import ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def tables(rows, width):
    angles = 1000 * torch.rand(rows, width // 2, device="cuda")
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("rows", "heads", "width"),
    [
        (1, 1, 8),
        (5, 3, 40),
        (700, 24, 64),
        (33, 33, 128),
        (300, 6, 72),
        (9, 2, 2048),
        (70_000, 2, 8),
    ],
)
def test_equals_the_reference(rows, heads, width, transposed, dtype):
    """Queries and keys are columns of a product's result; the values beside them do not change."""
    torch.manual_seed(0)
    qkv = torch.randn(rows, heads + 1, width, device="cuda").to(dtype)
    qkv[:, heads] = torch.nan
    expected, (cos, sin) = qkv.double(), tables(rows, width)
    ops.REFERENCES["rotary_embedding"](*flat((expected[:, :heads], cos, sin, transposed)))
    ops.rotary_embedding(qkv[:, :heads], cos, sin, transposed)
    assert qkv[:, heads].isnan().all()
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(
        qkv[:, :heads].double(), expected[:, :heads], rtol=0.5 * tolerance, atol=tolerance
    )


def test_heads_need_not_be_neighbours():
    x, angles = torch.randn(50, 4, 64, device="cuda"), tables(50, 64)
    apart = x.transpose(0, 1).contiguous().transpose(0, 1)
    for y in (x, apart):
        ops.rotary_embedding(y, *angles, False)
    assert torch.equal(x, apart)


def test_no_tokens():
    ops.rotary_embedding(torch.randn(0, 4, 64, device="cuda"), *tables(0, 64), False)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(4, 2, 12), "x has rows of 12 elements; .* must be a multiple of 8"),
        (torch.randn(4, 2, 64).double(), "x must be float32, float16 or bfloat16 on a GPU"),
        (torch.randn(4, 2, 4096), "heads must have at most 2048 columns"),
    ],
)
def test_refusals(x, message):
    with pytest.raises(RuntimeError, match=f"rotary_embedding: {message}"):
        ops.rotary_embedding(x.cuda(), *tables(4, x.shape[2]), False)
