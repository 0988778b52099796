"""Attention of a decode step compared with a loop over hypotheses, and with packed attention."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import assert_as_good_as, poisoned
from torch import Tensor

from lightseq_fairseq import ops

H, D, SCALE = 3, 4, 0.6
C = H * D


class Past:
    """A cache of `rows` rows and `step` past positions, of which every second hypothesis has half;
    values that must not be read are NaN."""

    def __init__(self, count=5, step=6, rows=8, dtype=torch.float64):
        torch.manual_seed(0)
        self.steps = torch.tensor([step, step // 2] * count, dtype=torch.int32)[:count]
        self.qkv = torch.randn(count, 3 * C).to(dtype)
        both = poisoned(2, step + 2, rows, 2 * C, dtype=dtype)
        both[:, :step] = torch.randn(2, step, rows, 2 * C).to(dtype)
        self.keys, self.values = both[..., C:].unbind(0)  # rows of a wider matrix
        self.ancestry = torch.full((step + 2, rows), -9, dtype=torch.int32)
        self.ancestry[:step] = torch.randint(0, rows, (step, rows), dtype=torch.int32)
        # A row is no one's ancestor at the position that it writes.
        for row, position in enumerate(self.steps.tolist()):
            at = self.ancestry[position]
            at[at == row] = rows - 1

    def arguments(self):
        return self.qkv, self.keys, self.values, self.ancestry, self.steps, H, SCALE

    def of_hypothesis(self, n: int) -> tuple[Tensor, Tensor]:
        """The keys and values of a hypothesis, the new ones last: [its step + 1, C]."""
        step = int(self.steps[n])
        rows = self.ancestry[:step, n]
        history = ([x[p, rows[p]] for p in range(step)] for x in (self.keys, self.values))
        k, v = (torch.stack([*x, new[n]]) for x, new in zip(history, self.qkv.split(C, 1)[1:]))
        return k, v


class Source:
    """Packed sentences, rows after the last one, and slots that decode some of the sentences."""

    def __init__(self, beam, sentences, lengths=(3, 1, 0, 5, 2), tail=2, dtype=torch.float64):
        torch.manual_seed(0)
        self.beam, used = beam, sum(lengths)
        self.q = torch.randn(len(sentences) * beam + tail, C).to(dtype)
        both = poisoned(used + 2, 4 * C, dtype=dtype)
        both[:used] = torch.randn(used, 4 * C).to(dtype)
        self.keys, self.values = both[:, C : 2 * C], both[:, 3 * C :]
        self.cu = torch.tensor([0, *lengths]).cumsum(0).int()
        self.sentences = torch.tensor(sentences, dtype=torch.int32)

    def arguments(self):
        settings = self.cu, self.sentences, self.beam, H, SCALE
        return self.q, self.keys, self.values, *settings

    def of_hypothesis(self, n: int) -> tuple[Tensor, Tensor]:
        slot = n // self.beam
        sentence = int(self.sentences[slot]) if slot < len(self.sentences) else -1
        if sentence < 0:
            return self.keys[:0], self.values[:0]
        mine = slice(*self.cu[sentence : sentence + 2].tolist())
        return self.keys[mine], self.values[mine]


def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query [C] over k and v [L, C], head by head."""
    q, k, v = (x.unflatten(-1, (H, D)) for x in (q, k, v))
    weights = torch.softmax(SCALE * (k * q).sum(-1), 0)
    return (weights[..., None] * v).sum(0).flatten()


def expected(queries, case):
    return torch.stack([formula(q, *case.of_hypothesis(n)) for n, q in enumerate(queries)])


@pytest.mark.parametrize("step", [0, 1, 6])
def test_self_equals_formula(step):
    case = Past(step=step)
    queries, new_keys, new_values = case.qkv.split(C, 1)
    wanted = expected(queries, case)
    before = case.keys.clone(), case.values.clone()
    found = ops.decode_self_attention(*case.arguments())
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    # The new rows are stored, and nothing else changes.
    for cache, old, new in zip(
        (case.keys, case.values), before, (new_keys, new_values), strict=True
    ):
        at = case.steps.long(), torch.arange(5)
        assert torch.equal(cache[at], new)
        old[at] = new
        assert torch.equal(cache.nan_to_num(99.0), old.nan_to_num(99.0))


def test_ancestry_is_as_good_as_moving_the_cache():
    """Four steps; after each, hypotheses take the places of others."""
    torch.manual_seed(1)
    count, steps = 4, 5
    keys, values = poisoned(2, steps, count, C).unbind(0)
    moved = torch.empty(count, 0, 2 * C, dtype=torch.float64)
    ancestry = torch.full((steps, count), -9, dtype=torch.int32)
    for step in range(steps):
        qkv = torch.randn(count, 3 * C, dtype=torch.float64)
        at = torch.full((count,), step, dtype=torch.int32)
        out = ops.decode_self_attention(qkv, keys, values, ancestry, at, H, SCALE)
        moved = torch.cat((moved, qkv[:, None, C:]), 1)
        for n in range(count):
            torch.testing.assert_close(out[n], formula(qkv[n, :C], *moved[n].split(C, 1)))
        parents = torch.randint(0, count, (count,))
        moved = moved[parents]
        ancestry[:step] = ancestry[:step, parents]
        ancestry[step] = parents


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("sentences", [[0, 1, 2, 3, 4], [3, -1, 0], [2], [-1, -1], []])
def test_cross_equals_formula(beam, sentences):
    case = Source(beam, sentences)
    out = ops.decode_cross_attention(*case.arguments())
    torch.testing.assert_close(out, expected(case.q, case))
    nothing = [n for n in range(len(out)) if not len(case.of_hypothesis(n)[0])]
    assert out[nothing].eq(0).all()


def test_cross_equals_attention_over_sentences():
    case = Source(4, [0, 1, 2, 3, 4], tail=0)
    cu_q = torch.arange(0, 21, 4, dtype=torch.int32)
    q, k, v = (x.unflatten(1, (H, D)) for x in (case.q, case.keys, case.values))
    dropout = ops.Dropout(0.0, torch.zeros(2, dtype=torch.int64), 0)
    wanted, *_ = ops.attention_fwd(q, k, v, cu_q, case.cu, 4, 5, False, 0, SCALE, dropout)
    torch.testing.assert_close(ops.decode_cross_attention(*case.arguments()), wanted.flatten(1))


@pytest.mark.parametrize("spoilt", range(5))
def test_no_sentence_sees_numbers_of_another(spoilt):
    case = Source(2, [0, 1, 2, 3, 4], tail=0)
    before = ops.decode_cross_attention(*case.arguments())
    first, end = case.cu[spoilt : spoilt + 2].tolist()
    for x in (case.keys, case.values):
        x[first:end] = torch.nan
    after = ops.decode_cross_attention(*case.arguments())
    own = torch.arange(10) // 2 == spoilt
    assert torch.equal(after[~own], before[~own])
    assert after[own].isnan().all() == (end > first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit(dtype):
    """Against the loop in the same precision."""
    past, source = Past(dtype=dtype), Source(3, [3, 0, 1], dtype=dtype, tail=0)
    for queries, case, op in (
        (past.qkv[:, :C], past, ops.decode_self_attention),
        (source.q, source, ops.decode_cross_attention),
    ):
        plain = expected(queries, case)
        keys_values = [case.of_hypothesis(n) for n in range(len(queries))]
        exact = torch.stack(
            [formula(q.double(), k.double(), v.double()) for q, (k, v) in zip(queries, keys_values)]
        )
        assert_as_good_as(op(*case.arguments()), plain, exact, op.__name__)


def test_nobody_there():
    case = Past(count=0)
    assert ops.decode_self_attention(*case.arguments()).shape == (0, C)
    assert ops.decode_cross_attention(*Source(3, [], tail=0).arguments()).shape == (0, C)


def test_refusals():
    qkv, keys, values, ancestry, steps, *rest = Past().arguments()
    with pytest.raises(ValueError, match="10 hypotheses do not fit into a cache of 8 rows"):
        many = qkv.repeat(2, 1), keys, values, ancestry, steps.repeat(2)
        ops.decode_self_attention(*many, *rest)
    arguments = list(Source(3, [3, -1, 0]).arguments())
    arguments[3] = arguments[3][:1]
    with pytest.raises(ValueError, match="cu_seqlens must hold at least one sentence"):
        ops.decode_cross_attention(*arguments)


def test_step_and_boundaries_are_checked(monkeypatch):
    monkeypatch.delenv("LIGHTSEQ_CHECK_INDICES", raising=False)
    case = Past()
    case.steps[2] = 8
    with pytest.raises(ValueError, match=r"decode_self_attention: steps must be in .* got 8"):
        ops.decode_self_attention(*case.arguments())
    source = Source(3, [0, 1])
    source.cu[2] = 0
    with pytest.raises(ValueError, match="decode_cross_attention: cu_seqlens must ascend"):
        ops.decode_cross_attention(*source.arguments())
    source.sentences[1] = -1  # no slot has the sentence with the wrong boundaries
    out = ops.decode_cross_attention(*source.arguments())
    torch.testing.assert_close(out, expected(source.q, source))
