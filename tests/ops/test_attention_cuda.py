"""The attention kernels compared with the reference in float64 and with plain torch."""

from __future__ import annotations

import pytest
import torch
from helpers.attention_cases import (
    FLOATS,
    LENGTHS,
    SITE,
    Case,
    check,
    check_casts,
    column_slices,
    like,
    poison,
    same,
)
from helpers.ops_testing import make_cast, make_rng, skip_without_fp8

from lightseq_fairseq import ops


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_numerics(lengths, p, causal, dtype):
    check(Case(LENGTHS[lengths], dtype, causal, p))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("causal", "p"), [(False, 0.0), (False, 0.1), (True, 0.1)])
@pytest.mark.parametrize("window", [24, 64, 200])
@pytest.mark.parametrize("lengths", ["edges", "ragged", "long", "unused"])
def test_windows(lengths, window, causal, p, dtype):
    check(Case(LENGTHS[lengths], dtype, causal, p, window=window))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("heads", "width"), [(1, 64), (16, 64), (5, 32), (4, 128), (3, 8), (2, 72), (6, 40), (3, 96)]
)
def test_heads(heads, width, dtype):
    check(
        Case(([30, 1, 64, 20, 140, 70], [25, 40, 1, 130, 20, 128]), dtype, False, 0.1, heads, width)
    )
    check(Case(([200, 3, 40], None), dtype, True, 0.1, heads, width))


@pytest.mark.parametrize("width", [8, 16, 40, 64, 80, 96, 128])
@pytest.mark.parametrize("lengths", [[3, 30, 64, 1], [300, 129, 5, 700]])
def test_widths_of_casts(width, lengths):
    check(Case((lengths, None), torch.bfloat16, True, 0.1, 4, width))


@pytest.mark.parametrize("factor", [1e-3, 30.0])
def test_small_and_large_scores(factor):
    """Rows of equal probabilities, and rows in which all but one underflow."""
    case = Case(LENGTHS["edges"], torch.float32)
    case.scale *= factor
    check(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 96, 128])
def test_drops_the_reference_bits(width, dtype):
    """With equal scores and one-hot values and gradients, the results are the mask, forward and
    backward.

    `first`: the first key (forward) or query (backward) whose column the one-hot rows select.
    """
    lengths, heads, p = [30, 64, 100, 200, 300], 3, 0.3
    case = Case((lengths, None), dtype, p=p, heads=heads, width=width)
    rows = case.used_q
    position = torch.cat([torch.arange(n) for n in lengths]).cuda()
    row_ids = torch.arange(rows * heads)
    keep = (
        ops.attention_keep_mask(make_rng(), SITE, row_ids, max(lengths), p)
        .view(rows, heads, -1)
        .cuda()
    )
    keep &= (
        torch.tensor(lengths).cuda().repeat_interleave(case.cu_q.diff().long())[:, None, None]
        > torch.arange(max(lengths)).cuda()
    )
    case.q.zero_(), case.k.normal_()
    for first in range(0, max(lengths), width):
        shown = torch.arange(first, first + width).cuda()
        one_hot = (position[:, None] == shown).float()[:, None].expand(rows, heads, width)
        case.v[:rows], case.dout[:rows] = one_hot, one_hot
        out, _, _, _, dv = case.kernel()
        here = keep[..., first : first + width]
        assert torch.equal(out[:rows, :, : here.shape[2]] > 0, here)
        for start, length in zip(case.cu_q.tolist(), lengths, strict=False):
            mine = slice(start, start + length)
            queries = keep[mine][first : first + width, :, :length].permute(2, 1, 0)
            assert torch.equal(dv[mine, :, : queries.shape[2]] > 0, queries)


@pytest.mark.parametrize("lengths", [[30, 2], [200, 2]])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e30, -1e30])
def test_numbers_that_no_cast_fits(lengths, number):
    """They are counted once."""
    skip_without_fp8()
    case = Case((lengths, None), torch.bfloat16, heads=4)
    case.dout[0, 1, 5] = number
    check_casts(case)
    case.v[0, 1, 5] = number
    check_casts(case)


def test_same_bits_again_in_casts():
    skip_without_fp8()
    case = Case(([150, 30, 700, 2], None), torch.bfloat16, True, 0.1, heads=4)

    def run():
        cast, memory = make_cast(device="cuda"), column_slices(case)
        out, lse, values = ops.attention_fwd(*case.qkv, *case.settings(), cast)
        given = case.dout, *case.qkv, out, lse, *case.settings()
        ops.attention_bwd(*given, *memory, cast, cast)
        return [out, *(x.view(torch.uint8) for x in (values, *memory)), *cast]

    first = run()
    assert same(first, run()) and same(first, run())


@pytest.mark.parametrize("dtype", FLOATS)
def test_same_bits_again_and_anywhere(dtype):
    """Two runs agree, and a sentence has the same results alone and in the middle of a batch."""
    case = Case(LENGTHS["ragged"], dtype, True, 0.1)
    assert same(case.kernel(), case.kernel())
    case.p = 0.0
    batch = case.kernel()
    for sentence in (0, 3, 6, 10):
        mine = slice(*case.cu_q[sentence : sentence + 2].tolist())
        alone = Case(([case.lengths_q[sentence]], None), dtype, True)
        for name in ("q", "k", "v", "dout"):
            getattr(alone, name)[: alone.used_q] = getattr(case, name)[mine]
        assert same([x[: alone.used_q] for x in alone.kernel()], [x[mine] for x in batch])


def test_many_sentences():
    """More sentences than the second dimension of a grid allows, of one token each, so that out is
    v."""
    sentences, heads, width = 70_001, 2, 64
    case = Case(([1] * sentences, None), torch.bfloat16, heads=heads, width=width)
    out, _, dq, dk, dv = (x[:sentences] for x in case.kernel())
    assert torch.equal(out, case.v[:sentences]) and torch.equal(dv, case.dout[:sentences])
    assert dq.abs().max() < 1e-2 and dk.abs().max() < 1e-2


def test_longest_may_be_an_upper_bound():
    case = Case(LENGTHS["cross"], torch.bfloat16, False, 0.1)
    expected = case.kernel()
    settings = list(case.settings())
    settings[2:4] = 4000, 5000
    out, lse, _ = ops.attention_fwd(*case.qkv, *settings)
    gradients = [like(x) for x in case.qkv]
    ops.attention_bwd(case.dout, *case.qkv, out, lse, *settings, *gradients)
    assert same((out, lse, *gradients), expected)


def test_heads_need_not_be_neighbours():
    case = Case(LENGTHS["cross"], torch.bfloat16, False, 0.1)
    expected = case.kernel()
    case.k, case.v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (case.k, case.v))
    out, lse, _ = ops.attention_fwd(*case.qkv, *case.settings())
    gradients = [torch.empty_like(x) for x in case.qkv]  # with the strides of q, k, v
    ops.attention_bwd(case.dout, *case.qkv, out, lse, *case.settings(), *gradients)
    assert same((out, lse, *gradients), expected)


@pytest.mark.parametrize(("rows_q", "rows_k"), [(0, 7), (7, 0), (0, 0), (7, 7)])
def test_nothing_to_attend_to(rows_q, rows_k):
    """Empty sides, and rows that belong to no sentence: all results are zero."""
    q, dout = (torch.full((rows_q, 2, 64), torch.nan, device="cuda") for _ in range(2))
    k, v = (torch.full((rows_k, 2, 64), torch.nan, device="cuda") for _ in range(2))
    cu = torch.zeros(3, dtype=torch.int32, device="cuda")
    settings = cu, cu, 0, 0, False, 0, 0.125, ops.Dropout(0.1, make_rng().cuda(), SITE)
    poison(q)
    out, lse, _ = ops.attention_fwd(q, k, v, *settings)
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    ops.attention_bwd(dout, q, k, v, out, lse, *settings, *gradients)
    assert all(x.eq(0).all() for x in (out, lse, *gradients))


def test_nan_shows():
    case = Case(LENGTHS["ragged"], torch.bfloat16)
    case.k[30, 1, 5] = torch.nan  # the second sentence has rows 28 ... 34
    out = case.kernel()[0]
    assert out[28:35, 1].isnan().all() and out[:28].isfinite().all() and out[35:].isfinite().all()


def test_replayed_graph_draws_anew():
    """Every replay reads the rng and the boundaries on the device."""
    case = Case(LENGTHS["ragged"], torch.bfloat16, False, 0.2)
    case.kernel()
    graph = torch.cuda.CUDAGraph()
    gradients = [like(x) for x in case.qkv]
    with torch.cuda.graph(graph):
        out, lse, _ = ops.attention_fwd(*case.qkv, *case.settings())
        ops.attention_bwd(case.dout, *case.qkv, out, lse, *case.settings(), *gradients)
    for micro_batch in (4, 5):
        case.rng[1] = micro_batch
        case.cu_q[4] = case.cu_k[4] = 266 + micro_batch  # it was 276
        graph.replay()
        assert same((out, lse, *gradients), case.kernel())


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (range(3), lambda x: x.double(), "q must be float32, float16 or bfloat16"),
        (range(3), lambda x: x.new_zeros(len(x), 3, 136), "the head width must be .*, got 136"),
        (range(3), lambda x: x.new_zeros(len(x), 3, 12), "the head width must be .*, got 12"),
        ([1], lambda k: k.new_zeros(len(k), 1 + k[0].numel())[:, 1:].view(k.shape), "k must be"),
        ([3], lambda cu: torch.stack((cu, cu), 1)[:, 0], "cu_q and cu_k must be contiguous"),
    ],
)
def test_refusals(index, change, message):
    case = Case(LENGTHS["edges"], torch.bfloat16)
    arguments = [*case.qkv, *case.settings()]
    for i in index:
        arguments[i] = change(arguments[i])
    with pytest.raises(RuntimeError, match=f"attention_fwd: {message}"):
        ops.attention_fwd(*arguments)


def test_backward_refusals():
    case = Case(LENGTHS["edges"], torch.bfloat16)
    out, lse, *gradients = case.kernel()
    for changed, message in (
        ((out, torch.stack((lse, lse), 2)[..., 0], *gradients), "lse must be contiguous"),
        (
            (out, lse, out.new_zeros(len(out), 193)[:, 1:].view(out.shape), *gradients[1:]),
            "dq must",
        ),
    ):
        out_, lse_, *gradients_ = changed
        with pytest.raises(RuntimeError, match=f"attention_bwd: {message}"):
            ops.attention_bwd(case.dout, *case.qkv, out_, lse_, *case.settings(), *gradients_)


def test_backward_refuses_casts_that_are_not_aligned():
    skip_without_fp8()
    case = Case(([5, 3], None), torch.bfloat16, heads=4, width=8)
    out, lse, *_ = case.kernel()
    dq, dk, dv = column_slices(case)
    wide = torch.zeros(len(dq) * 96 + 8, dtype=torch.uint8).cuda().view(dq.dtype)
    shifted = wide[8:].view(len(dq), 3, 4, 8)[:, 0]
    given, cast = (case.dout, *case.qkv, out, lse, *case.settings()), make_cast(device="cuda")
    with pytest.raises(RuntimeError, match="dq must be aligned to 16 bytes"):
        ops.attention_bwd(*given, shifted, dk, dv, cast, cast)
