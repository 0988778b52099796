"""Runs every kernel once at small, ragged sizes, for compute-sanitizer's racecheck.

racecheck fails in cuBLAS's kernels, so no GEMM of cuBLAS's runs here. Results are only checked to
be
finite, and equal in a second run.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from helpers.blocked_tokens import Hypotheses
from helpers.fp8_operands import quantised
from helpers.ops_testing import adam_arguments, make_rng, skip_without_fp8
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.ops.casting import E4M3
from lightseq_fairseq.ops.fp8_weights import Matrix, fp8_tiles
from lightseq_fairseq.ops.linear_activation import store_slope
from lightseq_fairseq.ops.update_scalars import KNOWN_RATES, Given, State

HALVES = [torch.float16, torch.bfloat16]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
DTYPES_AND_CAST = pytest.mark.parametrize(
    ("dtype", "is_cast"),
    [*((dtype, False) for dtype in (torch.float32, *HALVES)), (torch.bfloat16, True)],
)
SITE, P = 3, 0.25


def on_gpu(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype).cuda()


def ids(rows: int, size: int) -> Tensor:
    return torch.randint(0, size, (rows,)).cuda()


def dropout() -> ops.Dropout:
    return ops.Dropout(P, make_rng().cuda(), SITE)


def new_cast(is_cast: bool = True) -> ops.Cast | None:
    if not is_cast:
        return None
    skip_without_fp8()
    return ops.Cast(*(torch.tensor(x).cuda() for x in (2.0**-6, 0.0, 0)))


def statistics(cast: ops.Cast | None) -> tuple[Tensor, ...]:
    return () if cast is None else cast[1:]


def check(call: Callable[[], tuple[Tensor, ...]]) -> None:
    first, second = (
        [(x.float() if x.dtype == E4M3 else x).cpu() for x in call()]  # torch compares no fp8
        for _ in range(2)
    )
    for x, y in zip(first, second, strict=True):
        assert x.isfinite().all() and torch.equal(x, y)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(2)


@DTYPES_AND_CAST
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (False, 20)])
@pytest.mark.parametrize(
    "lengths", [[3, 16, 1, 30], [64, 40], [100, 20, 128], [200, 150]], ids=lambda n: str(max(n))
)
def test_attention(
    lengths: list[int], causal: bool, window: int, width: int, dtype: torch.dtype, is_cast: bool
) -> None:
    width -= 16 * is_cast  # incomplete tiles
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
    rows, longest = sum(lengths) + 2, max(lengths)
    q, k, v, dout = (on_gpu(dtype, rows, 3, width) for _ in range(4))
    settings = (cu, cu, longest, longest, causal, window, width**-0.5, dropout())

    def call() -> tuple[Tensor, ...]:
        cast = new_cast(is_cast)
        out, lse, values = ops.attention_fwd(q, k, v, *settings, cast)
        slices = torch.empty((rows, 3, 3, width), dtype=E4M3 if is_cast else dtype, device="cuda")
        ops.attention_bwd(
            dout, q, k, v, out, lse, *settings, *slices.unbind(1), q_cast=cast, k_cast=cast
        )
        return out, lse, values, slices, *statistics(cast)

    check(call)


@DTYPES
@pytest.mark.parametrize("width", [40, 64, 128])
@pytest.mark.parametrize("sentences", [1, 50])
def test_decode_attention(sentences: int, width: int, dtype: torch.dtype) -> None:
    rows, heads, steps, beam = 5 * sentences, 3, 40, 5
    channels = heads * width
    qkv, cache = on_gpu(dtype, rows, 3 * channels), on_gpu(dtype, 2, steps, rows, channels)
    memory = on_gpu(dtype, 70 * sentences, 2 * channels)
    keys, values = memory.chunk(2, 1)
    cu = torch.arange(0, 70 * sentences + 1, 70).int().cuda()
    at, numbers = torch.full((rows,), steps - 1).int().cuda(), torch.arange(sentences).int().cuda()
    ancestry = ids(steps * rows, rows).int().view(steps, rows)
    ancestry[:20] = ancestry[:20, torch.arange(rows) // beam * beam]  # siblings share it

    def call() -> tuple[Tensor, ...]:
        settings = heads, width**-0.5
        out = ops.decode_self_attention(qkv, *cache, ancestry, at, *settings, beam)
        crossed = ops.decode_cross_attention(out, keys, values, cu, numbers, beam, *settings)
        return out, crossed, cache

    check(call)


@DTYPES
@pytest.mark.parametrize("positions", [30, 1200])
def test_block_repeats(positions: int, dtype: torch.dtype) -> None:
    given = Hypotheses(random.Random(positions), 40, positions, words=4, device="cuda")
    logits, scores = on_gpu(dtype, 40, 1003), on_gpu(torch.float32, 40)
    always = torch.tensor([0, 7], dtype=torch.int32, device="cuda")

    def call() -> tuple[Tensor, ...]:
        mine = logits.clone()
        found = ops.block_repeats(mine, scores, always, *given.tensors, 2, 1.5, False)
        return mine.nan_to_num(neginf=0.0), found

    check(call)


@DTYPES
@pytest.mark.parametrize(("rows", "classes"), [(5, 512 * 140), (400, 1003), (2000, 1003)])
def test_beam_search(rows: int, classes: int, dtype: torch.dtype) -> None:
    logits, scores = on_gpu(dtype, rows, classes), on_gpu(torch.float32, rows)
    if classes % 512 == 0:  # all of the best are in one group of threads, more than it has room for
        logits[0] = 0.0
        logits[0].view(-1, 512)[:, :8] = 1.0
        logits[1] = 0.0
        logits[1].view(-1, 512)[:, :72] = 1.0  # the same in each block of a row
    sentences, rules = torch.arange(rows // 5).int().cuda(), (1, 2, 3, 0, 0, 0.5, 1.0)
    steps, last_steps = torch.tensor([[3], [9]]).int().cuda().expand(2, rows).contiguous()
    memory = torch.zeros(10, rows).cuda()

    def call() -> tuple[Tensor, ...]:
        found = ops.beam_candidates(logits, scores, steps, last_steps, 10, *rules)
        drawn = ops.beam_sample(
            logits, scores, sentences, steps, last_steps, make_rng().cuda(), 5, 7, 0.0, *rules
        )
        progress = torch.zeros(2, dtype=torch.int32).cuda()
        moved = [progress, sentences.clone(), steps.clone(), steps.clone()]
        moved.append(found[1][:, 0].contiguous())
        moved.append(scores.clone())
        history = [memory.int(), memory.int(), memory.clone()]
        found_text = torch.zeros(rows, 10).cuda()
        results = [found_text.int(), found_text.clone(), memory[0].int(), memory[0].clone()]
        reports = torch.zeros(rows // 5 + 1, dtype=torch.int32).pin_memory()
        options = 5, 1, 0.0, 2, 1.0, 0
        ops.beam_advance(*found, last_steps, *moved, *history, *results, reports, *options)
        return *found, *drawn, *moved, *history, *results, reports

    check(call)


@DTYPES_AND_CAST
@pytest.mark.parametrize("width", [40, 1024, 2056])
def test_dropout_residual_layer_norm(width: int, dtype: torch.dtype, is_cast: bool) -> None:
    # The same number of rows for every team of threads. racecheck only compares how many barriers
    # two warps have passed, so if one team had one row more, it would report races.
    count = 16 * torch.cuda.get_device_properties(0).multi_processor_count
    width += width % 16 * is_cast
    x, residual, dy, dsum = (on_gpu(dtype, count, width) for _ in range(4))
    bias, gamma, beta = (on_gpu(dtype, width) for _ in range(3))
    of_dropout = dropout()

    def call() -> tuple[Tensor, ...]:
        cast = new_cast(is_cast)
        total, y, mean, rstd, *operand = ops.dropout_residual_layer_norm_fwd(
            x, bias, residual, gamma, beta, of_dropout, 1e-5, cast=cast
        )
        vectors = tuple(torch.empty_like(gamma) for _ in range(3))
        gradients = ops.dropout_residual_layer_norm_bwd(
            dy, dsum, total, gamma, mean, rstd, of_dropout, *vectors, accumulate=False, cast=cast
        )
        return total, y, mean, rstd, *operand, *gradients, *vectors, *statistics(cast)

    check(call)


@DTYPES_AND_CAST
@pytest.mark.parametrize("width", [40, 1024, 2056])
def test_embedding_layer_norm(width: int, dtype: torch.dtype, is_cast: bool) -> None:
    # As many rows for every team of threads, see test_dropout_residual_layer_norm.
    count = 16 * torch.cuda.get_device_properties(0).multi_processor_count
    width += width % 16 * is_cast
    tokens, positions, dy = ids(count, 50), ids(count, 20), on_gpu(dtype, count, width)
    tables = tokens, on_gpu(dtype, 50, width), positions, on_gpu(dtype, 20, width)
    gamma, beta = (on_gpu(dtype, width) for _ in range(2))
    of_dropout = dropout()

    def call() -> tuple[Tensor, ...]:
        cast = new_cast(is_cast)
        y, mean, rstd, values = ops.embedding_layer_norm_fwd(
            *tables, gamma, beta, 2.0, of_dropout, eps=1e-5, cast=cast
        )
        vectors = tuple(torch.empty_like(gamma) for _ in range(2))
        dx = ops.embedding_layer_norm_bwd(dy, y, gamma, mean, rstd, of_dropout, *vectors, False)
        return y, mean, rstd, values, dx, *vectors, *statistics(cast)

    check(call)


@DTYPES
@pytest.mark.parametrize("activation", ["identity", "relu", "gelu", "gelu_accurate", "silu"])
def test_bias_activation_dropout(activation: str, dtype: torch.dtype) -> None:
    x, dy, bias = on_gpu(dtype, 37, 264), on_gpu(dtype, 37, 264), on_gpu(dtype, 264)
    settings = (activation, dropout())

    def call() -> tuple[Tensor, ...]:
        dbias = torch.empty_like(bias)
        y = ops.bias_activation_dropout_fwd(x, bias, *settings)
        return y, ops.bias_activation_dropout_bwd(dy, x, bias, *settings, dbias, False), dbias

    check(call)


@DTYPES
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_accurate", "silu"])
def test_gated_activation(activation: str, dtype: torch.dtype) -> None:
    x, dy, settings = on_gpu(dtype, 37, 528), on_gpu(dtype, 37, 264), (activation, dropout())

    def call() -> tuple[Tensor, ...]:
        return (
            ops.gated_activation_fwd(x, *settings),
            ops.gated_activation_bwd(dy, x, *settings),
        )

    check(call)


@DTYPES
def test_rotary_embedding(dtype: torch.dtype) -> None:
    x, cos, sin = on_gpu(dtype, 37, 5, 72), *on_gpu(torch.float32, 2, 37, 36)

    def call() -> tuple[Tensor, ...]:
        y = x.clone()
        ops.rotary_embedding(y, cos, sin, False)
        return (y,)

    check(call)


@DTYPES
def test_fp8_quantise(dtype: torch.dtype) -> None:
    x = on_gpu(dtype, 137, 272)

    def call() -> tuple[Tensor, ...]:
        cast, sums = new_cast(), torch.empty_like(x[0])
        return *ops.fp8_quantise(x, cast, sums), sums, *statistics(cast)

    check(call)


def test_fp8_transpose() -> None:
    skip_without_fp8()
    x, scale = on_gpu(torch.bfloat16, 137, 272), torch.tensor(2.0**-6).cuda()
    check(lambda: (ops.fp8_transpose(x, scale).float(),))
    values = x.to(torch.float8_e4m3fn)

    def of_values() -> tuple[Tensor, ...]:
        sums = torch.empty_like(x[0])
        return ops.fp8_transpose(values, scale, sums=sums).float(), sums

    check(of_values)


def test_fp8_scales() -> None:
    amaxes, histories = torch.rand(150), torch.rand(16, 150)

    def call() -> tuple[Tensor, ...]:
        scale, amax, history = torch.ones(150).cuda(), amaxes.cuda(), histories.cuda()
        ops.fp8_scales(scale, amax, history, torch.zeros((), dtype=torch.float64).cuda(), False)
        return scale, amax, history

    check(call)


@pytest.mark.parametrize("in_update", [False, True])
def test_fp8_weights(in_update: bool) -> None:
    skip_without_fp8()
    rows, columns, count = 80, 144, 60
    size = rows * columns + 256  # with other parameters behind each matrix
    given = adam_arguments(on_gpu(torch.bfloat16, count * size))
    places = (Matrix(i * size, i * rows * columns, rows, columns) for i in range(count))
    tiles = fp8_tiles(places, count * size).cuda()
    scale = torch.full((count,), 2.0**-6).cuda()

    def call() -> tuple[Tensor, ...]:
        noted = torch.zeros(count).cuda(), torch.zeros(count, dtype=torch.int64).cuda()
        results = (torch.empty(count * rows * columns, dtype=E4M3).cuda() for _ in range(2))
        cast = ops.WeightCast(tiles, scale, *noted, *results)
        of_call = [x.clone() if isinstance(x, Tensor) else x for x in given.values()]
        if in_update:
            ops.adam_step(*of_call, cast)
        else:
            ops.fp8_weights(given["param_low"], cast)
        return *cast, *(x for x in of_call if isinstance(x, Tensor))

    check(call)


# Tiles for most SMs of an H200, incomplete on all sides: some blocks have one tile and some two.
# Code for other compute capabilities runs cuBLAS here, whose kernels for these sizes end under
# racecheck.
TILED = 2187, 72, 2056


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", ["gelu", "gelu_accurate", "silu"])
@pytest.mark.parametrize("rows", [3, TILED[0]])
def test_linear_activation(rows: int, activation: str, dtype: torch.dtype) -> None:
    _, inputs, outputs = TILED
    x, weight = on_gpu(dtype, rows, inputs), on_gpu(dtype, outputs, inputs)
    settings = on_gpu(dtype, outputs), activation, dropout(), True
    check(lambda: ops.linear_activation_fwd(x, weight, *settings))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("with_slope", [False, True])
def test_activation_linear(with_slope: bool, dtype: torch.dtype) -> None:
    rows, outputs, inputs = TILED
    x, dy = on_gpu(dtype, rows, inputs), on_gpu(dtype, rows, outputs)
    weight, slope = (
        on_gpu(dtype, outputs, inputs),
        store_slope(x.clamp(0, 1), dtype) if with_slope else None,
    )

    def call() -> tuple[Tensor, ...]:
        dbias = torch.empty_like(x[0])
        return *ops.activation_linear_bwd(dy, x, weight, slope, P, None, dbias, False), dbias

    check(call)


# Without dweight, since cuBLAS computes that.
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_accurate", "silu"])
@pytest.mark.parametrize("rows", [137, 2192])
def test_linear_next_to_an_activation_in_fp8(activation: str, rows: int) -> None:
    skip_without_fp8()
    x, weight = (quantised(on_gpu(torch.bfloat16, n, 80), 2.0**-6) for n in (rows, 2064))
    bias = on_gpu(torch.bfloat16, 2064)

    def call() -> tuple[Tensor, ...]:
        cast, dbias = new_cast(), torch.empty_like(bias)
        *y, slope = ops.linear_activation_fwd(x, weight, bias, activation, dropout(), True, cast)
        h, given = ops.Quantised(*y, cast.scale), None if activation == "relu" else slope
        # The second product has as many outputs as the first has inputs.
        dz = ops.activation_linear_bwd(
            x, h, weight.t(), given, P, None, dbias, accumulate=False, cast=cast
        )
        return *y, *dz, slope, dbias, *statistics(cast)

    check(call)


@DTYPES_AND_CAST
def test_embedding(dtype: torch.dtype, is_cast: bool) -> None:
    tokens, positions, width = ids(300, 40), ids(300, 20), 80 if is_cast else 72
    weight, places, dy = (on_gpu(dtype, rows, width) for rows in (50, 20, 300))
    of_dropout = dropout()

    def call() -> tuple[Tensor, ...]:
        cast = new_cast(is_cast)
        y, values = ops.embedding_fwd(tokens, weight, positions, places, 2.0, of_dropout, cast)
        dweight, dplaces = torch.empty_like(weight), torch.empty_like(places)
        ops.embedding_bwd(
            dy, tokens, positions, 2.0, 1, of_dropout, dweight, dplaces, accumulate=False
        )
        return y, values, dweight, dplaces, *statistics(cast)

    check(call)


@DTYPES
@pytest.mark.parametrize("classes", [97, 5000])
def test_cross_entropy(classes: int, dtype: torch.dtype) -> None:
    logits, target = on_gpu(dtype, 9, classes), ids(9, classes)
    dloss = torch.ones(9).cuda()

    def call() -> tuple[Tensor, ...]:
        gradient = logits.clone()
        loss, nll, lse, correct = ops.cross_entropy_fwd(gradient, target, 0.1, 1, True)
        ops.cross_entropy_bwd(dloss, gradient, target, lse, 0.1, 1)
        at_once = logits.clone()
        results = ops.cross_entropy_fwd_bwd(dloss, at_once, target, 0.1, 1, True)
        return loss, nll, lse, correct, gradient, *results, at_once

    check(call)


@DTYPES
@pytest.mark.parametrize("is_split", [False, True])
def test_adam(is_split: bool, dtype: torch.dtype) -> None:
    size = 20_003
    start, grad = on_gpu(torch.float32, size), on_gpu(dtype, size)
    scalars = tuple(torch.tensor(x, dtype=torch.float32).cuda() for x in (1e-3, 0.5))

    def call() -> tuple[Tensor, ...]:
        param, moments = start.clone(), (torch.zeros_like(start), torch.zeros_like(start))
        low, step = torch.zeros(size, dtype=torch.bfloat16).cuda(), torch.tensor(0).cuda()
        if is_split:
            param = ops.split_floats(param, low)
        norm = ops.adam_norm(grad)
        ops.adam_step(
            *(param, *moments, grad, low, step, *scalars, norm), *(1.0, 1e-6, 0.9, 0.98, 1e-8, 0.1)
        )
        return param, *moments, low, step, norm

    check(call)


@DTYPES
@pytest.mark.parametrize("outputs", [64, 97])
def test_bias_gradient(outputs: int, dtype: torch.dtype) -> None:
    x, weight, dy = on_gpu(dtype, 300, 32), on_gpu(dtype, outputs, 32), on_gpu(dtype, 300, outputs)

    def call() -> tuple[Tensor, ...]:
        dbias = weight.new_empty(outputs)
        ops.linear_bwd(dy, x, weight, None, dbias, None, False, False)
        return (dbias,)

    check(call)


# One tile of outputs per block and four, and more inputs than are in flight. GEMMs in float32, or
# of more than 16 rows, are cuBLAS's.
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("inputs", "outputs"), [(72, 24), (72, 4096), (4104, 24)])
@pytest.mark.parametrize("rows", [3, 16])
def test_linear_few_rows(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x, weight = on_gpu(dtype, rows, inputs), on_gpu(dtype, outputs, inputs)
    bias = on_gpu(dtype, outputs)
    check(lambda: (ops.linear_fwd(x, weight, None), ops.linear_fwd(x, weight, bias)))


def test_advance() -> None:
    before = torch.zeros(len(State), dtype=torch.float64)
    before[State.LOSS_SCALE] = 2.0
    given = torch.ones(len(Given) + KNOWN_RATES - 1, dtype=torch.float64).cuda()
    norm = torch.tensor(3.0).cuda()

    def call() -> tuple[Tensor, ...]:
        state, rng = before.cuda(), make_rng().cuda()
        ops.update_scalars(state, rng, given, norm, 7, 2, 0.0, 0.0, 1e-4)
        return state, rng

    check(call)


def test_dropout_mask() -> None:
    check(lambda: (ops.dropout_mask(make_rng().cuda(), SITE, 50, 77, P),))
