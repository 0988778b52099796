"""The kernels at the end of a sublayer with fp8 results.

What the plain op also computes has the same bits. The fp8 results are the cast of what the plain op
computes from the same numbers in float32.
"""

from __future__ import annotations

import functools

import pytest
import torch
from helpers.ops_testing import assert_replays_draw_anew, check_op, poison_cache, skip_without_fp8
from helpers.ops_testing import make_rng as rng_on
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.base import library

make_rng = functools.partial(rng_on, device="cuda")

pytestmark = pytest.mark.gpu

SITE, EPS, SCALE = 6, 1e-5, 2.0**-6
# (tokens, width): incomplete chunks; a width for each variant of the kernels, and 16 and
# 1040, which are no multiples of a number of threads; several chunks per block.
SIZES = [
    (1, 1024), (5, 16), (37, 256), (1000, 512), (3712, 1024), (16384, 1024), (601, 1040),
    (130, 2048), (5000, 2064), (77, 4096), (33, 8192), (3, 5008), (1500, 6144),
]  # fmt: skip
ALL = ("bias", "residual")


@pytest.fixture(autouse=True)
def with_fp8() -> None:
    skip_without_fp8()


class Sublayer:
    """The inputs at the end of a sublayer, and gradients of its two outputs."""

    def __init__(
        self, tokens: int, width: int, p: float = 0.1, parts: tuple[str, ...] = ALL
    ) -> None:
        generator = torch.Generator("cuda").manual_seed(tokens + width)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

        self.x, residual, self.dy, self.dsum = (normal(tokens, width) for _ in range(4))
        bias, self.gamma, self.beta = (normal(width) for _ in range(3))
        self.bias = bias if "bias" in parts else None
        self.residual = residual if "residual" in parts else None
        self.p = p

    @property
    def inputs(self) -> list[Tensor | None]:
        return [self.x, self.bias, self.residual, self.gamma, self.beta]

    def forward(self, of_cast: tuple[Tensor, ...], keep_y: bool = True) -> list[Tensor]:
        """sum, y, mean, rstd, and as bytes values and transpose."""
        poison_cache()
        *plain, values, transpose = ops.fp8_dropout_residual_layer_norm_fwd(
            *self.inputs, self.p, make_rng(), SITE, EPS, keep_y, *of_cast
        )
        return [*plain, bits(values), bits(transpose)]

    def plain_forward(self, is_wide: bool = False) -> tuple[Tensor, ...]:
        inputs = widened(self.inputs) if is_wide else self.inputs
        return ops.dropout_residual_layer_norm_fwd(*inputs, self.p, make_rng(), SITE, EPS)

    def saved(self, which: str) -> list[Tensor | None]:
        """The first six arguments of backward."""
        total, _, mean, rstd = self.plain_forward()
        given = None if which == "dsum" else self.dy, None if which == "dy" else self.dsum
        return [*given, total if total.numel() else self.x, self.gamma, mean, rstd]

    def sums(self, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
        vectors = [torch.full_like(self.gamma, torch.nan, dtype=dtype) for _ in range(3)]
        return [*vectors[:2], None if self.bias is None else vectors[2]]

    def backward(
        self, of_cast: tuple[Tensor, ...], which: str, sums: list[Tensor | None],
        accumulate: bool = False,
    ) -> list[Tensor]:  # fmt: skip
        """values and transpose, as bytes, and dresidual."""
        saved = self.saved(which)
        poison_cache()
        values, transpose, dresidual = ops.fp8_dropout_residual_layer_norm_bwd(
            *saved, self.p, make_rng(), SITE, *sums, accumulate, *of_cast
        )
        return [bits(values), bits(transpose), dresidual]

    def plain_backward(
        self, which: str, sums: list[Tensor | None], is_wide: bool = False
    ) -> tuple[Tensor, Tensor]:
        saved = self.saved(which)
        saved = widened(saved) if is_wide else saved
        dx, dresidual = ops.dropout_residual_layer_norm_bwd(
            *saved, self.p, make_rng(), SITE, *sums, False
        )
        return (dx if self.p > 0 else dresidual), dresidual


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def widened(tensors: list[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else x.float() for x in tensors]


def of_cast() -> tuple[Tensor, Tensor, Tensor]:
    """scale, amax and saturated."""
    scalars = torch.tensor(SCALE), torch.tensor(0.5), torch.tensor(3)
    return scalars[0].cuda(), scalars[1].cuda(), scalars[2].cuda()


def assert_is_cast_of(ours: list[Tensor], scalars: tuple[Tensor, ...], x: Tensor) -> None:
    """At most a few numbers are the next of E4M3: the compiler may contract other additions.

    ours: values and transpose.
    """
    expected = of_cast()
    values, transpose = map(bits, ops.fp8_quantise(x, *expected))
    rows = len(x)
    assert torch.equal(ours[1][:, :rows], ours[0].t()) and not ours[1][:, rows:].any()
    assert ours[1].shape == transpose.shape
    differ = int((ours[0] != values).sum())
    assert differ <= 2 + 1e-4 * x.numel(), f"{differ} numbers of {x.numel()} differ"
    numbers, others = (v.view(torch.float8_e4m3fn).float() for v in (ours[0], values))
    torch.testing.assert_close(numbers, others, rtol=0.126, atol=2.0**-9)
    torch.testing.assert_close(scalars[1], expected[1], rtol=1e-5, atol=0)
    assert abs(int(scalars[2] - expected[2])) <= 1 + 1e-4 * int(expected[2])


def check(layer: Sublayer, which: str = "both") -> None:
    scalars = of_cast()
    *plain, values, transpose = layer.forward(scalars)
    assert all(map(torch.equal, plain, layer.plain_forward()))
    assert_is_cast_of([values, transpose], scalars, layer.plain_forward(is_wide=True)[1])
    total, y, *others = layer.forward(of_cast(), keep_y=False)
    assert torch.equal(total, plain[0]) and y.numel() == 0
    assert all(map(torch.equal, others, [*plain[2:], values, transpose]))

    scalars, sums, expected = of_cast(), layer.sums(), layer.sums()
    values, transpose, dresidual = layer.backward(scalars, which, sums)
    assert torch.equal(dresidual, layer.plain_backward(which, expected)[1])
    for name, mine, other in zip(("dgamma", "dbeta", "dbias"), sums, expected, strict=True):
        if mine is not None and other is not None:
            size = float(other.nan_to_num().abs().max()) + 1
            torch.testing.assert_close(
                mine, other, rtol=1e-4, atol=1e-5 * size, equal_nan=True, msg=name
            )
    dx = layer.plain_backward(which, [None] * 3, is_wide=True)[0]
    assert_is_cast_of([values, transpose], scalars, dx)


def test_kernels_are_loaded() -> None:
    names = {f"fp8_dropout_residual_layer_norm_{way}" for way in ("fwd", "bwd")}
    assert names <= set(library.load().kernels)


@pytest.mark.parametrize(("tokens", "width"), SIZES)
def test_casts_what_the_plain_op_computes(tokens: int, width: int) -> None:
    check(Sublayer(tokens, width))


@pytest.mark.parametrize("which", ["dy", "dsum", "both"])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("parts", [ALL, (), ("residual",)], ids=lambda parts: "+".join(parts))
def test_any_part_may_be_missing(parts: tuple[str, ...], p: float, which: str) -> None:
    check(Sublayer(67, 768, p, parts), which)


@pytest.mark.parametrize("width", [512, 1024, 1040, 8192])
def test_same_input_same_bits(width: int) -> None:
    layer, runs = Sublayer(3001, width), []
    for _ in range(3):
        sums = layer.sums()
        runs.append([*layer.forward(of_cast()), *layer.backward(of_cast(), "both", sums), *sums])
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


def test_not_a_number_stays_visible() -> None:
    layer = Sublayer(40, 256)
    layer.x[3], layer.dy[3], layer.dsum[5, 7] = torch.nan, torch.nan, torch.inf
    values, transpose = layer.forward(of_cast())[4:]
    assert (values[3] == 0x7F).all() and (transpose[:, 3] == 0x7F).all()
    assert not (values[4] == 0x7F).any() and not transpose[:, 40:].any()
    sums = layer.sums()
    values, transpose, _ = layer.backward(of_cast(), "both", sums)
    assert (values[3] == 0x7F).all() and values[5, 7] == 0x7F and transpose[7, 5] == 0x7F
    assert all(x is not None and x.isnan().any() for x in sums)


def test_sums_accumulate() -> None:
    layer = Sublayer(500, 512)
    fresh = layer.sums()
    layer.backward(of_cast(), "both", fresh)
    held = [torch.randn(512, device="cuda").to(t) for t in (torch.float32, torch.bfloat16) * 2]
    expected = [x.clone().add_(y) for x, y in zip(held, fresh, strict=False)]
    layer.backward(of_cast(), "both", [*held[:3]], accumulate=True)
    assert all(map(torch.equal, held, expected))


def test_no_tokens() -> None:
    layer, scalars = Sublayer(0, 64), of_cast()
    values, transpose = layer.forward(scalars)[4:]
    assert values.shape == (0, 64) and transpose.shape == (64, 0)
    sums = layer.sums()
    layer.backward(scalars, "both", sums)
    assert all(x is not None and x.eq(0).all() for x in sums)
    assert scalars[1] == 0.5 and scalars[2] == 3


def test_rows_may_be_strided() -> None:
    layer = Sublayer(90, 528)
    sums = layer.sums()
    expected = [*layer.forward(of_cast()), *layer.backward(of_cast(), "both", sums)]
    for name in ("x", "residual", "dy", "dsum"):
        wide = torch.full((90, 1056), torch.nan, dtype=torch.bfloat16, device="cuda")
        setattr(layer, name, wide[:, 8:536].copy_(getattr(layer, name)))
    ours = [*layer.forward(of_cast()), *layer.backward(of_cast(), "both", sums)]
    assert all(map(torch.equal, ours, expected))


def test_replayed_graph_draws_anew() -> None:
    layer, rng, scalars = Sublayer(200, 512, p=0.5), make_rng(micro_batch=0), of_cast()
    sums, saved = layer.sums(), layer.saved("both")

    def run() -> list[Tensor]:
        dropout = layer.p, rng, SITE
        y = ops.fp8_dropout_residual_layer_norm_fwd(*layer.inputs, *dropout, EPS, True, *scalars)
        dx = ops.fp8_dropout_residual_layer_norm_bwd(*saved, *dropout, *sums, False, *scalars)
        return [bits(y[4]), *y[:4], *map(bits, [y[5], *dx[:2]]), dx[2]]

    assert_replays_draw_anew(run, rng)


def test_opcheck() -> None:
    layer = Sublayer(9, 48, p=0.3)
    dropout = layer.p, make_rng(), SITE
    check_op("fp8_dropout_residual_layer_norm_fwd", *layer.inputs, *dropout, EPS, True, *of_cast())
    sums = [torch.zeros_like(layer.gamma) for _ in range(3)]
    check_op(
        "fp8_dropout_residual_layer_norm_bwd", *layer.saved("both"), *dropout, *sums, True,
        *of_cast(),
    )  # fmt: skip


def test_refusals() -> None:
    layer = Sublayer(4, 64)
    layer.x = torch.randn(4, 80, device="cuda").bfloat16()[:, 3:67]
    with pytest.raises(RuntimeError, match="layer_norm_fwd: x must be contiguous in its last dim"):
        layer.forward(of_cast())
    layer = Sublayer(4, 64)
    layer.dy = torch.randn(4, 80, device="cuda").bfloat16()[:, 3:67]
    with pytest.raises(RuntimeError, match="layer_norm_bwd: dy must be contiguous in its last dim"):
        layer.backward(of_cast(), "both", layer.sums())
