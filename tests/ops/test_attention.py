"""Packed attention compared with a loop over sentences in plain torch."""

from __future__ import annotations

import pytest
import torch
from helpers import attention_cases
from helpers.attention_cases import TAIL_K, column_slices
from helpers.ops_testing import (
    assert_as_good_as,
    assert_cast_of,
    check_gradients,
    make_cast,
    poisoned,
)

from lightseq_fairseq import ops

H, D = 3, 4
# (query lengths, key lengths): different lengths; single tokens; empty on one side, the other or
# both, at the first and the last place; no token at all.
SELF = ([3, 1, 5, 2], None)
CROSS = ([3, 1, 5, 2], [2, 6, 1, 3])
HOLES = ([3, 0, 1, 4, 0, 2], [2, 3, 5, 0, 0, 4])
EDGES = ([0, 3, 2, 0], [4, 2, 0, 3])
NOTHING = ([0, 0], [0, 0])


class Case(attention_cases.Case):
    """A small case on a CPU."""

    def __init__(
        self, lengths, causal=False, p=0.0, dtype=torch.float64, heads=H, width=D, window=0
    ):
        super().__init__(lengths, dtype, causal, p, heads, width, "cpu", window)

    def fwd(self, q=None, k=None, v=None):
        q, k, v = (
            old if new is None else new for new, old in zip((q, k, v), self.qkv, strict=True)
        )
        out, lse, values = ops.attention_fwd(q, k, v, *self.settings())
        assert values.numel() == 0
        return out, lse

    def bwd(self, out, lse, gradients=None):
        if gradients is None:
            gradients = tuple(poisoned(*x.shape, dtype=self.dtype) for x in self.qkv)
        ops.attention_bwd(self.dout, *self.qkv, out, lse, *self.settings(), *gradients)
        return gradients


@pytest.mark.parametrize(
    "lengths", [SELF, CROSS, HOLES, EDGES, NOTHING], ids=["self", "cross", "holes", "edges", "none"]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_equals_loop(lengths, causal, p):
    case = Case(lengths, causal, p)
    out, lse = case.fwd()
    assert out.is_contiguous() and lse.dtype == torch.float64
    expected = case.plain()
    for name, ours, theirs in zip(
        ("out", "lse", "dq", "dk", "dv"), (out, lse, *case.bwd(out, lse)), expected, strict=True
    ):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 2, 4, 9])
def test_a_window_equals_loop(window, causal):
    """Of a query and its neighbours, fewer tokens than a sentence has, as many, or more."""
    case = Case(([3, 1, 5, 0, 8], None), causal, 0.3, window=window)
    out, lse = case.fwd()
    for ours, theirs in zip((out, lse, *case.bwd(out, lse)), case.plain(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_window_keeps_the_bits_of_dropout():
    """So with equal scores and values of 1, a query's result is its share of kept neighbours."""
    case = Case(([8], None), False, 0.5, window=2)
    case.q.zero_(), case.v.fill_(1)
    keep = ops.attention_keep_mask(case.rng, attention_cases.SITE, torch.arange(8 * H), 8, 0.5)
    place = torch.arange(8)
    near = ((place - place[:, None]).abs() <= 2)[:, None]
    expected = (keep.view(8, H, 8) * near).sum(-1) / near.sum(-1) / 0.5
    torch.testing.assert_close(case.fwd()[0][:8], expected[..., None].expand(8, H, D).double())


def test_a_window_is_for_one_side():
    case = Case(CROSS, window=2)
    with pytest.raises(ValueError, match="with a window, cu_q and cu_k must be the same tensor"):
        case.fwd()


@pytest.mark.parametrize("causal", [False, True])
def test_longest_may_be_an_upper_bound(causal):
    case = Case(CROSS, causal, 0.3)
    out, lse = case.fwd()
    settings = list(case.settings())
    settings[2:4] = 12, 11
    wider = ops.attention_fwd(*case.qkv, *settings)[:2]
    torch.testing.assert_close(wider, (out, lse))


def test_views_of_one_product():
    """q, k, v and their gradients are column blocks of [T, 3 * H * D], as in the layers."""
    case = Case(SELF, True, 0.3)
    views = case.qkv
    case.q, case.k, case.v = (x.contiguous() for x in views)
    expected = case.fwd()
    gradients = case.bwd(*expected)
    case.q, case.k, case.v = views
    out, lse = case.fwd()
    torch.testing.assert_close((out, lse), expected)
    dqkv = poisoned(len(case.q), 3, H, D)
    case.bwd(out, lse, dqkv.unbind(1))
    torch.testing.assert_close(dqkv.unbind(1), gradients)


def test_odd_strides():
    """Heads that are not adjacent, and rows whose stride is no multiple of the head width."""
    case = Case(CROSS, False, 0.0)
    expected = case.fwd()
    spaced = poisoned(len(case.q), H * D + 3)
    spaced[:, : H * D] = case.q.flatten(1)
    case.q = spaced[:, : H * D].unflatten(1, (H, D))
    case.k = case.k.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(case.fwd(), expected)


def test_rows_past_the_last_sentence_are_zero():
    case = Case(SELF, True, 0.3)
    out, lse = case.fwd()
    for x in (out, lse, *case.bwd(out, lse)):
        assert x[-TAIL_K:].eq(0).all()


@pytest.mark.parametrize("lengths", [SELF, CROSS, HOLES], ids=["self", "cross", "holes"])
@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(lengths, causal):
    case = Case(lengths, causal, 0.3, heads=2, width=2)

    def backward(douts, saved, outputs):
        case.dout = douts[0].contiguous()
        case.q, case.k, case.v = saved
        return case.bwd(*outputs)

    inputs = [x.nan_to_num(0.5) for x in case.qkv]
    check_gradients(lambda *qkv: case.fwd(*qkv), backward, inputs)


@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_large_scores(scale):
    """Rows in which all probabilities but one underflow in float32."""
    exact = Case(CROSS)
    exact.q *= scale
    case = Case(CROSS, dtype=torch.float32)
    case.q *= scale
    out, lse = case.fwd()
    assert lse.dtype == torch.float64
    expected = exact.plain()
    for ours, theirs in zip((out, lse, *case.bwd(out, lse)), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_16_bit(dtype, causal):
    lengths = [17, 30, 1, 24], [11, 40, 8, 24]
    case = Case(lengths, causal, 0.1, dtype, heads=2, width=32)
    out, lse = case.fwd()
    assert lse.dtype == torch.float32
    ours = out, *case.bwd(out, lse)
    plain, exact = (
        (result[0], *result[2:]) for result in (case.plain(dtype), case.plain(torch.float64))
    )
    for name, *triple in zip(("out", "dq", "dk", "dv"), ours, plain, exact, strict=True):
        assert_as_good_as(*triple, name)


def bf16_case():
    """Its width is a multiple of 16. Rows that belong to no sentence are zero."""
    case = Case(HOLES, True, 0.1, torch.bfloat16, width=16)
    for x in (*case.qkv, case.dout):
        x.nan_to_num_(0.0).mul_(4)
    return case


def test_casts_the_rounded_result():
    """The other results are those without a cast."""
    case, cast = bf16_case(), make_cast()
    out, lse, values = ops.attention_fwd(*case.qkv, *case.settings(), cast)
    assert all(map(torch.equal, (out, lse), case.fwd()))
    assert_cast_of(out.flatten(1), [values], cast)
    assert cast.saturated > 3 and not values[case.used_q :].view(torch.uint8).any()


@pytest.mark.parametrize("shared", [False, True])
def test_backward_casts_the_rounded_gradients(shared):
    """The casts of queries and of keys may be the same."""
    case, q_cast = bf16_case(), make_cast()
    k_cast = q_cast if shared else make_cast(2.0**-8)
    out, lse = case.fwd()
    given = case.dout, *case.qkv, out, lse, *case.settings()
    memory = column_slices(case)
    ops.attention_bwd(*given, *memory, q_cast, k_cast)
    dq, dk, dv = (x.flatten(1) for x in case.bwd(out, lse))
    casts = [(q_cast, ((memory[0], dq),)), (k_cast, ((memory[1], dk), (memory[2], dv)))]
    if shared:
        casts = [(q_cast, (*casts[0][1], *casts[1][1]))]
    for cast, gradients in casts:
        values = torch.cat([x.flatten(1).view(torch.uint8) for x, _ in gradients])
        assert_cast_of(torch.cat([exact for _, exact in gradients]), [values], cast)
        assert cast.saturated > 3
    assert not memory[0][case.used_q :].view(torch.uint8).any()
    assert not any(x[case.used_k :].view(torch.uint8).any() for x in memory[1:])


def test_a_cast_needs_rows_of_a_multiple_of_16_numbers():
    case = bf16_case()
    narrow = [x[..., :8].contiguous() for x in case.qkv]
    with pytest.raises(ValueError, match="fp8 needs rows of a multiple of 16 numbers, got 24"):
        ops.attention_fwd(*narrow, *case.settings(), make_cast())


def test_backward_checks_boundaries():
    case = Case(CROSS)
    out, lse = case.fwd()
    case.cu_k[1] = 16
    with pytest.raises(ValueError, match="attention_bwd: cu_k must ascend"):
        case.bwd(out, lse)


@pytest.mark.parametrize(
    ("index", "boundaries", "message"),
    [
        (3, [0, 5, 4, 9, 14], r"cu_q must ascend within \[0, 16\], sentence 1 is rows 5 to 4"),
        (4, [0, 5, 9, 13, 16], r"cu_k must ascend within \[0, 15\], sentence 3 is rows 13 to 16"),
        (3, [0, 2, 8, 9, 14], "max_q is 5, but sentence 1 of cu_q has 6 rows"),
        (4, [0, 2, 5, 6, 14], "max_k is 6, but sentence 3 of cu_k has 8 rows"),
    ],
)
def test_boundaries_are_checked(monkeypatch, index, boundaries, message):
    monkeypatch.delenv("LIGHTSEQ_CHECK_INDICES", raising=False)
    case = Case(CROSS)
    arguments = [*case.qkv, *case.settings()]
    ops.attention_fwd(*arguments)
    arguments[index] = torch.tensor(boundaries, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"attention_fwd: {message}"):
        ops.attention_fwd(*arguments)
