"""The embedding kernels compared with float64 on the CPU and with plain torch's error on the
GPU."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from helpers.ops_testing import assert_kernel_as_good_as, leaf, poison_cache
from helpers.ops_testing import make_rng as rng_on
from torch.nn import functional

from lightseq_fairseq import library, ops

make_rng = functools.partial(rng_on, device="cuda")

pytestmark = pytest.mark.gpu

PAD, SCALE, SITE = 1, 2.5, 4
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Batch:
    """Tokens with Zipf's frequencies, some of them pads; positions, tables, dy."""

    def __init__(self, tokens, vocabulary, places, width, dtype, indices=torch.int64):
        generator = torch.Generator("cuda").manual_seed(tokens + width)

        def normal(rows):
            return torch.randn(rows, width, generator=generator, device="cuda").to(dtype)

        frequency = 1.0 / torch.arange(1, vocabulary + 1, device="cuda")
        drawn = torch.multinomial(frequency, tokens + 1, True, generator=generator)
        self.tokens = drawn[1:].to(indices)
        self.positions = (torch.arange(tokens, device="cuda") * 7 % 31 % places).to(indices)
        self.weight, self.position_weight = normal(vocabulary), normal(places)
        self.dy = normal(tokens)

    def forward(self, p, positions=True):
        extra = (self.positions, self.position_weight) if positions else (None, None)
        return ops.embedding_fwd(self.tokens, self.weight, *extra, SCALE, p, make_rng(), SITE)

    def backward(self, p, dtype=None, accumulate=None, positions=True, pad=PAD):
        """Both gradients; accumulate: the tensors to add to."""
        if accumulate is None:
            tables = (self.weight, self.position_weight)
            grads = [torch.full_like(x, math.nan, dtype=dtype or x.dtype) for x in tables]
        else:
            grads = [x.clone() for x in accumulate]
        poison_cache()
        ops.embedding_bwd(
            self.dy, self.tokens, self.positions, SCALE, pad, p, make_rng(), SITE,
            grads[0], grads[1] if positions else None, accumulate is not None,
        )  # fmt: skip
        return grads if positions else grads[:1]

    def plain(self, p, dtype, pad=PAD):
        """y and both gradients in plain torch, with our dropout's mask."""
        weight, position_weight = leaf(self.weight, dtype), leaf(self.position_weight, dtype)
        keep = ops.dropout_mask(make_rng(device="cpu"), SITE, *self.dy.shape, p).cuda()
        y = SCALE * functional.embedding(self.tokens, weight, padding_idx=pad)
        y = (y + functional.embedding(self.positions, position_weight)) * keep / (1 - p)
        y.backward(self.dy.to(dtype))
        return y.detach(), weight.grad, position_weight.grad


def test_kernels_are_loaded():
    assert {"embedding_fwd", "embedding_bwd"} <= set(library.load().kernels)


# (tokens, vocabulary, positions, width): one token; widths that are no power of two, or wider than
# one warp; segments of every length up to half of the tokens; more tokens than warps load at a
# time.
SIZES = [
    (1, 40, 4, 8),
    (31, 7, 5, 256),
    (1000, 900, 31, 1032),
    (3000, 50, 31, 520),
    (257, 400, 31, 4096),
    (70000, 20000, 31, 64),
]


@pytest.mark.parametrize(("tokens", "vocabulary", "places", "width"), SIZES)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_errs_no_more_than_plain_torch(tokens, vocabulary, places, width, p, dtype):
    batch = Batch(tokens, vocabulary, places, width, dtype)
    exact, plain = batch.plain(p, torch.float64), batch.plain(p, dtype)
    poison_cache()
    ours = (batch.forward(p), *batch.backward(p))
    for mine, other, truth in zip(ours, plain, exact, strict=True):
        assert mine.dtype == dtype
        assert_kernel_as_good_as(mine, other, truth)
    assert ours[1][PAD].eq(0).all()
    assert ours[1][exact[1].eq(0).all(1)].eq(0).all()
    again = (batch.forward(p), *batch.backward(p))
    assert all(map(torch.equal, ours, again))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", [True, False])
def test_equals_the_reference_on_the_cpu(dtype, positions):
    batch = Batch(300, 100, 31, 72, dtype, torch.int32)
    extra = (batch.positions.cpu(), batch.position_weight.cpu()) if positions else (None, None)
    expected = ops.embedding_fwd(
        batch.tokens.cpu(), batch.weight.cpu(), *extra, SCALE, 0.1, make_rng(device="cpu"), SITE
    )
    y = batch.forward(0.1, positions)
    torch.testing.assert_close(y.cpu(), expected)
    # Exactly the elements that the reference drops.
    assert torch.equal(y.cpu() == 0, expected == 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table", DTYPES)
def test_accumulate_adds(dtype, table):
    """Gradients of tables of every float type are summed in float32 and rounded once."""
    batch = Batch(2000, 3000, 31, 264, dtype)
    fresh = batch.backward(0.2, torch.float32)
    before = [torch.randn_like(x).to(table) for x in fresh]
    after = batch.backward(0.2, accumulate=before)
    for new, old, gradient in zip(after, before, fresh, strict=True):
        torch.testing.assert_close(new, (old + gradient).to(table))
    absent = torch.ones(3000, dtype=torch.bool, device="cuda")
    absent[batch.tokens] = False
    absent[PAD] = True
    assert torch.equal(after[0][absent], before[0][absent])
    for rounded, exact in zip(batch.backward(0.2, table), fresh, strict=True):
        assert torch.equal(rounded, exact.to(table))


def test_a_rate_that_drops_nothing_scales_forward_and_backward_alike():
    """Dropout's resolution is 2^-16. A rate below half of that drops nothing, but still scales."""
    p = 2.0**-17
    batch = Batch(100, 50, 31, 64, torch.float32)
    for scaled, plain in (
        (batch.forward(p), batch.forward(0.0)),
        (batch.backward(p)[0], batch.backward(0.0)[0]),
    ):
        assert abs(scaled.double().norm() / plain.double().norm() - 1 / (1 - p)) < 1e-6


@pytest.mark.parametrize("positions", [True, False])
def test_padding(positions):
    batch = Batch(500, 30, 31, 64, torch.float32)
    batch.tokens[::3] = PAD
    excluded, included = batch.backward(0.0), batch.backward(0.0, pad=-1, positions=positions)
    assert excluded[0][PAD].eq(0).all()
    expected = SCALE * batch.dy[batch.tokens == PAD].double().sum(0)
    torch.testing.assert_close(included[0][PAD].double(), expected, rtol=1e-5, atol=1e-4)
    others = torch.arange(30, device="cuda") != PAD
    assert torch.equal(excluded[0][others], included[0][others])


@pytest.mark.parametrize("count", [32, 33, 64, 65, 5000])
def test_one_word_only(count):
    """A segment that ends with a window, one that ends just after one, and one of many blocks."""
    batch = Batch(count, 9, 3, 1024, torch.bfloat16)
    batch.tokens[:], batch.positions[:] = 7, 2
    dweight, dposition = batch.backward(0.0, torch.float32)
    exact = batch.dy.double().sum(0)
    for grad, row, expected in ((dweight, 7, SCALE * exact), (dposition, 2, exact)):
        plain = batch.dy.float().sum(0) * (SCALE if row == 7 else 1.0)
        assert_kernel_as_good_as(grad[row], plain, expected)
        assert grad.count_nonzero(1).gt(0).nonzero().flatten().tolist() == [row]


def test_strided_rows():
    batch = Batch(100, 50, 31, 64, torch.float16)
    wide = torch.randn(100, 128, device="cuda").half()
    tables = [torch.full((len(x), 96), math.nan, device="cuda").half() for x in (batch.weight,)]
    batch.dy = wide[:, 64:]
    ops.embedding_bwd(
        batch.dy, batch.tokens.repeat_interleave(2)[::2], None, SCALE, PAD, 0.1, make_rng(), SITE,
        tables[0][:, 32:], None, False,
    )  # fmt: skip
    batch.dy = batch.dy.contiguous()
    assert torch.equal(tables[0][:, 32:], batch.backward(0.1)[0])
    assert tables[0][:, :32].isnan().all()
    padded = torch.zeros(50, 128, device="cuda").half()[:, :64].copy_(batch.weight)
    y, batch.weight = batch.forward(0.1), padded
    assert torch.equal(batch.forward(0.1), y)


@pytest.mark.large
def test_more_elements_than_32_bits_count():
    rows, width = 2**21 + 3, 1032
    weight = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    tokens = torch.arange(rows - 1, -1, -1, device="cuda")
    arguments = (0.25, make_rng(), SITE)
    y = ops.embedding_fwd(tokens, weight, None, None, 2.0, *arguments)
    chosen = torch.tensor([0, 2**21, rows - 1], device="cuda")
    keep = ops.keep_mask(make_rng(), SITE, chosen, width, 0.25)
    expected = (2.0 * weight[tokens[chosen]].float() * keep / 0.75).bfloat16()
    torch.testing.assert_close(y[chosen], expected)
    dweight = torch.full_like(weight, math.nan)
    ops.embedding_bwd(weight, tokens, None, 2.0, 5, *arguments, dweight, None, False)
    expected = (2.0 * weight[chosen].float() * keep / 0.75).bfloat16()
    torch.testing.assert_close(dweight[tokens[chosen]], expected)
    assert dweight[5].eq(0).all() and dweight[::1000].isfinite().all()


def test_replayed_graph_draws_anew():
    """Every replay reads the tokens and the rng on the device."""
    batch = Batch(3000, 500, 31, 256, torch.bfloat16)
    rng = make_rng()
    dweight = torch.full_like(batch.weight, math.nan)

    def run():
        y = ops.embedding_fwd(batch.tokens, batch.weight, None, None, SCALE, 0.1, rng, SITE)
        ops.embedding_bwd(
            batch.dy, batch.tokens, None, SCALE, PAD, 0.1, rng, SITE, dweight, None, False
        )
        return y

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for micro_batch in (5, 6):
        rng[1] = micro_batch
        batch.tokens.copy_(batch.tokens.roll(micro_batch) // 2)
        graph.replay()
        seen = captured.clone(), dweight.clone()
        assert torch.equal(seen[0], run()) and torch.equal(seen[1], dweight)


@pytest.mark.parametrize("accumulate", [True, False])
def test_empty(accumulate):
    batch = Batch(0, 40, 4, 16, torch.float16)
    assert batch.forward(0.1).shape == (0, 16)
    before = [torch.ones_like(batch.weight), torch.ones_like(batch.position_weight)]
    after = batch.backward(0.1, accumulate=before if accumulate else None)
    assert all(x.eq(1.0 if accumulate else 0.0).all() for x in after)


def test_refusals():
    batch = Batch(10, 40, 4, 16, torch.float16)
    weight, dy = batch.weight, batch.dy
    for wrong, message in (
        (weight[:, :12], "weight has rows of 12 elements; .* must be a multiple of 8"),
        (weight[:, 1:9], "weight must be contiguous in its last dimension, with rows on 16-byte"),
        (weight.double(), "weight must be float32, float16 or bfloat16 on a GPU"),
    ):
        with pytest.raises(RuntimeError, match=f"embedding_fwd: {message}"):
            ops.embedding_fwd(batch.tokens, wrong, None, None, 1.0, 0.0, make_rng(), 0)
    for wrong, table, message in (
        (dy[:, :12], weight[:, :12], "dy has rows of 12 elements"),
        (dy.double(), weight, "dy must be float32, float16 or bfloat16 on a GPU"),
        (dy, weight.double(), "dweight must be float32, float16 or bfloat16 on a GPU"),
        (dy[:, :8], weight[:, 4:12], "dweight must be contiguous in its last dimension, with rows"),
    ):
        with pytest.raises(RuntimeError, match=f"embedding_bwd: {message}"):
            ops.embedding_bwd(
                wrong, batch.tokens, None, 1.0, PAD, 0.0, make_rng(), 0, table, None, False
            )


def test_range_check(monkeypatch):
    monkeypatch.setenv("LIGHTSEQ_CHECK_INDICES", "1")
    batch = Batch(10, 40, 4, 16, torch.float16)
    batch.tokens[3] = 40
    with pytest.raises(ValueError, match=r"embedding_fwd: tokens must be in .* got 40"):
        batch.forward(0.0)
