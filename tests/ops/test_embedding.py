"""Token and position embedding compared with torch's, and its gradients."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import (
    assert_as_good_as,
    check_gradients,
    check_op,
    leaf,
    make_rng,
    poisoned,
)
from torch.nn import functional

from lightseq_fairseq import ops

V, P, C, PAD, SCALE, SITE = 11, 9, 6, 1, 2.5, 4
TOKENS = torch.tensor([3, 5, 3, PAD, 0, 10, 3], dtype=torch.int32)
POSITIONS = torch.tensor([2, 3, 4, 1, 2, 3, 8])


def tables(dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(V, C, dtype=dtype), torch.randn(P, C, dtype=dtype)


def bwd(dy, p, accumulate=False, dweight=None, dposition=None, positions=POSITIONS, pad=PAD):
    dweight = poisoned(V, C, dtype=dy.dtype) if dweight is None else dweight
    dposition = poisoned(P, C, dtype=dy.dtype) if dposition is None else dposition
    ops.embedding_bwd(
        dy,
        TOKENS,
        positions,
        SCALE,
        pad,
        p,
        make_rng(),
        SITE,
        dweight,
        dposition,
        accumulate,
    )
    return dweight, dposition


@pytest.mark.parametrize("with_positions", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_equals_torch(with_positions, p):
    weight, position_weight = (x.requires_grad_() for x in tables())
    expected = SCALE * functional.embedding(TOKENS, weight, padding_idx=PAD)
    if with_positions:
        expected = expected + functional.embedding(POSITIONS, position_weight)
    keep = ops.keep_mask(make_rng(), SITE, torch.arange(len(TOKENS)), C, p)
    expected = expected * keep / (1 - p)
    positions = (POSITIONS, position_weight) if with_positions else (None, None)
    with torch.no_grad():
        y = ops.embedding_fwd(TOKENS, weight, *positions, SCALE, p, make_rng(), SITE)
    torch.testing.assert_close(y, expected)

    dy = torch.randn_like(y)
    expected.backward(dy)
    dweight = poisoned(V, C)
    dposition = poisoned(P, C) if with_positions else None
    ops.embedding_bwd(
        dy, TOKENS, positions[0], SCALE, PAD, p, make_rng(), SITE, dweight, dposition, False
    )
    torch.testing.assert_close(dweight, weight.grad)
    if with_positions:
        torch.testing.assert_close(dposition, position_weight.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_accumulate_adds(dtype):
    dy = torch.randn(len(TOKENS), C, dtype=dtype)
    # Gradients of 16-bit tables are summed in float32 and rounded once.
    exact = torch.promote_types(dtype, torch.float32)
    fresh = bwd(dy, 0.2, False, poisoned(V, C, dtype=exact), poisoned(P, C, dtype=exact))
    before = [torch.randn(V, C, dtype=dtype), torch.randn(P, C, dtype=dtype)]
    after = bwd(dy, 0.2, True, before[0].clone(), before[1].clone())
    for new, old, gradient in zip(after, before, fresh, strict=True):
        torch.testing.assert_close(new, (old + gradient).to(dtype))
    assert torch.equal(after[0][PAD], before[0][PAD])


def test_no_padding_row():
    dy = torch.ones(len(TOKENS), C, dtype=torch.float64)
    assert torch.equal(bwd(dy, 0.0, pad=-1)[0][PAD], SCALE * dy[0])
    assert bwd(dy, 0.0)[0][PAD].eq(0).all()


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_gradcheck(p):
    check_gradients(
        lambda weight, position_weight: (
            ops.embedding_fwd(
                TOKENS, weight, POSITIONS, position_weight, SCALE, p, make_rng(), SITE
            ),
        ),
        lambda douts, inputs, outputs: bwd(douts[0], p, pad=-1),
        tables(),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit(dtype):
    torch.manual_seed(0)
    tokens, positions = torch.randint(0, V, (500,)), torch.randint(0, P, (500,))
    keep = ops.keep_mask(make_rng(), SITE, torch.arange(500), C, 0.1)
    results = {}
    tables_16 = tables(dtype)
    dy = torch.randn(500, C, dtype=dtype)
    for name, kind in (("plain", dtype), ("exact", torch.float64)):
        weight, position_weight = (leaf(x, kind) for x in tables_16)
        y = SCALE * weight[tokens] + position_weight[positions]
        y = y * keep / 0.9
        y.backward(dy.to(kind))
        results[name] = (y.detach(), weight.grad, position_weight.grad)
    dweight, dposition = poisoned(V, C, dtype=dtype), poisoned(P, C, dtype=dtype)
    y = ops.embedding_fwd(
        tokens, tables_16[0], positions, tables_16[1], SCALE, 0.1, make_rng(), SITE
    )
    ops.embedding_bwd(
        dy, tokens, positions, SCALE, -1, 0.1, make_rng(), SITE, dweight, dposition, False
    )
    for ours, plain, exact in zip(
        (y, dweight, dposition), results["plain"], results["exact"], strict=True
    ):
        assert_as_good_as(ours, plain, exact)


def test_empty():
    weight, position_weight = tables()
    none = torch.empty(0, dtype=torch.int64)
    y = ops.embedding_fwd(none, weight, none, position_weight, 1.0, 0.1, make_rng(), 0)
    assert y.shape == (0, C)
    dweight = poisoned(V, C)
    ops.embedding_bwd(y, none, None, 1.0, PAD, 0.1, make_rng(), 0, dweight, None, False)
    assert dweight.eq(0).all()


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("accumulate", [True, False])
def test_opcheck(p, accumulate):
    weight, position_weight = tables()
    rng, dy = make_rng(), torch.randn(len(TOKENS), C, dtype=torch.float64)
    check_op("embedding_fwd", TOKENS, weight, POSITIONS, position_weight, SCALE, p, rng, SITE)
    check_op("embedding_fwd", TOKENS, weight, None, None, SCALE, p, rng, SITE)
    backward = (dy, TOKENS, POSITIONS, SCALE, PAD, p, rng, SITE)
    check_op("embedding_bwd", *backward, torch.zeros(V, C), torch.zeros(P, C), accumulate)
    check_op("embedding_bwd", *backward, torch.zeros(V, C), None, accumulate)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": TOKENS.float()}, "tokens must be int32 or int64, got float32"),
        ({"tokens": TOKENS[None]}, r"tokens must have shape \[T\], got \[1, 7\]"),
        ({"weight": torch.randn(C, V).t()}, "weight must be contiguous in its last dimension"),
        ({"position_weight": None}, "give both positions and position_weight, or neither"),
        ({"positions": POSITIONS[:3]}, r"positions must have shape \[7\], got \[3\]"),
        ({"position_weight": torch.randn(P, C + 1)}, r"position_weight must have shape \[P, 6\]"),
        ({"position_weight": torch.randn(P, C).half()}, "position_weight must be float32, got"),
        ({"p": -0.1}, "p must be at least 0 and below 1"),
    ],
)
def test_refusals(change, message):
    weight, position_weight = tables(torch.float32)
    arguments = {
        "tokens": TOKENS,
        "weight": weight,
        "positions": POSITIONS,
        "position_weight": position_weight,
        "scale": 1.0,
        "p": 0.0,
        "rng": make_rng(),
        "site": 0,
    }
    with pytest.raises(ValueError, match=f"embedding_fwd: {message}"):
        ops.embedding_fwd(**{**arguments, **change})


def test_backward_refusals():
    dy = torch.randn(len(TOKENS), C)
    with pytest.raises(ValueError, match="embedding_bwd: dposition_weight needs positions"):
        bwd(dy, 0.0, positions=None)
    with pytest.raises(ValueError, match="padding_idx is 11, dweight has 11 rows"):
        bwd(dy, 0.0, pad=V)
    with pytest.raises(ValueError, match=r"dweight must have shape \[V, 6\]"):
        bwd(dy, 0.0, dweight=poisoned(V, C + 1))


def test_indices_are_checked(monkeypatch):
    monkeypatch.delenv("LIGHTSEQ_CHECK_INDICES", raising=False)
    weight, position_weight = tables()
    arguments = (1.0, 0.0, make_rng(), 0)
    ops.embedding_fwd(TOKENS, weight, POSITIONS, position_weight, *arguments)
    ops.embedding_fwd(TOKENS[:0], weight[:0], None, None, *arguments)
    with pytest.raises(ValueError, match=r"embedding_fwd: tokens must be in \[0, V\) .* got 11"):
        ops.embedding_fwd(TOKENS + 1, weight, None, None, *arguments)
    with pytest.raises(ValueError, match=r"positions must be in \[0, P\) = \[0, 9\), got -1"):
        ops.embedding_fwd(TOKENS, weight, POSITIONS - 2, position_weight, *arguments)
    dy = torch.randn(len(TOKENS), C)
    with pytest.raises(ValueError, match=r"embedding_bwd: tokens must be in \[0, V\) .* got 10"):
        bwd(dy, 0.0, dweight=poisoned(V - 1, C))
    with pytest.raises(ValueError, match=r"embedding_bwd: positions must be in .* got 8"):
        bwd(dy, 0.0, dposition=poisoned(P - 1, C))
