"""The kernels of a decode step's attention against the reference in float64 and plain torch."""

from __future__ import annotations

import pytest
import torch
from ops_testing import assert_kernel_as_good_as, poison_cache

from lightseq_fairseq import library, ops
from lightseq_fairseq.ops.decode_attention import (
    decode_cross_attention_reference,
    decode_self_attention_reference,
)

pytestmark = pytest.mark.gpu

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
HEADS = [(16, 64), (3, 32), (2, 128), (5, 8), (3, 72)]
# Few hypotheses share out their keys among warps, many do not.
COUNTS = [1, 5, 70]
BEAMS = [1, 4, 5, 8, 64]


def largest(number):
    """The last of a parameter's values, which shows no single access that others do not."""
    return pytest.param(number, marks=pytest.mark.large)


def randn(*shape, dtype):
    return torch.randn(shape, device="cuda").to(dtype)


def poisoned(*shape, dtype):
    return torch.full(shape, torch.nan, device="cuda", dtype=dtype)


class Past:
    """A strided cache; what must not be read is poisoned.

    shared: how much of the ancestry, position by position, is the same for all of a slot.
    """

    reference = staticmethod(decode_self_attention_reference)
    op = staticmethod(ops.decode_self_attention)

    def __init__(self, count, step, dtype, heads=4, width=64, spare=3, beam=1, shared=0.0):
        torch.manual_seed(count + step)
        channels, rows = heads * width, count + spare
        self.count, self.step, self.heads, self.scale = count, step, heads, width**-0.5
        self.beam = beam
        self.qkv = randn(count, 3 * channels, dtype=dtype)
        self.both = poisoned(2, step + 2, rows, 2 * channels, dtype=dtype)
        self.both[:, :step] = randn(2, step, rows, 2 * channels, dtype=dtype)
        self.keys, self.values = self.cache(self.both)
        self.ancestry = torch.full((step + 2, rows), -9, dtype=torch.int32, device="cuda")
        self.ancestry[:step] = torch.randint(0, rows, (step, rows), device="cuda")
        first = torch.arange(count, device="cuda") // beam * beam
        together = torch.rand(step, 1, device="cuda") < shared
        past = self.ancestry[:step]
        past[:, :count] = torch.where(together, past[:, first], past[:, :count])
        self.position = torch.tensor(step, dtype=torch.int32, device="cuda")

    def cache(self, both):
        """(keys, values), whose rows are parts of wider ones."""
        return both[..., both.shape[-1] // 2 :].unbind(0)

    def arguments(self, dtype=None):
        """With copies of the cache, which a call writes to."""
        dtype = dtype or self.qkv.dtype
        cache = self.cache(self.both.to(dtype, copy=True))
        settings = self.heads, self.scale, self.beam
        return self.qkv.to(dtype), *cache, self.ancestry, self.position, *settings

    def plain(self):
        """In the case's own dtype, every hypothesis with a copy of its history."""
        q, new_k, new_v = (x.unflatten(1, (self.heads, -1)) for x in self.qkv.chunk(3, 1))
        row = self.ancestry[: self.step, : self.count].long()
        place = torch.arange(self.step, device="cuda")[:, None]
        k, v = (
            torch.cat((x[place, row].unflatten(2, (self.heads, -1)), new[None]))
            for x, new in ((self.keys, new_k), (self.values, new_v))
        )
        weights = torch.softmax(self.scale * torch.einsum("nhd,knhd->nhk", q, k), -1)
        return torch.einsum("nhk,knhd->nhd", weights, v).flatten(1)


class Source:
    """Packed sentences between poison, keys and values parts of a wider matrix."""

    reference = staticmethod(decode_cross_attention_reference)
    op = staticmethod(ops.decode_cross_attention)

    def __init__(self, lengths, sentences, beam, dtype, heads=4, width=64, tail=3):
        torch.manual_seed(len(lengths) + beam)
        channels, used = heads * width, sum(lengths)
        self.beam, self.heads, self.scale = beam, heads, width**-0.5
        self.q = randn(len(sentences) * beam + tail, channels, dtype=dtype)
        both = poisoned(used + 1, 4 * channels, dtype=dtype)
        both[:used] = randn(used, 4 * channels, dtype=dtype)
        self.keys, self.values = both[:, channels : 2 * channels], both[:, 3 * channels :]
        self.cu = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
        self.sentences = torch.tensor(sentences, dtype=torch.int32).cuda()

    def arguments(self, dtype=None):
        tensors = self.q, self.keys, self.values
        if dtype is not None:
            tensors = tuple(x.to(dtype) for x in tensors)
        return *tensors, self.cu, self.sentences, self.beam, self.heads, self.scale

    def plain(self):
        out = torch.zeros_like(self.q)
        cu = self.cu.tolist()
        for slot, sentence in enumerate(self.sentences.tolist()):
            if sentence < 0 or cu[sentence] == cu[sentence + 1]:
                continue
            mine = slice(slot * self.beam, (slot + 1) * self.beam)
            k, v = (
                x[cu[sentence] : cu[sentence + 1]].unflatten(1, (self.heads, -1))
                for x in (self.keys, self.values)
            )
            q = self.q[mine].unflatten(1, (self.heads, -1))
            weights = torch.softmax(self.scale * torch.einsum("nhd,khd->nhk", q, k), -1)
            out[mine] = torch.einsum("nhk,khd->nhd", weights, v).flatten(1)
        return out


def check(case):
    exact = case.reference(*case.arguments(torch.float64))
    plain = case.plain()
    poison_cache()
    ours = case.op(*case.arguments())
    assert_kernel_as_good_as(ours, plain, exact, half_roundings=0.5)
    assert torch.equal(ours.eq(0).all(1), exact.eq(0).all(1))


def lengths_of(sentences):
    generator = torch.Generator().manual_seed(sentences)
    return torch.randint(1, 60, (sentences,), generator=generator).tolist()


def test_kernels_are_loaded():
    assert {"decode_self_attention", "decode_cross_attention"} <= set(library.load().kernels)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("step", [0, 1, 27, 200])
@pytest.mark.parametrize("count", [*COUNTS, largest(1300)])
def test_self(count, step, dtype):
    check(Past(count, step, dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("beam", BEAMS)
@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("slots", [1, 37, largest(400)])
def test_self_shares_ancestors(slots, shared, beam, dtype):
    """Slots that do not end with the rows, too."""
    if slots * beam > 4000:
        slots = 4000 // beam
    for step in (1, 15, 16, 17, 40) if slots > 1 else (2, 31, 130, 299):
        check(Past(slots * beam, step, dtype, beam=beam, shared=shared))
    check(Past(slots * beam + beam // 2, 9, dtype, beam=beam, shared=shared))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("beam", [4, 5, 8, 12])
@pytest.mark.parametrize("slots", [1, 40, largest(300)])
def test_lines_that_meet(slots, beam, dtype):
    """As a search leaves them: the further back, the fewer ancestors a slot has."""
    own = torch.arange(slots * beam, device="cuda")
    for step in (28, 61, 150):
        case = Past(slots * beam, step, dtype, beam=beam)
        back = step - torch.arange(step, device="cuda")[:, None]
        lines = (beam - back // 3).clamp(min=1)
        case.ancestry[:step, : len(own)] = own // beam * beam + own % beam % lines
        check(case)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("beam", [4, 5, 8, 12, 64])
@pytest.mark.parametrize("slots", [1, 60, largest(330)])
def test_bits_do_not_depend_on_who_shares(slots, beam, dtype):
    """Siblings whose ancestors hold the same numbers, in one row of the cache and in rows apart."""
    count, step = min(slots, 3000 // beam) * beam, 45
    case = Past(count, step, dtype, beam=beam)
    own = torch.arange(count, dtype=torch.int32, device="cuda")
    siblings = own // beam * beam
    case.both[:, :step, :count] = case.both[:, :step, siblings.long()]
    results = []
    parted = (own % beam > torch.arange(step, device="cuda")[:, None] // 10).int()
    swapped = torch.where(parted.bool(), own, siblings)
    for ancestry in (own.expand(step, -1), siblings.expand(step, -1), swapped):
        case.ancestry[:step, :count] = ancestry
        results.append(case.op(*case.arguments()))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", FLOATS)
def test_spare_rows_of_zeros(dtype):
    """Behind the last slot, and in slots without a sentence: all ancestors in row 0."""
    case = Past(64, 20, dtype, beam=5)
    case.qkv[55:] = 0
    case.ancestry[:20, 55:] = 0
    check(case)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("beam", [1, 4, 5, 8, 12, 32])
@pytest.mark.parametrize("sentences", [1, 30, largest(330)])
def test_cross(sentences, beam, dtype):
    check(Source(lengths_of(sentences), range(sentences), beam, dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("heads", "width"), HEADS)
def test_heads(heads, width, dtype):
    for count in (5, 700):
        check(Past(count, 33, dtype, heads, width, beam=5, shared=0.7))
    for sentences in (1, 200):
        check(Source(lengths_of(sentences), range(sentences), 5, dtype, heads, width))


@pytest.mark.parametrize("dtype", FLOATS)
def test_long(dtype):
    check(Past(3, 3000, dtype, beam=3))
    check(Past(1400, 300, dtype, beam=7, shared=0.9))
    check(Source([2000, 1, 3100], [2, 0], 5, dtype))


# Around a tile of keys, around what is on its way at once, and far beyond, with nothing in between.
SPANS = [1, 15, 16, 0, 17, 127, 47, 48, 49, 0, 0, 300, 95, 96, 97, 31, 32, 33, 63, 64, 65, 191, 193]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("beam", [1, 5, 8, 11, 64])
@pytest.mark.parametrize("times", [1, 2, 4, 8])
def test_spans(times, beam, dtype):
    """Shared out among four warps, two, and not at all; the last block has warps without a slot."""
    times = min(times, 160 // beam)
    for heads, width in ((16, 64), (3, 128), (5, 24)):
        check(Source(SPANS * times, range(len(SPANS) * times), beam, dtype, heads, width))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("times", [1, 2, 8])
def test_neighbours_of_nan(times, dtype):
    """A sentence sees nothing of those before and behind it."""
    source = Source(SPANS * times, range(len(SPANS) * times), 5, dtype, heads=16)
    clean = source.op(*source.arguments())
    lengths = source.cu.diff()
    odd = torch.arange(len(lengths), device="cuda") % 2 == 1
    tokens, rows = odd.repeat_interleave(lengths), torch.zeros(len(clean), device="cuda").bool()
    source.keys[: len(tokens)][tokens] = torch.nan
    source.values[: len(tokens)][tokens] = torch.nan
    rows[: 5 * len(odd)] = (odd & (lengths > 0)).repeat_interleave(5)
    torch.cuda.synchronize()
    out = source.op(*source.arguments())
    assert torch.equal(out[~rows], clean[~rows]) and out[rows].isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("times", [1, 2, 8])
def test_bits_do_not_depend_on_other_sentences(times, dtype):
    source = Source(SPANS * times, range(len(SPANS) * times), 5, dtype, heads=16)
    together = source.op(*source.arguments())
    own = torch.arange(len(source.sentences), device="cuda")
    for slot in range(len(SPANS)):
        source.sentences = torch.where(own == slot, own, -1).int()
        torch.cuda.synchronize()
        alone = source.op(*source.arguments())
        mine = slice(slot * 5, slot * 5 + 5)
        assert torch.equal(alone[mine], together[mine])
        assert alone.count_nonzero() == alone[mine].count_nonzero()


@pytest.mark.parametrize("dtype", FLOATS)
def test_empty_slots_and_sentences(dtype):
    """Rows of no sentence are written: zeros."""
    check(Source([0, 7, 0, 31, 32, 33, 0], [3, -1, 0, 1, -5, 6, 4, 5], 5, dtype))
    check(Source([4], [-1, -1], 3, dtype))
    check(Source([4], [], 3, dtype))


def test_nobody_there():
    past, source = Past(0, 4, torch.bfloat16), Source([4], [], 3, torch.bfloat16, tail=0)
    assert past.op(*past.arguments()).shape == (0, 256)
    assert source.op(*source.arguments()).shape == (0, 256)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("step", [0, 9])
def test_new_keys_and_values_are_remembered(step, dtype):
    case = Past(70, step, dtype)
    q, keys, values, *rest = case.arguments()
    case.op(q, keys, values, *rest)
    for cache, before, new in zip(
        (keys, values), (case.keys, case.values), q.chunk(3, 1)[1:], strict=True
    ):
        assert torch.equal(cache[step, :70], new)
        cache[step, :70] = before[step, :70]
        assert torch.equal(cache.nan_to_num(9.0), before.nan_to_num(9.0))


@pytest.mark.parametrize("factor", [1e-3, 50.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_small_and_large_scores(factor, dtype):
    """Equal probabilities, and one that leaves nothing to the rest."""
    for case in (Past(40, 50, dtype), Source(lengths_of(40), range(40), 5, dtype)):
        case.scale *= factor
        check(case)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_shows(dtype):
    past, source = Past(20, 9, dtype, beam=5), Source([20, 30, 5], [0, 1, 2], 5, dtype)
    row = int(past.ancestry[4, 7])
    past.keys[4, row, 64:128] = torch.nan  # second head
    seen = past.ancestry[4, :20] == row
    out = past.op(*past.arguments()).unflatten(1, (4, 64))
    assert out[seen, 1].isnan().all() and out[~seen].isfinite().all()
    assert out[:, [0, 2, 3]].isfinite().all()
    many = Past(2000, 30, dtype, beam=8, shared=0.8)  # a warp has several hypotheses
    row = int(many.ancestry[4, 7])
    many.values[4, row, 70] = torch.nan
    seen = many.ancestry[4, :2000] == row
    out = many.op(*many.arguments())
    assert out[seen, 70].isnan().all() and out.isnan().sum() == seen.sum()
    source.values[25, 70] = torch.nan
    torch.cuda.synchronize()  # values may not be the work of the kernel right before
    out = source.op(*source.arguments())
    assert out[5:10, 70].isnan().all() and out.isnan().sum() == 5


def test_same_bits_again():
    for case in (
        Past(5, 77, torch.bfloat16),
        Past(700, 20, torch.float32, beam=4),
        Past(700, 40, torch.bfloat16, beam=5, shared=0.5),
        Source(lengths_of(3), range(3), 5, torch.float16),
        Source(lengths_of(300), range(300), 4, torch.bfloat16),
    ):
        first = case.op(*case.arguments())
        assert all(torch.equal(first, case.op(*case.arguments())) for _ in range(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [5, largest(500)])
def test_one_graph_serves_all_steps(count, dtype):
    """Captured once with nodes of every kind before the kernels; replayed at every position."""
    heads, width, steps = 4, 64, 12
    channels = heads * width
    qkv, keys, values = (
        poisoned(*shape, channels * times, dtype=dtype)
        for shape, times in (((count,), 3), ((steps, count), 1), ((steps, count), 1))
    )
    ancestry = torch.randint(0, count, (steps, count), device="cuda").int()
    step = torch.zeros((), dtype=torch.int32, device="cuda")
    source = Source(lengths_of(count // 5), range(count // 5), 5, dtype, tail=0)
    inputs, past = randn(steps, count, 3 * channels, dtype=dtype), torch.zeros_like(qkv)

    def run():
        past.zero_()
        past.copy_(qkv)
        out = ops.decode_self_attention(past, keys, values, ancestry, step, heads, width**-0.5, 5)
        crossed = ops.decode_cross_attention(out, *source.arguments()[1:])
        step.add_(1)
        return out, crossed

    def decode(run_step):
        keys.fill_(torch.nan), values.fill_(torch.nan), step.zero_()
        results = []
        for new in inputs:
            qkv.copy_(new)
            results += [x.clone() for x in run_step()]
        return results

    eager = decode(run)
    graph = torch.cuda.CUDAGraph()
    step.zero_()
    with torch.cuda.graph(graph):
        captured = run()

    def replay():
        graph.replay()
        return captured

    replayed = decode(replay)
    assert all(x.isfinite().all() for x in eager)
    assert all(map(torch.equal, eager, replayed))


@pytest.mark.parametrize("sentences", [2, 60, 300])
def test_kernels_wait_for_each_other(sentences):
    """Each reads at once what the one before it has written, without a pause for the host."""
    past = Past(sentences * 5, 30, torch.bfloat16, heads=16, beam=5, shared=0.5)
    source = Source(lengths_of(sentences), range(sentences), 5, torch.bfloat16, heads=16, tail=0)
    settings = past.arguments()[1:]
    tail = source.arguments()[1:]

    def chain(wait):
        x = past.qkv.clone()
        for _ in range(30):
            torch.cuda._sleep(20_000)
            out = ops.decode_self_attention(x, *settings)
            wait()
            out = ops.decode_cross_attention(out, *tail)
            wait()
            x[:, :1024] = out
        return x

    assert torch.equal(chain(lambda: None), chain(torch.cuda.synchronize))


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        ((0, 1, 2), lambda x: x.double(), "qkv must be float32, float16 or bfloat16"),
        ((5,), lambda heads: 1, "heads of 256 numbers"),
        ((5,), lambda heads: 64, "heads of 4 numbers"),
        ((1,), lambda k: torch.nn.functional.pad(k, (1, 0))[..., 1:], "keys must be contiguous"),
        ((2,), lambda v: torch.nn.functional.pad(v, (1, 3))[..., 1:-3], "values must be contig"),
        ((2,), lambda v: v.contiguous(), "keys and values must have equal strides"),
        ((3,), lambda a: torch.cat((a, a), 1)[:, : len(a[0])], "ancestry must be contiguous"),
    ],
)
def test_self_refusals(place, change, message):
    arguments = list(Past(5, 3, torch.bfloat16).arguments())
    for i in place:
        arguments[i] = change(arguments[i])
    with pytest.raises(RuntimeError, match=f"decode_self_attention: {message}"):
        ops.decode_self_attention(*arguments)


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        ((0, 1, 2), lambda x: x.double(), "q must be float32, float16 or bfloat16"),
        ((6,), lambda heads: 1, "heads of 256 numbers"),
        ((0,), lambda q: torch.nn.functional.pad(q, (1, 0))[:, 1:], "q must be contiguous"),
        ((3,), lambda cu: torch.stack((cu, cu), 1)[:, 0], "cu_seqlens and sentences must be"),
        ((4,), lambda s: torch.stack((s, s), 1)[:, 0], "cu_seqlens and sentences must be"),
    ],
)
def test_cross_refusals(place, change, message):
    arguments = list(Source([5, 9], [1, 0], 3, torch.bfloat16).arguments())
    for i in place:
        arguments[i] = change(arguments[i])
    with pytest.raises(RuntimeError, match=f"decode_cross_attention: {message}"):
        ops.decode_cross_attention(*arguments)
