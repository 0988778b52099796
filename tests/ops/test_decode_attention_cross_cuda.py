"""The kernel of a decode step's cross attention; test_decode_attention_cuda.py has both kinds."""

from __future__ import annotations

import pytest
import torch
from helpers.decode_attention_cases import FLOATS, Source, check, largest, lengths_of

from lightseq_fairseq import ops


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("beam", [1, 4, 5, 8, 12, 32])
@pytest.mark.parametrize("sentences", [1, 30, largest(330)])
def test_cross(sentences, beam, dtype):
    check(Source(lengths_of(sentences), range(sentences), beam, dtype))


# Around a tile of keys, around the number of keys in flight, and far more.
SPANS = [1, 15, 16, 0, 17, 127, 47, 48, 49, 0, 0, 300, 95, 96, 97, 31, 32, 33, 63, 64, 65, 191, 193]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("beam", [1, 5, 8, 11, 64])
@pytest.mark.parametrize("times", [1, 2, 4, 8])
def test_spans(times, beam, dtype):
    """The keys are divided among four warps, among two, or not at all; the last block has warps
    without a slot."""
    times = min(times, 160 // beam)
    for heads, width in ((16, 64), (3, 128), (5, 24)):
        check(Source(SPANS * times, range(len(SPANS) * times), beam, dtype, heads, width))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("times", [1, 2, 8])
def test_neighbours_of_nan(times, dtype):
    """A sentence does not read those before and after it."""
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
    """Rows of no sentence are written too: zeros."""
    check(Source([0, 7, 0, 31, 32, 33, 0], [3, -1, 0, 1, -5, 6, 4, 5], 5, dtype))
    check(Source([4], [-1, -1], 3, dtype))
    check(Source([4], [], 3, dtype))


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        ((0, 1, 2), lambda x: x.double(), "q must be float32, float16 or bfloat16"),
        ((6,), lambda heads: 1, "the head width must be .*, got 256"),
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
