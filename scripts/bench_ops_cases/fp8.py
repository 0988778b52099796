"""Cases in fp8: of products and LayerNorm, of ops/fp8_quantise.py and ops/fp8_transpose.py, and of
the update: ops/adam.py, ops/fp8_weights.py, ops/fp8_scales.py.

They exist for bf16 only: the results of fp8 products are bf16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.ops.casting import E4M3
from lightseq_fairseq.ops.fp8_scales import HISTORY
from lightseq_fairseq.ops.fp8_weights import Matrix, fp8_tiles

from .adam import BETAS, CLIP_EPS, DECAY, EPS, MAX_NORM, RATE
from .case import SITE, Case, Make, Run, Sizes, without_autograd


def cast_of(make: Make, amax: float) -> ops.Cast:
    """Return a cast of numbers up to twice this amax."""
    scale = torch.tensor(amax / 224, device=make.device).log2().ceil().exp2()
    zero = torch.zeros((), device=make.device)
    return ops.Cast(scale, zero, torch.tensor(0, device=make.device))


class Operand:
    """A random matrix in E4M3, its transpose and its scale."""

    def __init__(self, make: Make, rows: int, columns: int) -> None:
        cast = cast_of(make, 6.0)
        self.values, self.transpose = ops.fp8_quantise(make.rows(rows, columns), cast)
        self.scale = cast.scale
        self.quantised = ops.Quantised(self.values, self.transpose, self.scale)


def fp8_casts(sizes: Sizes, tokens: int, make: Make) -> Iterator[Case]:
    """Yield casts, also with column sums."""
    if make.dtype != torch.bfloat16:
        return
    cast = cast_of(make, 12.0)
    for shape, columns in (("c", sizes.width), ("f", sizes.ffn)):
        x = make.rows(tokens, columns)
        moved = x.nbytes + 2 * x.numel()
        for name, has_sums in ((shape, False), (f"{shape}.sums", True)):

            def quantise(x: Tensor = x, has_sums: bool = has_sums) -> tuple[Tensor, ...]:
                sums = torch.empty_like(x[0]) if has_sums else None
                return ops.fp8_quantise(x, cast, sums)

            yield Case(
                f"fp8_quantise.{name}/T{tokens}", moved, {"ours": without_autograd(quantise)}
            )


def fp8_linear_activation(sizes: Sizes, tokens: int, make: Make) -> Iterator[Case]:
    """Yield both products next to an activation: relu with dropout, gelu without."""
    if make.dtype != torch.bfloat16:
        return
    c, f, cast = sizes.width, sizes.ffn, cast_of(make, 12.0)
    x, dy, first, second = (
        Operand(make, *shape).quantised for shape in ((tokens, c), (tokens, c), (f, c), (c, f))
    )
    bias, rng = make.rows(f), make.rng()
    for activation, p in (("relu", sizes.dropout), ("gelu", 0.0)):

        def forward(activation: str = activation, p: float = p) -> tuple[Tensor, ...]:
            dropout = ops.Dropout(p, rng, SITE)
            return ops.linear_activation_fwd(x, first, bias, activation, dropout, True, cast)

        _, y, slope = forward()
        given = None if activation == "relu" else slope

        def backward(
            y: Tensor = y, given: Tensor | None = given, p: float = p
        ) -> tuple[Tensor, ...]:
            dbias, h = torch.empty_like(bias), ops.Quantised(None, y, cast.scale)
            results = ops.activation_linear_bwd(
                dy, h, second, given, p, dweight=None, dbias=dbias, accumulate=False, cast=cast
            )
            return *results, dbias

        results = 2 * tokens * f + slope.nbytes
        least = tokens * c + f * c + results
        read = y.nbytes if given is None else 0
        for name, moved, run in (
            ("fp8_linear_activation_fwd", least, forward),
            ("fp8_activation_linear_bwd", least + read, backward),
        ):
            systems = {"ours": without_autograd(run)}
            yield Case(f"{name}.{activation}/T{tokens}", moved, systems, 2 * tokens * c * f)


def fp8_layer_norm(sizes: Sizes, tokens: int, make: Make) -> Iterator[Case]:
    """Yield the end of a sublayer with fp8 results, as in pre-LayerNorm stacks: y is not stored.

    Also the transposes that backward makes of other operands.
    """
    if make.dtype != torch.bfloat16:
        return
    c, cast = sizes.width, cast_of(make, 12.0)
    x, residual, dy, dsum = (make.rows(tokens, c) for _ in range(4))
    bias, gamma, beta = (make.rows(c) for _ in range(3))
    dropout = ops.Dropout(sizes.dropout, make.rng(), SITE)

    def forward() -> tuple[Tensor, ...]:
        return ops.dropout_residual_layer_norm_fwd(
            x, bias, residual, gamma, beta, dropout, 1e-5, False, cast
        )

    total, _, mean, rstd, *_ = forward()

    def backward() -> tuple[Tensor, ...]:
        sums = [torch.empty_like(gamma) for _ in range(3)]
        results = ops.dropout_residual_layer_norm_bwd(
            dy, dsum, total, gamma, mean, rstd, dropout, *sums, False, cast
        )
        return *results, *sums

    # x, residual and sum, or dy, dsum, sum and dresidual; values and transpose; statistics.
    for way, rows, run in (("fwd", 4, forward), ("bwd", 5, backward)):
        least = rows * x.nbytes + 2 * 4 * tokens
        name = f"fp8_dropout_residual_layer_norm_{way}/T{tokens}"
        yield Case(name, least, {"ours": without_autograd(run)})

    run = without_autograd(lambda: (ops.fp8_transpose(x, cast.scale),))
    yield Case(f"fp8_transpose.c/T{tokens}", x.nbytes * 3 // 2, {"ours": run})
    values = Operand(make, tokens, c).values

    def of_values() -> tuple[Tensor, ...]:
        sums = torch.empty_like(bias)
        return ops.fp8_transpose(values, cast.scale, sums=sums), sums

    run = without_autograd(of_values)
    yield Case(f"fp8_transpose.values.sums/T{tokens}", 2 * values.nbytes, {"ours": run})


def fp8_update(sizes: Sizes, make: Make) -> Iterator[Case]:
    """Yield the update and cast of all weights of a model with as many layers in the encoder, the
    cast alone, and the computation of its scales.

    They are those of `fp8.Fp8State`: q, k and v are one matrix, and so are all cross k and v.
    """
    if make.dtype != torch.bfloat16:
        return
    c, f, layers = sizes.width, sizes.ffn, sizes.decoder_layers
    encoder = [(3 * c, c), (c, c), (f, c), (c, f)]
    decoder = [*encoder, (c, c), (c, c)]
    shapes = layers * (encoder + decoder) + [(2 * c * layers, c)]
    matrices, end = [], 0
    for rows, columns in shapes:
        matrices.append(Matrix(end, end, rows, columns))
        end += rows * columns
    count = max(sizes.parameters, end)
    param = make.rows(count, scale=c**-0.5).float()
    weights = param.bfloat16()
    tiles = fp8_tiles(matrices, count).to(make.device)
    scale = torch.full((len(shapes),), 2.0**-11, device=make.device)
    amax, saturated = torch.zeros_like(scale), torch.zeros_like(scale, dtype=torch.int64)
    values, transposes = (
        torch.zeros(end, dtype=torch.uint8, device=make.device).view(E4M3) for _ in range(2)
    )
    of_weights = ops.WeightCast(tiles, scale, amax, saturated, values, transposes)

    def cast() -> tuple[Tensor, Tensor]:
        ops.fp8_weights(weights, of_weights)
        return values, transposes

    yield Case(f"fp8_weights/N{end // 1_000_000}M", 4 * end, {"ours": without_autograd(cast)})

    rest = ops.split_floats(param, weights)
    moments = torch.zeros_like(param), torch.zeros_like(param)
    step = torch.zeros((), dtype=torch.int64, device=make.device)
    numbers = [torch.tensor(x, device=make.device) for x in (RATE, 1.0, 1.0)]
    grad = make.rows(count)

    def update() -> tuple[Tensor, ...]:
        ops.adam_step(
            *(rest, *moments, grad, weights, step, *numbers),
            *(MAX_NORM, CLIP_EPS, *BETAS, EPS, DECAY, of_weights),
        )
        return rest, *moments

    name, moved = f"fp8_adam_step/N{count // 1_000_000}M", 26 * count + 2 * end
    yield Case(name, moved, {"ours": without_autograd(update)})

    of_all = torch.ones(3 * len(shapes), device=make.device)
    amaxes, history = torch.rand_like(of_all), of_all.expand(HISTORY, -1).contiguous()
    skipped = torch.zeros((), dtype=torch.float64, device=make.device)

    def compute_scales() -> tuple[Tensor, Tensor]:
        ops.fp8_scales(of_all, amaxes, history, skipped, False)
        return of_all, history

    moved = 2 * (of_all.nbytes + amaxes.nbytes + history.nbytes)
    name = f"fp8_scales/M{len(of_all)}"
    yield Case(name, moved, {"ours": without_autograd(compute_scales)})


def fp8_linear(sizes: Sizes, tokens: int, make: Make) -> Iterator[Case]:
    """Yield the products of a layer; library: torch._scaled_mm without fast accumulation."""
    if make.dtype != torch.bfloat16:
        return
    c, f = sizes.width, sizes.ffn
    for shape, inputs, outputs, has_bias in (
        ("qkv", c, 3 * c, True),
        ("out", c, c, False),
        ("fc1", c, f, False),
        ("fc2", f, c, False),
        ("cross_kv", c, 2 * c * sizes.decoder_layers, True),
    ):
        yield from _linear(shape, tokens, inputs, outputs, has_bias, make)


def _linear(
    shape: str, tokens: int, inputs: int, outputs: int, has_bias: bool, make: Make
) -> Iterator[Case]:
    x, dy = Operand(make, tokens, inputs), Operand(make, tokens, outputs)
    weight = Operand(make, outputs, inputs)
    bias = make.rows(outputs) if has_bias else None

    def forward() -> tuple[Tensor]:
        return (ops.linear_fwd(x.quantised, weight.quantised, bias),)

    def backward() -> tuple[Tensor, Tensor]:
        dweight = make.empty(outputs, inputs)
        operands = dy.quantised, x.quantised, weight.quantised
        dx = ops.linear_bwd(*operands, dweight, None, None, False, True)
        return dx, dweight

    def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, **more: Tensor) -> Tensor:
        return torch._scaled_mm(
            a, b.t(), a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=False, **more
        )

    def library_forward() -> tuple[Tensor]:
        more = {} if bias is None else {"bias": bias}
        return (product(x.values, x.scale, weight.values, weight.scale, **more),)

    def library_backward() -> tuple[Tensor, Tensor]:
        dx = product(dy.values, dy.scale, weight.transpose, weight.scale)
        return dx, product(dy.transpose, dy.scale, x.transpose, x.scale)

    def case(way: str, least: int, ours: Run, library: Run, products: int) -> Case:
        systems = {"ours": without_autograd(ours), "library": without_autograd(library)}
        flops = products * 2 * tokens * inputs * outputs
        return Case(f"fp8_linear_{way}.{shape}/T{tokens}", least, systems, flops)

    operands = x.values.nbytes + weight.values.nbytes
    results = 2 * (x.values.numel() + weight.values.numel())
    least = operands + 2 * tokens * outputs
    yield case("fwd", least, forward, library_forward, 1)
    least = operands + 2 * dy.values.nbytes + results
    yield case("bwd", least, backward, library_backward, 2)
