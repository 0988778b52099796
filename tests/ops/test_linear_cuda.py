"""GEMMs compared with float64: any kind of operands, any size, any alignment, any state of the
algorithm table."""

from __future__ import annotations

import pytest
import torch
from helpers.fp8_operands import numbers, parts, quantised, widened, with_nan
from helpers.linear_cases import (
    assert_near,
    check,
    gradients,
    in_fp8,
    inputs,
    poisoned,
    positive_part,
)
from helpers.ops_testing import assert_as_good_as, check_op, poison_cache, skip_without_fp8
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops
from lightseq_fairseq.base import library
from lightseq_fairseq.ops.casting import E4M3

pytestmark = pytest.mark.gpu

BF16, F32 = torch.bfloat16, torch.float32
DTYPES = [F32, torch.float16, BF16]
# Inputs and outputs: aligned, a power of two or not; neither of them aligned; only one of them; 1.
WIDTHS = [(256, 1024), (1032, 264), (97, 1032), (1032, 97), (97, 131), (36, 100), (1, 1)]
# In fp8. Tokens: 64 and 4096 are searched, the others are not; inputs and outputs.
FP8_SIZES = [
    (1, 64, 32), (7, 16, 16), (64, 256, 1024), (199, 1040, 272), (777, 1024, 3072),
    (4096, 1024, 1024), (4096, 4096, 1024),
]  # fmt: skip


@pytest.fixture(autouse=True)
def with_fp8(request: pytest.FixtureRequest) -> None:
    """Skip cases in fp8 on GPUs without it."""
    of_case = getattr(request.node, "callspec", None)
    kinds = [] if of_case is None else of_case.params.values()
    if "fp8" in request.node.name or E4M3 in kinds:
        skip_without_fp8()


def test_kernels_are_loaded():
    assert {"linear_fwd", "linear_bwd"} <= set(library.load().kernels)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7, 199, 208, 4096])  # 208 and 4096 are searched
@pytest.mark.parametrize(("k", "n"), WIDTHS)
def test_errs_no_more_than_torch(k, n, tokens, dtype):
    check(tokens, k, n, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_wide_layers(dtype):
    check(1111, 1024, 4096, dtype)
    check(1120, 4096, 1024, dtype)


@pytest.mark.parametrize("grad_dtype", [BF16, F32])
@pytest.mark.parametrize(("tokens", "k", "n"), FP8_SIZES)
def test_fp8_errs_no_more_than_its_format(tokens, k, n, grad_dtype):
    check(tokens, k, n, E4M3, grad_dtype)


@pytest.mark.parametrize("size", FP8_SIZES[-2:])
def test_fp8_errs_no_more_than_torch(size):
    x, weight, bias, _ = inputs(*size, E4M3)
    theirs = torch._scaled_mm(
        x.values, weight.values.t(), x.scale, weight.scale, bias=bias, out_dtype=BF16,
        use_fast_accum=False,
    )  # fmt: skip
    exact = functional.linear(*(numbers(t) for t in (x, weight, bias)))
    ours = ops.linear_fwd(x, weight, bias)
    errors = [(y.double() - exact).square().mean().sqrt() for y in (ours, theirs)]
    assert errors[0] <= 1.1 * errors[1], errors


@pytest.mark.parametrize("tokens", [7, 21, 64])
def test_small_integers_in_fp8_are_rounded_once_to_nearest_even(tokens):
    """Their sums need so few bits that they are exact."""
    torch.manual_seed(0)
    x = quantised(torch.randint(-7, 8, (tokens, 48)).float().cuda(), 1.0)
    weight = quantised(torch.randint(-7, 8, (32, 48)).float().cuda() * 2.0**-10, 2.0**-10)
    exact = numbers(x) @ numbers(weight).t()
    y = ops.linear_fwd(x, weight, None)
    assert torch.equal(y, exact.float().to(BF16))
    assert not torch.equal(y.double(), exact)  # some are rounded


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("grad_dtype", [None, F32])
@pytest.mark.parametrize("tokens", [199, 208, 256])  # 208 is searched, in fp8 256
@pytest.mark.parametrize(
    ("k", "n", "kind"),
    [*((*w, dtype) for w in ((256, 520), (97, 131)) for dtype in DTYPES), (272, 528, E4M3)],
)
def test_gradients_are_added_or_overwritten(k, n, kind, tokens, grad_dtype, accumulate):
    """Also float32 gradients of 16-bit inputs; also in the first call, which searches the
    algorithm."""
    operands = x, weight, bias, dy = inputs(tokens + 64 * accumulate, k, n, kind)
    names = ("dweight",) if kind == E4M3 else ("dweight", "dbias")
    old = {"dweight": torch.randn(n, k), "dbias": torch.randn(n)}
    old = {name: old[name].to(grad_dtype or bias.dtype).cuda() for name in names}
    new = {name: t.clone() if accumulate else t * torch.nan for name, t in old.items()}
    poison_cache()
    ops.linear_bwd(dy, x, weight, new["dweight"], new.get("dbias"), None, accumulate, False)
    assert_near(new, *operands, added=old if accumulate else None)


@pytest.mark.parametrize("offset", [512, 3], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows(dtype, offset):
    """A view of a wider GEMM's output; a gradient inside a flat buffer."""
    tokens, k, n = 144, 264, 272
    operands = x, weight, bias, dy = inputs(tokens, k, n, dtype)
    wide_x, wide_dy = (poisoned(tokens, 1024, dtype=dtype) for _ in range(2))
    wide_x[:, offset : offset + k] = x
    wide_dy[:, offset : offset + n] = dy
    flat = poisoned(offset + n * k + 8, dtype=dtype)
    dweight = flat[offset:-8].view(n, k)
    views = wide_x[:, offset : offset + k], wide_dy[:, offset : offset + n]
    y = ops.linear_fwd(views[0], weight, bias)
    dx = ops.linear_bwd(views[1], views[0], weight, dweight, None, None, False, True)
    assert_near({"y": y, "dx": dx, "dweight": dweight}, *operands)
    assert flat[:offset].isnan().all() and flat[-8:].isnan().all()


@pytest.mark.parametrize("grad_dtype", [BF16, F32])
def test_strided_rows_in_fp8(grad_dtype):
    """A gradient in a wider matrix, as for the keys and values of all decoder layers, whose weights
    are adjacent."""
    x, weight, bias, dy = inputs(100, 64, 48, E4M3)
    operands = widened(x), widened(weight), bias, widened(dy)
    wide = poisoned(48, 192, dtype=grad_dtype)
    dweight = wide[:, 64:128]
    y = ops.linear_fwd(*operands[:3])
    dx = ops.linear_bwd(operands[3], *operands[:2], dweight, None, None, False, True)
    assert_near({"y": y, "dx": dx, "dweight": dweight}, x, weight, bias, dy)
    assert wide[:, :64].isnan().all() and wide[:, 128:].isnan().all()


def test_expanded_rows():
    """The gradient of a sum is one row, repeated T times."""
    x, weight, bias, dy = inputs(64, 256, 512, BF16)
    dy = dy[:1].expand(64, -1)
    dx = ops.linear_bwd(dy, x, weight, None, None, None, False, True)
    assert_near({"dx": dx}, x, weight, bias, dy)


SIZES = [(208, 256, 512), (199, 256, 131), (64, 200, 64)]


@pytest.mark.parametrize(
    ("tokens", "k", "n", "kind"),
    [*((*size, dtype) for size in SIZES for dtype in DTYPES), (320, 272, 528, E4M3)],
)
def test_dx_is_added_to_another_gradient(tokens, k, n, kind):
    x, weight, bias, dy = inputs(tokens, k, n, kind)
    other = torch.randn(tokens, k).to(bias.dtype).cuda()
    onto = other.clone()
    assert ops.linear_bwd(dy, x, weight, None, None, onto, False, False).numel() == 0
    assert_near({"dx": onto}, x, weight, bias, dy, added={"dx": other})


@pytest.mark.parametrize("kind", [BF16, E4M3])
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("need_dx", [True, False])
def test_only_what_is_asked_for(wanted, need_dx, kind):
    x, weight, bias, dy = inputs(80, 256, 512, kind)
    full = gradients(256, 512, kind)
    dx = ops.linear_bwd(dy, x, weight, *full, None, False, True)
    some = [
        t.clone().fill_(torch.nan) if t is not None and p else None for t, p in zip(full, wanted)
    ]
    some_dx = ops.linear_bwd(dy, x, weight, *some, None, False, need_dx)
    assert torch.equal(some_dx, dx) if need_dx else some_dx.numel() == 0
    assert all(a is None or torch.equal(a, b) for a, b in zip(some, full, strict=True))
    y, zero = ops.linear_fwd(x, weight, None), torch.zeros_like(bias)
    assert kind == E4M3 or torch.equal(y, ops.linear_fwd(x, weight, zero))
    assert_near({"y": y}, x, weight, zero, dy)


@pytest.mark.large
@pytest.mark.parametrize(
    ("vocabulary", "kind"),
    [
        pytest.param(43_008, BF16, id="aligned"),
        pytest.param(43_001, BF16, id="padded"),
        pytest.param(43_008, E4M3, id="fp8"),
    ],
)
def test_more_elements_than_32_bits_count(vocabulary, kind):
    tokens, k = 65_536, 64
    _, weight, bias, _ = inputs(1, k, vocabulary, kind)
    x = torch.randn(tokens, k, device="cuda")
    x = in_fp8(x, 1.0) if kind == E4M3 else x.to(kind)
    y = ops.linear_fwd(x, weight, bias)
    assert y.numel() > 2**31
    rows = torch.tensor([0, tokens // 2, tokens - 1], device="cuda")
    if kind == E4M3:
        assert_near({"y": y[rows]}, numbers(x)[rows], weight, bias, y[rows])
        return
    dbias = torch.empty_like(bias)
    dx = ops.linear_bwd(y, x, weight, None, dbias, None, False, True)
    assert_near({"y": y[rows], "dx": dx[rows]}, x[rows], weight, bias, y[rows])
    assert_near({"dbias": dbias[-9:]}, x, weight[-9:], bias[-9:], y[:, -9:])


LARGE = [(16_384, 1024, 1024), (8192, 4096, 1024)]


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        ((500, 272, 144), E4M3),
        *(((500, 97, 131), dtype) for dtype in DTYPES),
        *(pytest.param(size, dtype, marks=pytest.mark.large) for size in LARGE for dtype in DTYPES),
        pytest.param((15_232, 1024, 4096), E4M3, marks=pytest.mark.large),
    ],
)
def test_same_input_same_bits(size, kind):
    x, weight, bias, dy = inputs(*size, kind)
    results = []
    for _ in range(3):
        dweight, dbias = gradients(*size[1:], kind)
        y = ops.linear_fwd(x, weight, bias)
        results.append(
            [y, ops.linear_bwd(dy, x, weight, dweight, dbias, None, False, True), dweight]
        )
        results[-1] += [] if dbias is None else [dbias]
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


# If they were not captured, 560 tokens would be searched, in fp8 576.
@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize(
    ("tokens", "k", "n", "kind"),
    [(560, 264, 512, BF16), (560, 264, 131, BF16), (336, 272, 144, E4M3), (576, 272, 144, E4M3)],
)
def test_captured_graph(tokens, k, n, kind, seen):
    """The graph reads operands and scales anew."""
    x, weight, bias, dy = inputs(tokens + 64 * seen, k, n, kind)
    outputs = gradients(k, n, kind)

    def step() -> tuple[Tensor, Tensor]:
        y = ops.linear_fwd(x, weight, bias)
        return y, ops.linear_bwd(dy, x, weight, *outputs, None, True, True)

    if seen:
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = step()
    for seed in (1, 2):
        torch.manual_seed(seed)
        for t in (x, dy):
            if kind == E4M3:
                t.scale.mul_(2.0**seed)
            else:
                t.copy_(torch.randn(t.shape, device="cuda"))
        old = {}
        for name, t in zip(("dweight", "dbias"), outputs, strict=True):
            if t is not None:
                old[name] = t.copy_(torch.randn(t.shape, device="cuda")).clone()
        graph.replay()
        assert_near({"y": y, "dx": dx}, x, weight, bias, dy)
        new = dict(zip(("dweight", "dbias"), outputs, strict=True))
        assert_near(new, x, weight, bias, dy, added=old)


@pytest.mark.parametrize(("n", "kind"), [(512, BF16), (131, BF16), (512, E4M3)])
def test_no_tokens(n, kind):
    k = 272 if kind == E4M3 else 264
    x, weight, bias, dy = inputs(0, k, n, kind)
    assert ops.linear_fwd(x, weight, bias).shape == (0, n)
    outputs = gradients(k, n, kind)
    assert ops.linear_bwd(dy, x, weight, *outputs, None, False, True).shape == (0, k)
    assert all(t is None or t.eq(0).all() for t in outputs)
    for t in outputs:
        if t is not None:
            t.fill_(2)
    ops.linear_bwd(dy, x, weight, *outputs, None, True, False)
    assert all(t is None or t.eq(2).all() for t in outputs)


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize(("tokens", "n"), [(7, 512), (192, 520), (64, 131)])
def test_positive_part(tokens, n, dtype):
    x, weight, bias, _ = inputs(tokens, 264, n, dtype)
    exact = functional.linear(x.double(), weight.double(), bias.double())
    y = positive_part(x, weight, bias)
    assert y.ge(0).all() and y.eq(0).any()
    assert_as_good_as(y, functional.linear(x, weight, bias).relu(), exact.relu())


@pytest.mark.parametrize(("k", "n", "kind"), [(97, 131, torch.float16), (64, 32, E4M3)])
def test_not_a_number_shows(k, n, kind):
    x, weight, bias, dy = inputs(40, k, n, kind)
    x, dy = with_nan(x, 3, 5), with_nan(dy, 4, 6)
    dweight, dbias = gradients(k, n, kind)
    y = ops.linear_fwd(x, weight, bias)
    dx = ops.linear_bwd(dy, x, weight, dweight, dbias, None, False, True)
    for rows, row in ((y, 3), (dx, 4)):
        assert rows[row].isnan().all() and int(rows.isnan().sum()) == rows.shape[1]
    assert dweight[6].isnan().all() and dweight[:, 5].isnan().all()
    assert int(dweight.isnan().sum()) == k + n - 1
    assert dbias is None or dbias.isnan().nonzero().tolist() == [[6]]


@pytest.mark.parametrize(("n", "kind"), [(256, BF16), (131, BF16), (256, E4M3)])
def test_opcheck(n, kind):
    x, weight, bias, dy = inputs(9, 256, n, kind)
    product, is_fp8 = (parts(x), parts(weight)), kind == E4M3
    check_op("linear_fwd", *product, bias)
    dweight, onto = torch.zeros(n, 256).to(BF16).cuda(), torch.ones(9, 256).to(BF16).cuda()
    dbias = None if is_fp8 else bias.clone()
    check_op("linear_bwd", parts(dy), *product, dweight, dbias, onto, True, False)


def test_refusals():
    x, weight, bias, dy = inputs(16, 32, 64, F32)
    with pytest.raises(RuntimeError, match="linear_fwd: x must be float32, float16 or bfloat16"):
        ops.linear_fwd(x.double(), weight.double(), None)
    with pytest.raises(RuntimeError, match="linear_fwd: bias must be contiguous"):
        ops.linear_fwd(x, weight, bias.repeat(2)[::2])
    with pytest.raises(RuntimeError, match="linear_bwd: dweight must have x's dtype or be float32"):
        ops.linear_bwd(dy, x, weight, weight.half(), None, None, False, False)
    with pytest.raises(RuntimeError, match="linear_bwd: dbias must be contiguous"):
        ops.linear_bwd(dy, x, weight, None, bias.repeat(2)[::2], None, False, False)
    with pytest.raises(RuntimeError, match="linear_bwd: rows of dweight must not overlap"):
        ops.linear_bwd(dy, x, weight, weight[:1].expand(64, -1), None, None, False, False)
    with pytest.raises(RuntimeError, match="linear_fwd: weight must not be empty"):
        ops.linear_fwd(x[:, :0], weight[:, :0], bias)
    with pytest.raises(ValueError, match="linear_fwd: x must be contiguous in its last dimension"):
        ops.linear_fwd(x.t().contiguous().t(), weight, None)


def test_refusals_in_fp8():
    x, weight, bias, dy = inputs(16, 64, 32, E4M3)
    with pytest.raises(RuntimeError, match="linear_fwd: bias must be contiguous in its last"):
        ops.linear_fwd(x, weight, bias.repeat(2)[::2])
    with pytest.raises(RuntimeError, match="linear_fwd: x_scale must be aligned to 16 bytes"):
        ops.linear_fwd(x._replace(scale=torch.ones(4, device="cuda")[1]), weight, None)
    for dweight, message in (
        (torch.zeros(32, 72, device="cuda")[:, 3:67], "dweight must be contiguous in its"),
        (torch.zeros(1, 64, device="cuda").expand(32, -1), "rows of dweight must not overlap"),
    ):
        with pytest.raises(RuntimeError, match=f"linear_bwd: {message}"):
            ops.linear_bwd(dy, x, weight, dweight, None, None, False, False)
