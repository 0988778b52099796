"""The attention kernels for long sentences compared with the reference in float64 and with plain
torch."""

from __future__ import annotations

import pytest
import torch
from helpers.attention_cases import FLOATS, Case, check, like, same

from lightseq_fairseq import ops


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [40, 64, 72, 80, 96, 128])
@pytest.mark.parametrize(("causal", "p"), [(False, 0.0), (True, 0.1)])
def test_widths_of_long_sentences(width, causal, p, dtype):
    lengths = [300, 129, 5, 256, 640, 128, 1], [129, 300, 200, 385, 130, 1, 700]
    check(Case(lengths, dtype, causal, p, heads=3, width=width))
    check(Case((lengths[0], None), dtype, causal, p, heads=3, width=width))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [24, 64])
@pytest.mark.parametrize(("causal", "p"), [(False, 0.0), (False, 0.1), (True, 0.1)])
def test_sentences_of_48_tokens_on_average(width, causal, p, dtype):
    """Without a causal mask, sentences of 65 to 128 tokens are long then."""
    lengths = [128, 65, 64, 0, 96, 128, 127, 0, 1, 300]
    check(Case((lengths, None), dtype, causal, p, heads=3, width=width))
    check(Case((lengths, lengths[::-1]), dtype, causal, p, heads=3, width=width))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [24, 64, 96, 128])
@pytest.mark.parametrize(("causal", "p"), [(False, 0.0), (False, 0.1), (True, 0.1)])
def test_sentences_of_128_tokens_on_average(width, causal, p, dtype):
    """No sentence is short then, whatever its length."""
    lengths = [1, 40, 0, 600, 64, 16, 300, 2, 129]
    check(Case((lengths, None), dtype, causal, p, heads=3, width=width))
    check(Case((lengths, lengths[::-1]), dtype, causal, p, heads=3, width=width))


@pytest.mark.parametrize("dtype", FLOATS)
def test_2000_tokens(dtype):
    check(Case(([2000, 30], None), dtype, True, 0.1, heads=2))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [40, 64, 96, 128])
@pytest.mark.parametrize("window", [30, 64, 127, 128, 129, 500])
@pytest.mark.parametrize(("causal", "p"), [(False, 0.1), (True, 0.0)])
def test_windows_of_long_sentences(window, width, causal, p, dtype):
    """Ends of windows within a tile, at its first and at its last row."""
    lengths = [300, 129, 5, 256, 1000, 128, 1]
    check(Case((lengths, None), dtype, causal, p, heads=3, width=width, window=window))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [64, 128])
def test_a_window_reads_no_other_tiles(width, dtype):
    """So what is far away may be NaN, even queries, which would add to the gradients of keys."""
    case = Case(([4000], None), dtype, p=0.1, heads=2, width=width, window=64)
    expected = case.kernel()
    for x in (*case.qkv, case.dout):
        x[3000:] = torch.nan
    assert same([x[:2600] for x in case.kernel()], [x[:2600] for x in expected])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("window", [40, 900])
def test_same_bits_again_in_windows(window, dtype):
    case = Case(([1500, 4000, 140, 2048, 700, 3000], None), dtype, p=0.1, heads=4, window=window)
    first = case.kernel()
    assert same(first, case.kernel()) and same(first, case.kernel())


@pytest.mark.parametrize("seed", range(6))
def test_random_lengths(seed):
    """Any mix of lengths up to 4100 tokens, on both sides."""
    random = torch.Generator().manual_seed(seed)

    def draw(count, most):
        """Many short ones, and some of any length."""
        share = torch.rand(count, generator=random) ** 4
        return (share * most).long().tolist()

    causal, self_attention = seed % 2 == 0, seed % 3 == 0
    lengths_q, lengths_k = draw(12, 1500), draw(12, 1500)
    lengths_q[seed], lengths_k[-1 - seed] = 4100, 2500
    dtype = (torch.bfloat16, torch.float16)[seed // 3]
    lengths = (lengths_q, None if self_attention else lengths_k)
    check(Case(lengths, dtype, causal, (0.0, 0.1)[seed // 2 % 2], heads=2))


def test_many_long_sentences():
    """More of them than the list of work holds; then they are computed as the short ones are."""
    for sentences in (2100, 4200):
        case = Case(([129] * sentences, None), torch.bfloat16, heads=1, width=8)
        results = case.kernel()
        for sentence in (0, 1000, sentences - 1):
            mine = slice(129 * sentence, 129 * (sentence + 1))
            alone = Case(([129], None), torch.bfloat16, heads=1, width=8)
            for name in ("q", "k", "v", "dout"):
                getattr(alone, name)[: alone.used_q] = getattr(case, name)[mine]
            for ours, expected in zip(results, alone.kernel(), strict=True):
                torch.testing.assert_close(ours[mine], expected[:129], atol=0.02, rtol=0.02)


def test_blocks_that_wait_for_each_other():
    """Backward of long sentences adds in turns, whatever runs at the same time: same bits."""
    case = Case(([1500, 4000, 140, 2048, 700, 3000], None), torch.bfloat16, p=0.1, heads=16)
    out, lse, *gradients = case.kernel()
    side = torch.cuda.Stream()
    x = torch.randn(2048, 2048, device="cuda")
    for _ in range(10):
        with torch.cuda.stream(side):
            x = x @ x / 2048  # takes multiprocessors away
        assert same(case.kernel(), (out, lse, *gradients))


@pytest.mark.large
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 16), (torch.bfloat16, 128)])
@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (False, 64), (False, 5000)])
def test_more_blocks_of_keys_than_run_together(causal, window, dtype, width):
    """They add to dQ in the order of the list, whether blocks have 64 keys and an SM has two of
    them, or 128 keys and an SM has one."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    lengths = [(sms // 2 + 2) * 64, 70], None
    case = Case(lengths, dtype, causal, 0.1, heads=2, width=width, window=window)
    check(case)
    assert same(case.kernel(), case.kernel())


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float32, 64), *((torch.bfloat16, n) for n in (64, 96, 128))]
)
def test_more_long_sentences_than_blocks(dtype, width):
    """Every block works on several tiles of queries or blocks of keys, one after the other."""
    case = Case(([130, 257] * 40, None), dtype, True, 0.1, heads=8, width=width)
    check(case)
    assert same(case.kernel(), case.kernel())


def test_a_graph_takes_longer_sentences_up_to_its_bound():
    """It is captured with sentences of at most 300 tokens and replayed with one of 900."""
    case = Case(([300, 40, 200, 360], None), torch.bfloat16, True, 0.1)
    settings = list(case.settings())
    settings[2:4] = 1024, 1024
    gradients = [like(x) for x in case.qkv]

    def run():
        out, lse, _ = ops.attention_fwd(*case.qkv, *settings)
        ops.attention_bwd(case.dout, *case.qkv, out, lse, *settings, *gradients)
        return out, lse

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    case.lengths_q = case.lengths_k = [0, 900, 0, 0]
    for boundaries in (case.cu_q, case.cu_k):
        boundaries.copy_(torch.tensor([0, 0, 900, 900, 900]))
    graph.replay()
    assert same((*results, *gradients), case.kernel())
