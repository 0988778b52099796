"""Token and position embedding, with and without LayerNorm, compared with torch's; gradients."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import (
    assert_as_good_as,
    assert_cast_of,
    check_gradients,
    check_op,
    leaf,
    make_cast,
    make_rng,
    poisoned,
)
from torch.nn import functional

from lightseq_fairseq import ops

V, P, C, PAD, SCALE, SITE, EPS = 11, 9, 6, 1, 2.5, 4, 1e-5
TOKENS = torch.tensor([3, 5, 3, PAD, 0, 10, 3], dtype=torch.int32)
POSITIONS = torch.tensor([2, 3, 4, 1, 2, 3, 8])


def tables(dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(V, C, dtype=dtype), torch.randn(P, C, dtype=dtype)


def norm_vectors(dtype=torch.float64):
    """gamma and beta."""
    torch.manual_seed(1)
    return torch.randn(C, dtype=dtype), torch.randn(C, dtype=dtype)


def dropout(p):
    return ops.Dropout(p, make_rng(), SITE)


def fwd(p, tokens, positions, weight, position_weight):
    return ops.embedding_fwd(tokens, weight, positions, position_weight, SCALE, dropout(p))[0]


def normed_fwd(p, tokens, positions, weight, position_weight, gamma, beta):
    """y, mean and rstd."""
    tables = tokens, weight, positions, position_weight
    return ops.embedding_layer_norm_fwd(*tables, gamma, beta, SCALE, dropout(p), EPS)[:3]


def normed_bwd(p, dy, statistics, tokens, positions, weight, position_weight, gamma, *_):
    """Gradients of weight, position_weight (None without), gamma and beta."""
    x = fwd(0.0, tokens, positions, weight, position_weight)
    grads = [
        None if t is None else poisoned(*t.shape, dtype=t.dtype)
        for t in (weight, position_weight, gamma, gamma)
    ]
    dx = ops.embedding_layer_norm_bwd(dy, x, gamma, *statistics, dropout(p), *grads[2:], False)
    ops.embedding_bwd(dx, tokens, positions, SCALE, -1, dropout(0.0), *grads[:2], False)
    return tuple(grads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_without_beta_it_is_zero(dtype):
    given = TOKENS, POSITIONS, *tables(dtype), norm_vectors(dtype)[0]
    zeros = torch.zeros(C, dtype=dtype)
    assert all(map(torch.equal, normed_fwd(0.4, *given, None), normed_fwd(0.4, *given, zeros)))


def normed_plain(p, tokens, positions, weight, position_weight, gamma, beta):
    """y in torch, with our dropout's mask."""
    x = SCALE * weight[tokens]
    if position_weight is not None:
        x = x + position_weight[positions]
    keep = ops.keep_mask(make_rng(), SITE, torch.arange(len(tokens)), C, p)
    return functional.layer_norm(x, (C,), gamma, beta, EPS) * keep / (1 - p)


def bwd(dy, p, accumulate=False, dweight=None, dposition=None, positions=POSITIONS, pad=PAD):
    dweight = poisoned(V, C, dtype=dy.dtype) if dweight is None else dweight
    dposition = poisoned(P, C, dtype=dy.dtype) if dposition is None else dposition
    ops.embedding_bwd(dy, TOKENS, positions, SCALE, pad, dropout(p), dweight, dposition, accumulate)
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
        y = fwd(p, TOKENS, positions[0], weight, positions[1])
    torch.testing.assert_close(y, expected)

    dy = torch.randn_like(y)
    expected.backward(dy)
    dweight = poisoned(V, C)
    dposition = poisoned(P, C) if with_positions else None
    ops.embedding_bwd(dy, TOKENS, positions[0], SCALE, PAD, dropout(p), dweight, dposition, False)
    torch.testing.assert_close(dweight, weight.grad)
    if with_positions:
        torch.testing.assert_close(dposition, position_weight.grad)


@pytest.mark.parametrize("with_positions", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_layer_norm_equals_torch(with_positions, p):
    inputs = (
        [*tables(), *norm_vectors()] if with_positions else [tables()[0], None, *norm_vectors()]
    )
    leaves = [None if x is None else leaf(x, x.dtype) for x in inputs]
    expected = normed_plain(p, TOKENS, POSITIONS, *leaves)
    positions = POSITIONS if with_positions else None
    y, *statistics = normed_fwd(p, TOKENS, positions, *inputs)
    torch.testing.assert_close(y, expected.detach())
    dy = torch.randn_like(y)
    expected.backward(dy)
    for ours, x in zip(normed_bwd(p, dy, statistics, TOKENS, positions, *inputs), leaves):
        assert (ours is None) == (x is None)
        if x is not None:
            torch.testing.assert_close(ours, x.grad)


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_layer_norm_gradcheck(p):
    check_gradients(
        lambda *inputs: normed_fwd(p, TOKENS, POSITIONS, *inputs),
        lambda douts, inputs, outputs: normed_bwd(
            p, douts[0], outputs[1:], TOKENS, POSITIONS, *inputs
        ),
        [*tables(), *norm_vectors()],
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layer_norm_16_bit(dtype):
    torch.manual_seed(0)
    indices = torch.randint(0, V, (500,)), torch.randint(0, P, (500,))
    inputs = [*tables(dtype), *norm_vectors(dtype)]
    dy = torch.randn(500, C, dtype=dtype)
    results = []
    for kind in (dtype, torch.float64):
        leaves = [leaf(x, kind) for x in inputs]
        y = normed_plain(0.1, *indices, *leaves)
        y.backward(dy.to(kind))
        results.append((y.detach(), *(x.grad for x in leaves)))
    y, *statistics = normed_fwd(0.1, *indices, *inputs)
    ours = (y, *normed_bwd(0.1, dy, statistics, *indices, *inputs))
    for mine, plain, exact in zip(ours, *results, strict=True):
        assert_as_good_as(mine, plain, exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_layer_norm_accumulates(dtype):
    x, gamma = torch.randn(2, 7, C, dtype=dtype)[0], norm_vectors(dtype)[0]
    mean, rstd = torch.randn(2, 7, dtype=torch.promote_types(dtype, torch.float32))
    exact = [poisoned(C, dtype=mean.dtype) for _ in range(2)]
    before = torch.randn(2, C, dtype=dtype)
    after = before.clone()
    settings = (gamma, mean, rstd, dropout(0.2))
    dx = ops.embedding_layer_norm_bwd(x, x, *settings, *exact, False)
    assert torch.equal(dx, ops.embedding_layer_norm_bwd(x, x, *settings, *after, True))
    torch.testing.assert_close(after, (before + torch.stack(exact)).to(dtype))
    assert torch.equal(dx, ops.embedding_layer_norm_bwd(x, x, *settings, None, None, False))


def test_layer_norm_keeps_a_nan_that_is_dropped():
    inputs = [*tables(), *norm_vectors()]
    dy = torch.ones(len(TOKENS), C, dtype=torch.float64)
    keep = ops.keep_mask(make_rng(), SITE, torch.arange(len(TOKENS)), C, 0.4)
    row, column = (int(i) for i in (keep == 0).nonzero()[0])
    dy[row, column] = torch.nan
    _, *statistics = normed_fwd(0.4, TOKENS, POSITIONS, *inputs)
    dweight, _, _, dbeta = normed_bwd(0.4, dy, statistics, TOKENS, POSITIONS, *inputs)
    assert dweight[TOKENS[row]].isnan().all() and dbeta[column].isnan()


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
        lambda weight, position_weight: (fwd(p, TOKENS, POSITIONS, weight, position_weight),),
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
    y = fwd(0.1, tokens, positions, *tables_16)
    ops.embedding_bwd(
        dy, tokens, positions, SCALE, -1, dropout(0.1), dweight, dposition, accumulate=False
    )
    for ours, plain, exact in zip(
        (y, dweight, dposition), results["plain"], results["exact"], strict=True
    ):
        assert_as_good_as(ours, plain, exact)


def test_empty():
    weight, position_weight = tables()
    none = torch.empty(0, dtype=torch.int64)
    y = fwd(0.1, none, none, weight, position_weight)
    assert y.shape == (0, C)
    assert fwd(0.1, none, None, weight[:0], None).shape == (0, C)
    dweight = poisoned(V, C)
    ops.embedding_bwd(y, none, None, SCALE, PAD, dropout(0.1), dweight, None, False)
    assert dweight.eq(0).all()
    inputs = [*tables(), *norm_vectors()]
    y, *statistics = normed_fwd(0.1, none, none, *inputs)
    assert y.shape == (0, C) and [x.shape for x in statistics] == [(0,), (0,)]
    assert all(x.eq(0).all() for x in normed_bwd(0.1, y, statistics, none, none, *inputs))


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("has_norm", [False, True])
def test_casts_the_rounded_result(rows, has_norm):
    """The other results are those without a cast."""
    name = "embedding_layer_norm_fwd" if has_norm else "embedding_fwd"
    op, given = getattr(ops, name), wide_arguments(rows, has_norm)
    *plain, nothing = op(*given)
    cast = make_cast()
    *ours, values = op(*given, cast=cast)
    assert all(map(torch.equal, ours, plain)) and nothing.numel() == 0
    assert_cast_of(plain[0], [values], cast)
    assert rows < 37 or cast.saturated > 3
    if rows == 37:
        check_op(name, *given, cast)


def wide_arguments(rows, has_norm):
    """Arguments in bfloat16 for a cast: the width is a multiple of 16."""
    torch.manual_seed(0)
    tokens, positions = torch.randint(V, (rows,)), torch.arange(rows) % P
    weight, position_weight, (gamma, beta) = (
        (torch.randn(n, 48) * 4).bfloat16() for n in (V, P, 2)
    )
    norm, eps = ((gamma, beta), (EPS,)) if has_norm else ((), ())
    return tokens, weight, positions, position_weight, *norm, SCALE, dropout(0.1), *eps


@pytest.mark.parametrize("has_norm", [False, True])
def test_a_cast_needs_rows_of_a_multiple_of_16_numbers(has_norm):
    op = ops.embedding_layer_norm_fwd if has_norm else ops.embedding_fwd
    tokens, weight, positions, position_weight, *rest = wide_arguments(7, has_norm)
    vectors = [x[:40] if isinstance(x, torch.Tensor) else x for x in rest]
    with pytest.raises(ValueError, match="fp8 needs rows of a multiple of 16 numbers, got 40"):
        op(tokens, weight[:, :40], positions, position_weight[:, :40], *vectors, cast=make_cast())


def test_a_padding_row_past_the_table_is_refused():
    with pytest.raises(ValueError, match="padding_idx is 11, dweight has 11 rows"):
        bwd(torch.randn(len(TOKENS), C), 0.0, pad=V)
