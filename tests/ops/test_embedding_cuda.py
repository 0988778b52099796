"""The embedding kernels compared with float64 on the CPU and with plain torch's error on the
GPU."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from helpers.ops_testing import (
    assert_cast_of,
    assert_kernel_as_good_as,
    leaf,
    make_cast,
    poison_cache,
    skip_without_fp8,
)
from helpers.ops_testing import make_rng as rng_on
from torch.nn import functional

from lightseq_fairseq import ops

make_rng = functools.partial(rng_on, device="cuda")


PAD, SCALE, SITE, EPS = 1, 2.5, 4, 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def dropout(p, rng=None):
    return ops.Dropout(p, make_rng() if rng is None else rng, SITE)


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
        self.gamma, self.beta = normal(2)

    def embedded(self, p, has_norm=False, positions=True, rng=None, cast=None):
        """The results of the op."""
        extra = (self.positions, self.position_weight) if positions else (None, None)
        tables = self.tokens, self.weight, *extra
        if has_norm:
            vectors = self.gamma, self.beta
            return ops.embedding_layer_norm_fwd(
                *tables, *vectors, SCALE, dropout(p, rng), eps=EPS, cast=cast
            )
        return ops.embedding_fwd(*tables, SCALE, dropout(p, rng), cast)

    def forward(self, p, positions=True, rng=None):
        """y"""
        return self.embedded(p, False, positions, rng)[0]

    def backward(self, p, dtype=None, accumulate=None, positions=True, pad=PAD):
        """Both gradients; accumulate: the tensors to add to."""
        if accumulate is None:
            tables = (self.weight, self.position_weight)
            grads = [torch.full_like(x, math.nan, dtype=dtype or x.dtype) for x in tables]
        else:
            grads = [x.clone() for x in accumulate]
        poison_cache()
        ops.embedding_bwd(
            self.dy, self.tokens, self.positions, SCALE, pad, dropout(p),
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

    def normed(self, p, positions=True, rng=None):
        """(y, mean, rstd) with LayerNorm."""
        return self.embedded(p, True, positions, rng)[:3]

    def normed_backward(self, p, mean, rstd, dtype=None, accumulate=None, rng=None):
        """Gradients of LayerNorm's input, gamma and beta; accumulate: the tensors to add to."""
        grads = [torch.full_like(self.gamma, math.nan, dtype=dtype) for _ in range(2)]
        if accumulate is not None:
            grads = [x.clone() for x in accumulate]
        dx = ops.embedding_layer_norm_bwd(
            self.dy, self.forward(0.0, rng=rng), self.gamma, mean, rstd, dropout(p, rng), *grads,
            accumulate=accumulate is not None,
        )  # fmt: skip
        return dx, *grads

    def normed_plain(self, p, dtype):
        """y and the gradients of `normed_backward` in plain torch, with our dropout's mask."""
        keep = ops.dropout_mask(make_rng(device="cpu"), SITE, *self.dy.shape, p).cuda()
        x = SCALE * self.weight.to(dtype)[self.tokens]
        x = leaf(x + self.position_weight.to(dtype)[self.positions], dtype)
        gamma, beta = leaf(self.gamma, dtype), leaf(self.beta, dtype)
        y = functional.layer_norm(x, gamma.shape, gamma, beta, EPS) * keep / (1 - p)
        y.backward(self.dy.to(dtype))
        return y.detach(), x.grad, gamma.grad, beta.grad


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


CAST_SIZES = [
    (1, 16), (3, 48), (33, 144), (129, 272), (777, 1040), (3712, 1024), (301, 4096), (9, 8192),
]  # fmt: skip


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(("tokens", "width"), CAST_SIZES)
def test_casts_the_rounded_result(tokens, width, p, has_norm):
    check_cast(Batch(tokens, 50, 31, width, torch.bfloat16), p, has_norm)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e30, -1e30])
def test_numbers_that_no_cast_fits(number, has_norm):
    """They are counted once."""
    batch = Batch(50, 50, 31, 272, torch.bfloat16)
    batch.weight[batch.tokens[3], 17] = number
    check_cast(batch, 0.0, has_norm)


def check_cast(batch, p, has_norm):
    """The other results are those without a cast."""
    skip_without_fp8()
    *plain, nothing = batch.embedded(p, has_norm)
    cast = make_cast(2.0**-7, "cuda")
    poison_cache()
    *ours, values = batch.embedded(p, has_norm, cast=cast)
    torch.testing.assert_close(ours, plain, rtol=0, atol=0, equal_nan=True)
    assert nothing.numel() == 0
    assert_cast_of(plain[0], [values], cast)


# Every width of a team of threads, in part and whole; blocks with teams that have no row.
@pytest.mark.parametrize(
    ("tokens", "width"),
    [(1, 8), (31, 256), (1000, 1032), (3000, 520), (257, 4096), (130, 8192), (70000, 64)],
)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_errs_no_more_than_plain_torch(tokens, width, p, dtype):
    batch = Batch(tokens, 900, 31, width, dtype)
    exact, plain = batch.normed_plain(p, torch.float64), batch.normed_plain(p, dtype)

    def run():
        poison_cache()
        y, *statistics = batch.normed(p)
        return y, *batch.normed_backward(p, *statistics), *statistics

    *ours, mean, rstd = run()
    names = ("y", "dx", "dgamma", "dbeta")
    for name, mine, other, truth in zip(names, ours, plain, exact, strict=True):
        assert mine.dtype == dtype
        assert_kernel_as_good_as(mine, other, truth, name, half_roundings=0.5)
    x = SCALE * batch.weight.double()[batch.tokens]
    x += batch.position_weight.double()[batch.positions]
    torch.testing.assert_close(mean.double(), x.mean(1), rtol=1e-4, atol=1e-5)
    variance = x.var(1, unbiased=False)
    torch.testing.assert_close(rstd.double(), (variance + EPS).rsqrt(), rtol=1e-4, atol=0)
    assert all(map(torch.equal, (*ours, mean, rstd), run()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_beta_it_is_zero(dtype):
    batch, results = Batch(300, 900, 31, 520, dtype), []
    for beta in (None, torch.zeros_like(batch.gamma)):
        batch.beta = beta
        results.append(batch.normed(0.1))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", [True, False])
def test_layer_norm_equals_the_reference_on_the_cpu(dtype, positions):
    batch = Batch(300, 100, 31, 72, dtype, torch.int32)
    extra = (batch.positions.cpu(), batch.position_weight.cpu()) if positions else (None, None)
    vectors = batch.gamma.cpu(), batch.beta.cpu()
    expected = ops.embedding_layer_norm_fwd(
        batch.tokens.cpu(), batch.weight.cpu(), *extra, *vectors,
        SCALE, dropout(0.1, make_rng(device="cpu")), EPS,
    )  # fmt: skip
    ours = [x.cpu() for x in batch.embedded(0.1, True, positions)]
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, other)
    # Exactly the elements that the reference drops.
    assert torch.equal(ours[0] == 0, expected[0] == 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vector", DTYPES)
def test_layer_norm_accumulates(dtype, vector):
    """Gradients of vectors of every float type are summed in float32 and rounded once."""
    batch = Batch(2000, 3000, 31, 264, dtype)
    statistics = batch.normed(0.2)[1:]
    dx, *fresh = batch.normed_backward(0.2, *statistics, torch.float32)
    before = [torch.randn_like(x).to(vector) for x in fresh]
    again, *after = batch.normed_backward(0.2, *statistics, accumulate=before)
    assert torch.equal(again, dx)
    for new, old, gradient in zip(after, before, fresh, strict=True):
        torch.testing.assert_close(new, (old + gradient).to(vector))
    _, *rounded = batch.normed_backward(0.2, *statistics, vector)
    for mine, exact in zip(rounded, fresh, strict=True):
        assert torch.equal(mine, exact.to(vector))


def test_layer_norm_keeps_a_nan_that_is_dropped():
    batch = Batch(100, 50, 31, 64, torch.bfloat16)
    y, mean, rstd = batch.normed(0.4)
    row, column = (int(i) for i in (y == 0).nonzero()[0])
    batch.dy[row, column] = math.nan
    dx, dgamma, dbeta = batch.normed_backward(0.4, mean, rstd)
    assert dx[row].isnan().all() and dx.isnan().any(1).sum() == 1
    assert all(x.isnan().nonzero().flatten().tolist() == [column] for x in (dgamma, dbeta))


def test_layer_norm_of_strided_rows():
    batch = Batch(100, 50, 31, 64, torch.float16)
    y, *statistics = batch.normed(0.1)
    expected = batch.normed_backward(0.1, *statistics)
    for name in ("weight", "position_weight", "dy"):
        rows = getattr(batch, name)
        wide = torch.full((len(rows), 128), math.nan, device="cuda").half()
        wide[:, 64:] = rows
        setattr(batch, name, wide[:, 64:])
    batch.tokens = batch.tokens.repeat_interleave(2)[::2]
    assert torch.equal(batch.normed(0.1)[0], y)
    assert all(map(torch.equal, batch.normed_backward(0.1, *statistics), expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", [True, False])
def test_equals_the_reference_on_the_cpu(dtype, positions):
    batch = Batch(300, 100, 31, 72, dtype, torch.int32)
    extra = (batch.positions.cpu(), batch.position_weight.cpu()) if positions else (None, None)
    expected, _ = ops.embedding_fwd(
        batch.tokens.cpu(), batch.weight.cpu(), *extra, SCALE, dropout(0.1, make_rng(device="cpu"))
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
        batch.dy, batch.tokens.repeat_interleave(2)[::2], None, SCALE, PAD, dropout(0.1),
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
    y, _ = ops.embedding_fwd(tokens, weight, None, None, 2.0, dropout(0.25))
    chosen = torch.tensor([0, 2**21, rows - 1], device="cuda")
    keep = ops.keep_mask(make_rng(), SITE, chosen, width, 0.25)
    expected = (2.0 * weight[tokens[chosen]].float() * keep / 0.75).bfloat16()
    torch.testing.assert_close(y[chosen], expected)
    dweight = torch.full_like(weight, math.nan)
    ops.embedding_bwd(weight, tokens, None, 2.0, 5, dropout(0.25), dweight, None, False)
    expected = (2.0 * weight[chosen].float() * keep / 0.75).bfloat16()
    torch.testing.assert_close(dweight[tokens[chosen]], expected)
    assert dweight[5].eq(0).all() and dweight[::1000].isfinite().all()


def test_replayed_graph_draws_anew():
    """Every replay reads the tokens and the rng on the device."""
    batch = Batch(3000, 500, 31, 256, torch.bfloat16)
    rng = make_rng()
    dweight = torch.full_like(batch.weight, math.nan)

    def run():
        normed, *statistics = batch.normed(0.1, rng=rng)
        gradients = batch.normed_backward(0.1, *statistics, rng=rng)
        y = batch.forward(0.1, positions=False, rng=rng)
        ops.embedding_bwd(
            batch.dy, batch.tokens, None, SCALE, PAD, dropout(0.1, rng), dweight, None, False
        )
        return y, normed, *gradients

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for micro_batch in (5, 6):
        rng[1] = micro_batch
        batch.tokens.copy_(batch.tokens.roll(micro_batch) // 2)
        graph.replay()
        seen = *(x.clone() for x in captured), dweight.clone()
        assert all(map(torch.equal, seen, (*run(), dweight)))


@pytest.mark.parametrize("accumulate", [True, False])
def test_empty(accumulate):
    batch = Batch(0, 40, 4, 16, torch.float16)
    assert batch.forward(0.1).shape == (0, 16)
    before = [torch.ones_like(batch.weight), torch.ones_like(batch.position_weight)]
    after = batch.backward(0.1, accumulate=before if accumulate else None)
    assert all(x.eq(1.0 if accumulate else 0.0).all() for x in after)
    y, *statistics = batch.normed(0.1)
    assert y.shape == (0, 16)
    before = [torch.ones_like(batch.gamma) for _ in range(2)]
    _, *after = batch.normed_backward(0.1, *statistics, accumulate=before if accumulate else None)
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
            ops.embedding_fwd(batch.tokens, wrong, None, None, 1.0, dropout(0.0))
    for wrong, table, message in (
        (dy[:, :12], weight[:, :12], "dy has rows of 12 elements"),
        (dy.double(), weight, "dy must be float32, float16 or bfloat16 on a GPU"),
        (dy, weight.double(), "dweight must be float32, float16 or bfloat16 on a GPU"),
        (dy[:, :8], weight[:, 4:12], "dweight must be contiguous in its last dimension, with rows"),
    ):
        with pytest.raises(RuntimeError, match=f"embedding_bwd: {message}"):
            ops.embedding_bwd(wrong, batch.tokens, None, 1.0, PAD, dropout(0.0), table, None, False)


def test_layer_norm_refusals():
    batch = Batch(10, 40, 4, 16, torch.float16)
    wide = torch.zeros(4, 8200, device="cuda").half()
    for weight, gamma, message in (
        (batch.weight[:, :12], batch.gamma[:12], "weight has rows of 12 elements; .* multiple of"),
        (batch.weight.double(), batch.gamma.double(), "weight must be float32, float16 or"),
        (wide, wide[0], "rows must have at most 8192 elements on a GPU, got 8200"),
    ):
        with pytest.raises(RuntimeError, match=f"embedding_layer_norm_fwd: {message}"):
            ops.embedding_layer_norm_fwd(
                batch.tokens, weight, None, None, gamma, gamma, 1.0, dropout(0.0), EPS
            )
    statistics = torch.ones(2, 10, device="cuda")
    for dy, gamma, message in (
        (batch.dy[:, :12], batch.gamma[:12], "dy has rows of 12 elements; .* multiple of 8"),
        (wide[:1].expand(10, -1), wide[0], "rows must have at most 8192 elements on a GPU"),
    ):
        with pytest.raises(RuntimeError, match=f"embedding_layer_norm_bwd: {message}"):
            ops.embedding_layer_norm_bwd(
                dy, dy, gamma, *statistics, dropout(0.0), None, None, False
            )


def test_range_check(monkeypatch):
    monkeypatch.setenv("LIGHTSEQ_CHECK_INDICES", "1")
    batch = Batch(10, 40, 4, 16, torch.float16)
    batch.tokens[3] = 40
    with pytest.raises(ValueError, match=r"embedding_fwd: tokens must be in .* got 40"):
        batch.forward(0.0)
