"""Packed attention compared with a loop over sentences in plain torch."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import (
    assert_as_good_as,
    assert_cast_of,
    check_gradients,
    leaf,
    make_cast,
    make_rng,
    poisoned,
)

from lightseq_fairseq import ops
from lightseq_fairseq.ops.casting import E4M3

H, D, SCALE, SITE = 3, 4, 0.6, 9
# (query lengths, key lengths): different lengths; single tokens; empty on one side, the other or
# both, at the first and the last place; no token at all.
SELF = ([3, 1, 5, 2], None)
CROSS = ([3, 1, 5, 2], [2, 6, 1, 3])
HOLES = ([3, 0, 1, 4, 0, 2], [2, 3, 5, 0, 0, 4])
EDGES = ([0, 3, 2, 0], [4, 2, 0, 3])
NOTHING = ([0, 0], [0, 0])
# Rows of the bucket after the last sentence, on each side.
TAIL_Q, TAIL_K = 3, 2


class Case:
    """Packed tensors for one set of lengths; rows that belong to no sentence are NaN."""

    def __init__(self, lengths, causal=False, p=0.0, dtype=torch.float64, heads=H, width=D):
        torch.manual_seed(0)
        self.lengths_q, self.lengths_k = lengths[0], lengths[1] or lengths[0]
        self.causal, self.p, self.dtype = causal, p, dtype
        self.cu_q, self.cu_k = (
            torch.tensor([0, *x]).cumsum(0).int() for x in (self.lengths_q, self.lengths_k)
        )
        self.used_q, self.used_k = sum(self.lengths_q), sum(self.lengths_k)
        self.q, self.dout = (self.rows(self.used_q, TAIL_Q, heads, width) for _ in range(2))
        self.k, self.v = (self.rows(self.used_k, TAIL_K, heads, width) for _ in range(2))

    def rows(self, used, tail, heads, width):
        x = torch.randn(used + tail, heads, width).to(self.dtype)
        x[used:] = torch.nan
        return x

    def settings(self):
        longest = max(self.lengths_q), max(self.lengths_k)
        dropout = ops.Dropout(self.p, make_rng(), SITE)
        return self.cu_q, self.cu_k, *longest, self.causal, SCALE, dropout

    def fwd(self, q=None, k=None, v=None):
        q, k, v = (
            old if new is None else new for new, old in zip((q, k, v), self.qkv, strict=True)
        )
        out, lse, values = ops.attention_fwd(q, k, v, *self.settings())
        assert values.numel() == 0
        return out, lse

    @property
    def qkv(self):
        return self.q, self.k, self.v

    def bwd(self, out, lse, gradients=None):
        if gradients is None:
            gradients = tuple(poisoned(*x.shape, dtype=self.dtype) for x in self.qkv)
        ops.attention_bwd(self.dout, *self.qkv, out, lse, *self.settings(), *gradients)
        return gradients

    def loop(self, dtype=torch.float64):
        """(out, lse, dq, dk, dv), sentence by sentence; rows that belong to no sentence are
        zero."""
        q, k, v = (leaf(x, dtype) for x in self.qkv)
        rows, heads, _ = q.shape
        keep = ops.attention_keep_mask(
            make_rng(), SITE, torch.arange(rows * heads), max(1, *self.lengths_k), self.p
        ).view(rows, heads, -1)
        out = torch.zeros_like(q, requires_grad=False)
        lse = torch.zeros(rows, heads, dtype=dtype)
        for b, (length_q, length_k) in enumerate(zip(self.lengths_q, self.lengths_k, strict=True)):
            if length_q == 0 or length_k == 0:
                continue
            mine, seen = (
                slice(self.cu_q[b], self.cu_q[b + 1]),
                slice(self.cu_k[b], self.cu_k[b + 1]),
            )
            scores = SCALE * torch.einsum("ihd,jhd->ihj", q[mine], k[seen])
            if self.causal:
                hidden = torch.ones(length_q, length_k).triu(1).bool()
                scores = scores.masked_fill(hidden[:, None], -torch.inf)
            lse[mine] = scores.logsumexp(-1).detach()
            weights = scores.softmax(-1) * keep[mine, :, :length_k] / (1 - self.p)
            out[mine] = torch.einsum("ihj,jhd->ihd", weights, v[seen])
        if out.requires_grad:
            (out * self.dout.to(dtype).nan_to_num(0.0)).sum().backward()
        gradients = (torch.zeros_like(x) if x.grad is None else x.grad for x in (q, k, v))
        return out.detach(), lse, *gradients


@pytest.mark.parametrize(
    "lengths", [SELF, CROSS, HOLES, EDGES, NOTHING], ids=["self", "cross", "holes", "edges", "none"]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_equals_loop(lengths, causal, p):
    case = Case(lengths, causal, p)
    out, lse = case.fwd()
    assert out.is_contiguous() and lse.dtype == torch.float64
    expected = case.loop()
    for name, ours, theirs in zip(
        ("out", "lse", "dq", "dk", "dv"), (out, lse, *case.bwd(out, lse)), expected, strict=True
    ):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")


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
    expected = case.fwd()
    gradients = case.bwd(*expected)

    def blocks(x):
        return [x[:, i * H * D : (i + 1) * H * D].unflatten(1, (H, D)) for i in range(3)]

    tail = TAIL_Q - TAIL_K
    case.k, case.v = (torch.cat((x, x[-1:].expand(tail, H, D))) for x in (case.k, case.v))
    qkv = torch.cat([x.flatten(1) for x in case.qkv], 1)
    case.q, case.k, case.v = blocks(qkv)
    out, lse = case.fwd()
    torch.testing.assert_close((out, lse), expected)
    dqkv = poisoned(*qkv.shape)
    case.bwd(out, lse, blocks(dqkv))
    for ours, theirs in zip(blocks(dqkv), gradients, strict=True):
        torch.testing.assert_close(ours[: len(theirs)], theirs)
    assert dqkv.isfinite().all()


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
    expected = exact.loop()
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
        (result[0], *result[2:]) for result in (case.loop(dtype), case.loop(torch.float64))
    )
    for name, *triple in zip(("out", "dq", "dk", "dv"), ours, plain, exact, strict=True):
        assert_as_good_as(*triple, name)


def bf16_case():
    """Its width is a multiple of 16. Rows that belong to no sentence are zero."""
    case = Case(HOLES, True, 0.1, torch.bfloat16, width=16)
    for x in (*case.qkv, case.dout):
        x.nan_to_num_(0.0).mul_(4)
    return case


def column_slices(case):
    """Memory for dq, and for dk and dv side by side, in E4M3."""
    blocks = ((len(case.q), 1), (len(case.k), 2))
    memory = [torch.full((rows, n, H, 16), 0x7F, dtype=torch.uint8) for rows, n in blocks]
    return [x for m in memory for x in m.view(E4M3).unbind(1)]


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
    case.cu_k[1] = 15
    with pytest.raises(ValueError, match="attention_bwd: cu_k must ascend"):
        case.bwd(out, lse)


@pytest.mark.parametrize(
    ("index", "boundaries", "message"),
    [
        (3, [0, 5, 4, 9, 14], r"cu_q must ascend within \[0, 14\], sentence 1 is rows 5 to 4"),
        (4, [0, 5, 9, 13, 15], r"cu_k must ascend within \[0, 14\], sentence 3 is rows 13 to 15"),
        (4, [-1, 5, 9, 13, 14], "cu_k must begin with 0, begins with -1"),
        (3, [1, 5, 9, 13, 14], "cu_q must begin with 0, begins with 1"),
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
