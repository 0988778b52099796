"""The kernels at the end of a sublayer, compared with float64 and with plain torch's error on the
GPU."""

from __future__ import annotations

import functools
import math
from itertools import pairwise

import pytest
import torch
from helpers.ops_testing import (
    assert_kernel_as_good_as,
    assert_replays_draw_anew,
    leaf,
    make_cast,
    on_gpu,
    poison_cache,
    skip_without_fp8,
)
from helpers.ops_testing import make_rng as rng_on
from torch.nn import functional

from lightseq_fairseq import ops
from lightseq_fairseq.ops.casting import E4M3, quantise

make_rng = functools.partial(rng_on, device="cuda")


SITE, EPS = 6, 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAMES = ("x", "bias", "residual", "gamma", "beta")
ALL = ("bias", "residual", "norm")
PARTS = [ALL, ("norm",), ("bias", "residual"), ("residual", "norm")]

# (tokens, width): one token; an incomplete tile; a width for each variant of the kernels, and 8 and
# 1032, which are no multiples of a number of threads; several rounds of tiles per block.
SIZES = [
    (1, 1024), (5, 8), (37, 256), (1000, 512), (5000, 1024), (601, 1032), (130, 2048), (77, 4096),
    (33, 8192), (3, 5000),
]  # fmt: skip


CASTS = pytest.mark.parametrize("is_cast", [False, True])


def dropout(p, rng=None):
    return ops.Dropout(p, make_rng() if rng is None else rng, SITE)


def as_bytes(x):
    """torch does not compare numbers of E4M3."""
    return x.view(torch.uint8) if x.dtype == E4M3 else x


class Sublayer:
    """The inputs at the end of a sublayer, its parts, and gradients of its two outputs.

    is_cast: y and dx are also cast; then the dtype is bfloat16, and the width a multiple of 16.
    """

    def __init__(self, tokens, width, dtype, parts=ALL, p=0.1, mean=0.0, is_cast=False):
        self.cast = None
        if is_cast:
            skip_without_fp8()
            self.note_anew()
        generator = torch.Generator("cuda").manual_seed(tokens + width)
        shapes = {"x": (tokens, width), "residual": (tokens, width)}

        def normal(*shape):
            return torch.randn(*shape, generator=generator, device="cuda")

        self.tensors = {name: normal(*shapes.get(name, (width,))) for name in NAMES}
        self.tensors["x"] += mean
        self.tensors = {name: x.to(dtype) for name, x in self.tensors.items()}
        self.dy, self.dsum = normal(2, tokens, width).to(dtype)
        self.parts, self.p = parts, p

    def chosen(self, tensors):
        part_of = {"gamma": "norm", "beta": "norm"}
        present = ("x", *self.parts)
        return [tensors[name] if part_of.get(name, name) in present else None for name in NAMES]

    def note_anew(self):
        """Begin with another cast; return it."""
        self.cast = make_cast(device="cuda")
        return self.cast

    def widened(self):
        """The same numbers in float32, without a cast."""
        wide = Sublayer(1, 16, torch.float32, self.parts, self.p)
        wide.tensors = {name: x.float() for name, x in self.tensors.items()}
        wide.dy, wide.dsum = self.dy.float(), self.dsum.float()
        return wide

    def forward(self, keep_y=True):
        """sum, y, mean, rstd, and as bytes values and transpose."""
        poison_cache()
        results = ops.dropout_residual_layer_norm_fwd(
            *self.chosen(self.tensors), dropout(self.p), EPS, keep_y, self.cast
        )
        return [as_bytes(x) for x in results]

    def backward(self, outputs, which="both", grads=None, accumulate=False):
        """dx (which may be dresidual), dresidual, dgamma, dbeta, dbias, and dx's transpose."""
        total, _, mean, rstd, *_ = outputs
        x, bias, _, gamma, beta = self.chosen(self.tensors)
        dy, dsum = self.grads_of_outputs(which)
        if grads is None:
            grads = [
                None if v is None else torch.full_like(v, math.nan) for v in (gamma, beta, bias)
            ]
        poison_cache()
        dx, dresidual, transpose = ops.dropout_residual_layer_norm_bwd(
            dy, dsum, total if total.numel() else x, gamma, mean, rstd, dropout(self.p), *grads,
            accumulate=accumulate, cast=self.cast,
        )  # fmt: skip
        has_dx = self.p > 0 or self.cast is not None
        assert dx.numel() == (dresidual.numel() if has_dx else 0)
        assert self.cast is not None or transpose.numel() == 0
        return [as_bytes(dx) if has_dx else dresidual, dresidual, *grads, as_bytes(transpose)]

    def grads_of_outputs(self, which):
        has_dy = "norm" in self.parts and which != "dsum"
        return self.dy if has_dy else None, self.dsum if which != "dy" or not has_dy else None

    def plain(self, dtype, which="both"):
        """sum, y and the gradients of the five inputs in plain torch, with our dropout's mask."""
        leaves = {name: leaf(x, dtype) for name, x in self.tensors.items()}
        x, bias, residual, gamma, beta = self.chosen(leaves)
        total = x if bias is None else x + bias
        if self.p > 0:
            keep = ops.dropout_mask(make_rng(device="cpu"), SITE, *x.shape, self.p).cuda()
            total = total * keep / (1 - self.p)
        total = total if residual is None else residual + total
        y = None if gamma is None else functional.layer_norm(total, gamma.shape, gamma, beta, EPS)
        dy, dsum = self.grads_of_outputs(which)
        pairs = [(o, g) for o, g in ((y, dy), (total, dsum)) if g is not None]
        torch.autograd.backward([o for o, _ in pairs], [g.to(dtype) for _, g in pairs])
        grads = [leaves[name].grad for name in ("x", "residual", "gamma", "beta", "bias")]
        return [total.detach(), None if y is None else y.detach(), *grads]


def check_sublayer(layer, dtype, which="both"):
    outputs = layer.forward()
    total, y, mean, rstd, values, transpose = outputs
    assert values.numel() == transpose.numel() == 0
    ours = [total, y, *layer.backward(outputs, which)[:5]]
    plain, exact = layer.plain(dtype, which), layer.plain(torch.float64, which)
    names = ("sum", "y", "dx", "dresidual", "dgamma", "dbeta", "dbias")
    for name, mine, other, true in zip(names, ours, plain, exact, strict=True):
        if other is not None and mine is not None and mine.numel():
            assert_kernel_as_good_as(mine, other, true, name, half_roundings=0.5)
    if layer.parts == ("norm",) and layer.p == 0:
        assert total.numel() == 0
    if "norm" in layer.parts:
        assert mean.dtype == rstd.dtype == torch.float32
        assert_kernel_as_good_as(
            mean, plain[0].float().mean(1), exact[0].mean(1), "mean", half_roundings=0.5
        )
        true = (exact[0].var(1, correction=0) + EPS).rsqrt()
        other = (plain[0].float().var(1, correction=0) + EPS).rsqrt()
        assert_kernel_as_good_as(rstd, other, true, "rstd", half_roundings=0.5)
    else:
        assert y.numel() == mean.numel() == rstd.numel() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [3, 5000])
def test_without_beta_it_is_zero(tokens, dtype):
    layer, results = Sublayer(tokens, 520, dtype, ALL, 0.1), []
    for beta in (None, torch.zeros_like(layer.tensors["gamma"])):
        layer.tensors["beta"] = beta
        results.append(layer.forward())
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_errs_no_more_than_plain_torch(tokens, width, dtype):
    check_sublayer(Sublayer(tokens, width, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["dy", "dsum", "both"])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("parts", PARTS)
def test_any_part_may_be_missing(parts, p, which, dtype):
    check_sublayer(Sublayer(67, 768, dtype, parts, p), dtype, which)


def test_large_mean():
    """Statistics of centred values, so a mean of 1000 costs no precision of the variance."""
    check_sublayer(Sublayer(300, 1024, torch.float32, ("norm",), 0.0, mean=1000.0), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_drops_what_the_reference_drops(dtype):
    layer = Sublayer(70, 1032, dtype, ("bias",), 0.5)
    kept = layer.forward()[0] != 0
    expected = ops.dropout_mask(make_rng(device="cpu"), SITE, 70, 1032, 0.5)
    value = (layer.tensors["x"].float() + layer.tensors["bias"].float()) != 0
    assert torch.equal(kept, expected.cuda() & value)


@CASTS
@pytest.mark.parametrize("grad_dtype", [*DTYPES, torch.float64])
def test_parameter_gradients_have_any_float_type_and_accumulate(grad_dtype, is_cast):
    layer = Sublayer(500, 512, torch.bfloat16 if is_cast else torch.float16, is_cast=is_cast)
    outputs = layer.forward()
    fresh = [torch.full((512,), math.nan, dtype=torch.float32, device="cuda") for _ in range(3)]
    layer.backward(outputs, grads=fresh)
    held = [torch.randn(512, device="cuda").to(grad_dtype) for _ in range(3)]
    before = [x.clone() for x in held]
    layer.backward(outputs, grads=held, accumulate=True)
    for after, old, new in zip(held, before, fresh, strict=True):
        assert torch.equal(after, old + new if grad_dtype == torch.float64 else old.add_(new))
    some = [None, None, torch.full_like(fresh[2], math.nan)]
    layer.backward(outputs, grads=some)
    assert torch.equal(some[2], fresh[2])


@CASTS
@pytest.mark.parametrize("width", [512, 1024, 1032, 8192])
def test_same_input_same_bits(width, is_cast):
    layer = Sublayer(3001, width + width % 16 * is_cast, torch.bfloat16, is_cast=is_cast)
    runs = [[*(outputs := layer.forward()), *layer.backward(outputs)] for _ in range(3)]
    for one, other in pairwise(runs):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parts", "p"), [(ALL, 0.0), (ALL, 0.3), (("norm",), 0.0)])
@pytest.mark.parametrize("width", [8, 256, 512, 1016, 1024, 4096])
def test_few_rows_have_the_bits_of_many(width, parts, p, dtype):
    """Row counts on both sides of each limit at which the kernel or its grid changes."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    layer = Sublayer(40 * processors, width, dtype, parts, p)
    many = layer.forward()
    rows = {name: layer.tensors[name] for name in ("x", "residual")}
    full = [processors * 2**k for k in range(6)]
    for count in (1, 4, 5, 16, 17, 131, 700, 1150, 2047, 2048, 2049, *full, *(n + 1 for n in full)):
        layer.tensors.update({name: x[:count] for name, x in rows.items()})
        few = layer.forward()
        assert all(torch.equal(a, b[:count]) for a, b in zip(few, many, strict=True)), count


@pytest.mark.parametrize("tokens", [4, 700, 5000])
def test_waits_for_what_the_kernel_before_writes(tokens):
    """In a graph a kernel may start before the previous one has ended, which may write x or
    bias."""
    layer, rng = Sublayer(tokens, 1024, torch.bfloat16), make_rng()
    x, bias, residual, gamma, beta = layer.chosen(layer.tensors)

    def chain(after_each):
        y, total = x, residual
        for call in range(48):
            if call % 2:
                bias.neg_()
            total, y, *_ = ops.dropout_residual_layer_norm_fwd(
                y, bias, total, gamma, beta, dropout(0.0, rng), EPS
            )
            after_each()
        return y, total

    chain(torch.cuda.synchronize)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(lambda: None)
    for _ in range(3):
        x.mul_(-0.5)  # so that the numbers of the last replay would be wrong
        expected = chain(torch.cuda.synchronize)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@CASTS
def test_rows_may_be_strided(is_cast):
    width = 528 if is_cast else 520
    layer, strided = (Sublayer(90, width, torch.bfloat16, is_cast=is_cast) for _ in range(2))
    wide = [torch.full((90, 1040), math.nan, dtype=torch.bfloat16).cuda() for _ in range(4)]
    for x, room in zip(("x", "residual"), wide, strict=False):
        strided.tensors[x] = room[:, 8 : 8 + width].copy_(layer.tensors[x])
    strided.dy, strided.dsum = (
        room[:, :width].copy_(x) for room, x in zip(wide[2:], (layer.dy, layer.dsum))
    )
    results = []
    for each in (layer, strided):
        outputs = each.forward()
        results.append([*outputs, *each.backward(outputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.large
def test_more_elements_than_32_bits_count():
    tokens, width = 2**21 + 5, 1024
    x = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
    gamma, beta = torch.randn(2, width, dtype=torch.bfloat16, device="cuda")
    rng, last = make_rng(), slice(tokens - 5, tokens)
    total, y, mean, rstd, *_ = ops.dropout_residual_layer_norm_fwd(
        x, None, None, gamma, beta, dropout(0.5, rng), EPS
    )
    rows = torch.arange(tokens)[last]
    keep = ops.keep_mask(make_rng(device="cpu"), SITE, rows, width, 0.5).cuda()
    assert torch.equal(total[last], x[last] * keep * 2)
    expected = functional.layer_norm(
        total[last].float(), (width,), gamma.float(), beta.float(), EPS
    )
    torch.testing.assert_close(y[last].float(), expected, rtol=2**-8, atol=2**-8)
    none = (None, None, None, False)
    whole = ops.dropout_residual_layer_norm_bwd(
        x, None, total, gamma, mean, rstd, dropout(0.5, rng), *none
    )
    end = [t[last].clone() for t in (x, total, mean, rstd)]
    _, dresidual, _ = ops.dropout_residual_layer_norm_bwd(
        end[0], None, end[1], gamma, *end[2:], dropout(0.0, rng), *none
    )
    assert torch.equal(whole[1][last], dresidual)
    assert torch.equal(whole[0][last], dresidual * keep * 2)


@CASTS
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_no_tokens(p, is_cast):
    layer = Sublayer(0, 64, torch.bfloat16 if is_cast else torch.float16, p=p, is_cast=is_cast)
    outputs = layer.forward()
    operand = [(0, 64), (64, 0)] if is_cast else [(0,), (0,)]
    assert [tuple(x.shape) for x in outputs] == [(0, 64), (0, 64), (0,), (0,), *operand]
    dx, dresidual, *grads, transpose = layer.backward(outputs)
    assert transpose.shape == operand[1]
    assert dx.shape == dresidual.shape == (0, 64)
    assert all(g.eq(0).all() for g in grads)
    held = [torch.ones(64, device="cuda") for _ in range(3)]
    layer.backward(outputs, grads=held, accumulate=True)
    assert all(g.eq(1).all() for g in held)
    if is_cast:
        assert all(map(torch.equal, layer.cast, make_cast(device="cuda")))


def test_not_a_number_stays_visible():
    layer = Sublayer(300, 1024, torch.float16, p=0.5)
    layer.tensors["x"][7] = math.nan
    total, y, *_ = outputs = layer.forward()
    assert total[7].isnan().all() and y[7].isnan().all() and total.isnan().sum() == 1024
    dx, _, dgamma, *_ = layer.backward(outputs)
    assert dx[7].isnan().all() and dgamma.isnan().all()


@CASTS
def test_replayed_graph_draws_anew(is_cast):
    layer = Sublayer(200, 512, torch.bfloat16, p=0.5, is_cast=is_cast)
    rng = make_rng(micro_batch=0)
    chosen, of_dropout = layer.chosen(layer.tensors), dropout(layer.p, rng)
    grads = [torch.empty_like(layer.tensors["gamma"]) for _ in range(3)]

    def run():
        outputs = ops.dropout_residual_layer_norm_fwd(*chosen, of_dropout, EPS, cast=layer.cast)
        gradients = ops.dropout_residual_layer_norm_bwd(
            layer.dy, layer.dsum, outputs[0], chosen[3], *outputs[2:4], of_dropout, *grads,
            accumulate=False, cast=layer.cast,
        )  # fmt: skip
        return [as_bytes(x) for x in (*outputs, *gradients, *grads)]

    assert_replays_draw_anew(run, rng)


# (tokens, width) of casts: as above, and rows that fill their last 16 in part or whole.
CAST_SIZES = [
    (1, 1024), (5, 16), (37, 256), (1000, 512), (3712, 1024), (16384, 1024), (601, 1040),
    (130, 2048), (5000, 2064), (77, 4096), (33, 8192), (3, 5008), (1500, 6144),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "width"), CAST_SIZES)
def test_casts_the_float32_results(tokens, width):
    check_casts(Sublayer(tokens, width, torch.bfloat16, is_cast=True))


@pytest.mark.parametrize("which", ["dy", "dsum", "both"])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("parts", [ALL, ("norm",), ("residual", "norm")])
def test_casts_if_a_part_is_missing(parts, p, which):
    check_casts(Sublayer(67, 768, torch.bfloat16, parts, p, is_cast=True), which)


def check_casts(layer, which="both"):
    """The casts are those of what the op computes from the same numbers in float32; the other
    results have the bits that they have without a cast."""
    cast, layer.cast = layer.cast, None
    outputs, sums = layer.forward(), new_sums(layer)
    dresidual = layer.backward(outputs, which, sums)[1]
    wide = layer.widened()
    y = wide.forward()[1]
    dx = wide.backward([x.float() for x in outputs], which, [None] * 3)[0]

    layer.cast = cast
    *ours, values, transpose = layer.forward()
    assert all(map(torch.equal, ours, outputs[:4]))
    assert_is_nearly_cast_of(y, [values, transpose], cast)
    total, nothing, *others = layer.forward(keep_y=False)
    assert torch.equal(total, outputs[0]) and nothing.numel() == 0
    assert all(map(torch.equal, others, [*ours[2:], values, transpose]))

    cast, ours = layer.note_anew(), new_sums(layer)
    values, mine, *_, transpose = layer.backward(outputs, which, ours)
    assert torch.equal(mine, dresidual)
    assert_is_nearly_cast_of(dx, [values, transpose], cast)
    for name, mine, other in zip(("dgamma", "dbeta", "dbias"), ours, sums, strict=True):
        if other is not None:
            size = float(other.nan_to_num().abs().max()) + 1
            torch.testing.assert_close(
                mine, other, rtol=1e-4, atol=1e-5 * size, equal_nan=True, msg=name
            )


def new_sums(layer):
    sums = [torch.full_like(layer.dy[0], math.nan, dtype=torch.float32) for _ in range(3)]
    return sums if "bias" in layer.parts else [*sums[:2], None]


def assert_is_nearly_cast_of(x, operand, cast):
    """At most a few numbers are the next of E4M3: the compiler may contract other additions.

    operand: values and transpose as bytes.
    """
    expected = make_cast(device="cuda")
    values, transpose = map(as_bytes, quantise(x, expected))
    rows = len(x)
    assert torch.equal(operand[1][:, :rows], operand[0].t()) and not operand[1][:, rows:].any()
    assert operand[1].shape == transpose.shape
    differ = int((operand[0] != values).sum())
    assert differ <= 2 + 1e-4 * x.numel(), f"{differ} numbers of {x.numel()} differ"
    numbers, others = (v.view(E4M3).float() for v in (operand[0], values))
    torch.testing.assert_close(numbers, others, rtol=0.126, atol=2.0**-9)
    torch.testing.assert_close(cast.amax, expected.amax, rtol=1e-5, atol=0)
    assert abs(int(cast.saturated - expected.saturated)) <= 1 + 1e-4 * int(expected.saturated)


def test_not_a_number_stays_visible_in_casts():
    layer = Sublayer(40, 256, torch.bfloat16, is_cast=True)
    layer.tensors["x"][3], layer.dy[3], layer.dsum[5, 7] = math.nan, math.nan, math.inf
    *outputs, values, transpose = layer.forward()
    assert (values[3] == 0x7F).all() and (transpose[:, 3] == 0x7F).all()
    assert not (values[4] == 0x7F).any() and not transpose[:, 40:].any()
    values, _, *sums, transpose = layer.backward(outputs)
    assert (values[3] == 0x7F).all() and values[5, 7] == 0x7F and transpose[7, 5] == 0x7F
    assert all(x.isnan().any() for x in sums)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x": torch.randn(4, 12)},
            "x has rows of 12 elements; on a GPU the number must be a multiple of 8",
        ),
        (
            {"x": torch.randn(4, 40)[:, 3:35]},
            "x must be contiguous in its last dimension, with rows",
        ),
        ({"residual": torch.randn(4, 34)[:, :32]}, "residual must be contiguous in its last"),
        ({"gamma": torch.randn(64)[::2]}, "gamma must be contiguous in its last dimension"),
        ({"x": torch.randn(4, 32).double()}, "x must be float32, float16 or bfloat16 on a GPU"),
        ({"x": torch.randn(2, 16384)}, "rows must have at most 8192 elements on a GPU, got 16384"),
    ],
)
def test_refusals(change, message):
    shape, dtype = (
        (change.get("x", torch.empty(4, 32))).shape,
        change.get("x", torch.empty(0)).dtype,
    )
    tensors = {
        "x": torch.randn(shape, dtype=dtype), "bias": None,
        "residual": torch.randn(shape, dtype=dtype),
        "gamma": torch.randn(shape[1], dtype=dtype), "beta": torch.randn(shape[1], dtype=dtype),
    }  # fmt: skip
    arguments = {name: None if t is None else on_gpu(t) for name, t in (tensors | change).items()}
    with pytest.raises(RuntimeError, match=f"dropout_residual_layer_norm_fwd: {message}"):
        ops.dropout_residual_layer_norm_fwd(**arguments, dropout=dropout(0.1), eps=EPS)


def test_backward_refuses_gaps():
    layer = Sublayer(4, 32, torch.float32)
    outputs = layer.forward()
    grads = [torch.empty(64, device="cuda")[::2], None, None]
    with pytest.raises(RuntimeError, match="_bwd: dgamma must be contiguous"):
        layer.backward(outputs, grads=grads)
    layer.dy = torch.randn(4, 40, device="cuda")[:, 3:35]
    with pytest.raises(RuntimeError, match="_bwd: dy must be contiguous in its last dimension"):
        layer.backward(outputs)
