"""The attention kernels of a decode step compared with the reference in float64 and with plain
torch."""

from __future__ import annotations

import pytest
import torch
from helpers.decode_attention_cases import (
    FLOATS,
    Past,
    Source,
    check,
    largest,
    lengths_of,
    poisoned,
    randn,
)

from lightseq_fairseq import ops

HEADS = [(16, 64), (3, 32), (2, 128), (5, 8), (3, 72)]
# With few hypotheses, warps divide the keys of each; with many they do not.
COUNTS = [1, 5, 70]
BEAMS = [1, 4, 5, 8, 64]


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
    """Also if the number of rows is no multiple of the beam."""
    if slots * beam > 4000:
        slots = 4000 // beam
    for step in (1, 15, 16, 17, 40) if slots > 1 else (2, 31, 130, 299):
        check(Past(slots * beam, step, dtype, beam=beam, shared=shared))
    check(Past(slots * beam + beam // 2, 9, dtype, beam=beam, shared=shared))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("beam", [1, 5, 12])
@pytest.mark.parametrize("slots", [4, 40, largest(300)])
def test_self_at_different_steps(slots, beam, dtype):
    for step, shared in ((9, 0.0), (40, 0.5), (130, 1.0)):
        check(Past(slots * beam, step, dtype, beam=beam, shared=shared, mixed=True))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("beam", [4, 5, 8, 12])
@pytest.mark.parametrize("slots", [1, 40, largest(300)])
def test_lines_that_meet(slots, beam, dtype):
    """As after a search: the further back, the fewer different ancestors a slot has."""
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
    """Ancestors of siblings hold the same numbers, in one row of the cache or in several."""
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
    """After the last slot, and in slots without a sentence: all ancestors are row 0."""
    case = Past(64, 20, dtype, beam=5)
    case.qkv[55:] = 0
    case.ancestry[:20, 55:] = 0
    check(case)


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
    """Equal probabilities, and one probability so large that all others are zero."""
    for case in (Past(40, 50, dtype), Source(lengths_of(40), range(40), 5, dtype)):
        case.scale *= factor
        check(case)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_shows(dtype):
    past, source = Past(20, 9, dtype, beam=5), Source([20, 30, 5], [0, 1, 2], 5, dtype)
    row = int(past.ancestry[4, 7])
    past.keys[4, row, 64:128] = torch.nan  # the second head
    seen = past.ancestry[4, :20] == row
    out = past.op(*past.arguments()).unflatten(1, (4, 64))
    assert out[seen, 1].isnan().all() and out[~seen].isfinite().all()
    assert out[:, [0, 2, 3]].isfinite().all()
    many = Past(2000, 30, dtype, beam=8, shared=0.8)  # so that a warp has several hypotheses
    row = int(many.ancestry[4, 7])
    many.values[4, row, 70] = torch.nan
    seen = many.ancestry[4, :2000] == row
    out = many.op(*many.arguments())
    assert out[seen, 70].isnan().all() and out.isnan().sum() == seen.sum()
    source.values[25, 70] = torch.nan
    # the kernel requires that the kernel just before it has not written the values
    torch.cuda.synchronize()
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
    """Captured once, after nodes of every kind; replayed at every position."""
    heads, width, steps = 4, 64, 12
    channels = heads * width
    qkv, keys, values = (
        poisoned(*shape, channels * times, dtype=dtype)
        for shape, times in (((count,), 3), ((steps, count), 1), ((steps, count), 1))
    )
    ancestry = torch.randint(0, count, (steps, count), device="cuda").int()
    step = torch.zeros(count, dtype=torch.int32, device="cuda")
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
    """Each kernel reads what the one before has written, without a pause for the host."""
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
        ((5,), lambda heads: 1, "the head width must be .*, got 256"),
        ((5,), lambda heads: 64, "the head width must be .*, got 4"),
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


@pytest.mark.large
def test_a_cache_of_more_than_32_bits_of_bytes_a_position():
    """As with 24 layers and more than 22,000 hypotheses: positions are more than 2^32 bytes apart,
    rows are not."""
    case = Past(6, 2, torch.bfloat16, heads=2, width=64)
    qkv, keys, values, *rest = case.arguments()
    far = torch.empty(keys.shape[0] * (2**30 + 8), dtype=torch.bfloat16, device="cuda")
    row = 2 * keys.shape[2]
    copies = []
    for x, start in ((keys, 0), (values, keys.shape[2])):
        copies.append(far[start:].as_strided(keys.shape, (2**30 + 8, row, 1)))
        copies[-1].copy_(x)
    assert torch.equal(case.op(qkv, *copies, *rest), case.op(qkv, keys, values, *rest))
    for copy, x in zip(copies, (keys, values), strict=True):
        assert torch.equal(copy.nan_to_num(), x.nan_to_num())
