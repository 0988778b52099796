"""Rotary position embedding compared with a product of complex numbers."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import check_gradients

from lightseq_fairseq import ops

T, H, D = 7, 3, 8


def tables(rows=T, width=D):
    torch.manual_seed(1)
    angles = 20 * torch.rand(rows, width // 2)
    return angles.cos(), angles.sin()


def rotated(x, cos, sin):
    """Pairs of columns as complex numbers."""
    left, right = x.double().chunk(2, -1)
    turned = torch.complex(left, right) * torch.complex(cos.double(), sin.double())[:, None]
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotates_in_place(dtype):
    torch.manual_seed(0)
    qkv = torch.randn(T, 3 * H, D).to(dtype)
    before, (cos, sin) = qkv.clone(), tables()
    ops.rotary_embedding(qkv[:, : 2 * H], cos, sin, False)
    assert torch.equal(qkv[:, 2 * H :], before[:, 2 * H :])
    expected = rotated(before[:, : 2 * H], cos, sin)
    if dtype == torch.bfloat16:  # rounded once
        assert torch.equal(qkv[:, : 2 * H], expected.float().to(dtype))
    else:
        torch.testing.assert_close(qkv[:, : 2 * H], expected.to(dtype))


def test_the_transpose_is_the_inverse():
    x, angles = torch.randn(T, H, D).double(), tables()
    y = x.clone()
    ops.rotary_embedding(y, *angles, False)
    assert (y - x).abs().max() > 0.1
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=1e-6)
    ops.rotary_embedding(y, *angles, True)
    torch.testing.assert_close(y, x, rtol=1e-6, atol=1e-6)


def test_gradcheck():
    cos, sin = tables()
    scaled = 1.3 * cos, 1.3 * sin  # as some kinds of positions do: no rotation any more

    def of(x, transposed):
        y = x.clone(memory_format=torch.contiguous_format)
        ops.rotary_embedding(y, *scaled, transposed)
        return (y,)

    x = torch.randn(T, H, D).double()
    check_gradients(lambda x: of(x, False), lambda douts, *_: of(douts[0], True), [x])
