"""GEMMs compared with float64: any size, any alignment, any state of the algorithm table."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from helpers.ops_testing import assert_as_good_as, check_op
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops
from lightseq_fairseq.base import library

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Inputs and outputs: aligned, a power of two or not; neither of them aligned; only one of them; 1.
WIDTHS = [(256, 1024), (1032, 264), (97, 1032), (1032, 97), (97, 131), (36, 100), (1, 1)]


def inputs(tokens: int, k: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    """x, weight, bias, dy"""
    torch.manual_seed(tokens + k + n)
    shapes = ((tokens, k), (n, k), (n,), (tokens, n))
    scales = (1.0, k**-0.5, 1.0, n**-0.5)
    return [
        torch.randn(*shape, device="cuda").mul_(scale).to(dtype)
        for shape, scale in zip(shapes, scales, strict=True)
    ]


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def poison_memory(*shapes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Fills the memory that the allocator returns next with NaN."""
    for _ in range(2):
        tensors = [poisoned(*shape, dtype=dtype) for shape in shapes]
        del tensors


def formula(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The result of torch in the dtype of the arguments."""
    return {
        "y": functional.linear(x, weight, bias),
        "dx": dy @ weight,
        "dweight": dy.t() @ x,
        "dbias": dy.sum(0),
    }


def assert_as_good_as_torch(
    results: dict[str, Tensor], *operands: Tensor, added: dict[str, Tensor] | None = None
) -> None:
    """The error is at most twice that of torch in the same dtype.

    For float32 results a few ulp of the sum of all magnitudes are added, because the error of a
    float32
    sum depends on the order of its terms.
    """
    x, *_, dy = operands
    plain = formula(*operands)
    exact = formula(*(t.double() for t in operands))
    magnitude = formula(*(t.double().abs() for t in operands))
    for name, ours in results.items():
        theirs, truth = plain[name], exact[name]
        if ours.dtype != theirs.dtype:
            theirs = torch.mm(dy.t(), x, out_dtype=ours.dtype) if name == "dweight" else dy.float()
            theirs = theirs.sum(0) if name == "dbias" else theirs
        if added is not None:
            theirs, truth = added[name] + theirs, added[name].double() + truth
        assert ours.dtype == theirs.dtype and ours.shape == truth.shape
        error = (ours.double() - truth).abs().max()
        limit = 2 * (theirs.double() - truth).abs().max()
        if ours.dtype == torch.float32:
            limit = max(limit, 4 * torch.finfo(torch.float32).eps * magnitude[name].max())
        assert error <= limit, f"{name}: {error:.3e}, allowed are {limit:.3e}"


def check(tokens: int, k: int, n: int, dtype: torch.dtype) -> None:
    x, weight, bias, dy = inputs(tokens, k, n, dtype)
    padded_k, padded_n = -k // 64 * -64, -n // 64 * -64
    for rows in (tokens, n, padded_n):
        poison_memory(*((rows, width) for width in (n, k, padded_n, padded_k)), dtype=dtype)
    dweight, dbias = poisoned(n, k, dtype=dtype), poisoned(n, dtype=dtype)
    y = ops.linear_fwd(x, weight, bias)
    dx = ops.linear_bwd(dy, x, weight, dweight, dbias, False, True)
    assert y.is_contiguous() and dx.is_contiguous()
    results = {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}
    assert_as_good_as_torch(results, x, weight, bias, dy)


def test_kernels_are_loaded():
    assert {"linear_fwd", "linear_bwd"} <= set(library.load().kernels)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7, 199, 208, 4096])  # 208 and 4096 are searched
@pytest.mark.parametrize(("k", "n"), WIDTHS)
def test_errs_no_more_than_torch(k, n, tokens, dtype):
    check(tokens, k, n, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_wide_layers(dtype):
    check(1111, 1024, 4096, dtype)
    check(1120, 4096, 1024, dtype)


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(256, 520), (97, 131)])
def test_gradients_are_added_or_overwritten(k, n, dtype, grad_dtype, accumulate):
    """Also float32 gradients of 16-bit inputs; also in the first call, which searches the
    algorithm."""
    operands = x, weight, _, dy = inputs(208 + 16 * accumulate, k, n, dtype)
    shapes = {"dweight": (n, k), "dbias": (n,)}
    old = {name: torch.randn(*shape, device="cuda") for name, shape in shapes.items()}
    old = {name: t.to(grad_dtype or dtype) for name, t in old.items()}
    new = {name: t.clone() if accumulate else t * torch.nan for name, t in old.items()}
    ops.linear_bwd(dy, x, weight, new["dweight"], new["dbias"], accumulate, False)
    assert_as_good_as_torch(new, *operands, added=old if accumulate else None)


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
    dx = ops.linear_bwd(views[1], views[0], weight, dweight, None, False, True)
    assert_as_good_as_torch({"y": y, "dx": dx, "dweight": dweight}, *operands)
    assert flat[:offset].isnan().all() and flat[-8:].isnan().all()


def test_expanded_rows():
    """The gradient of a sum is one row, repeated T times."""
    x, weight, bias, dy = inputs(64, 256, 512, torch.bfloat16)
    dy = dy[:1].expand(64, -1)
    dx = ops.linear_bwd(dy, x, weight, None, None, False, True)
    assert_as_good_as_torch({"dx": dx}, x, weight, bias, dy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "k", "n"), [(208, 256, 512), (199, 256, 131), (64, 200, 64)])
def test_dx_is_added_to_another_gradient(tokens, k, n, dtype):
    x, weight, bias, dy = inputs(tokens, k, n, dtype)
    other = torch.randn_like(x)
    onto = other.clone()
    assert ops.linear_bwd(dy, x, weight, None, None, False, False, onto).numel() == 0
    assert_as_good_as_torch({"dx": onto}, x, weight, bias, dy, added={"dx": other})


@pytest.mark.parametrize("parts", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("need_dx", [True, False])
def test_only_what_is_asked_for(parts, need_dx):
    x, weight, _, dy = inputs(80, 256, 512, torch.bfloat16)
    full = [poisoned(512, 256, dtype=x.dtype), poisoned(512, dtype=x.dtype)]
    dx = ops.linear_bwd(dy, x, weight, *full, False, True)
    some = [torch.empty_like(t) if p else None for t, p in zip(full, parts, strict=True)]
    some_dx = ops.linear_bwd(dy, x, weight, *some, False, need_dx)
    assert torch.equal(some_dx, dx) if need_dx else some_dx.numel() == 0
    assert all(a is None or torch.equal(a, b) for a, b in zip(some, full, strict=True))
    assert torch.equal(ops.linear_fwd(x, weight, None), ops.linear_fwd(x, weight, full[1] * 0))


@pytest.mark.large
@pytest.mark.parametrize("vocabulary", [43_008, 43_001], ids=["aligned", "padded"])
def test_more_elements_than_32_bits_count(vocabulary):
    tokens, k = 65_536, 64
    x, weight, bias, _ = inputs(1, k, vocabulary, torch.bfloat16)
    x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
    y = ops.linear_fwd(x, weight, bias)
    assert y.numel() > 2**31
    dbias = torch.empty_like(bias)
    dx = ops.linear_bwd(y, x, weight, None, dbias, False, True)
    rows = torch.tensor([0, tokens // 2, tokens - 1], device="cuda")
    assert_as_good_as_torch({"y": y[rows], "dx": dx[rows]}, x[rows], weight, bias, y[rows])
    assert_as_good_as_torch({"dbias": dbias[-9:]}, x, weight[-9:], bias[-9:], y[:, -9:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "size",
    [
        pytest.param((16_384, 1024, 1024), marks=pytest.mark.large),
        pytest.param((8192, 4096, 1024), marks=pytest.mark.large),
        (500, 97, 131),
    ],
)
def test_same_input_same_bits(size, dtype):
    x, weight, bias, dy = inputs(*size, dtype)
    results = []
    for _ in range(3):
        dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
        y = ops.linear_fwd(x, weight, bias)
        results.append((y, ops.linear_bwd(dy, x, weight, dweight, dbias, False, True)))
        results[-1] += (dweight, dbias)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("n", [512, 131])
def test_captured_graph(n, seen):
    x, weight, bias, dy = inputs(336 if seen else 560, 264, n, torch.bfloat16)
    outputs = torch.empty_like(weight), torch.empty_like(bias)

    def step() -> tuple[Tensor, Tensor]:
        y = ops.linear_fwd(x, weight, bias)
        return y, ops.linear_bwd(dy, x, weight, *outputs, True, True)

    if seen:
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = step()
    for seed in (1, 2):
        torch.manual_seed(seed)
        for t in (x, dy, *outputs):
            t.copy_(torch.randn(t.shape, device="cuda"))
        old = {"dweight": outputs[0].clone(), "dbias": outputs[1].clone()}
        graph.replay()
        assert_as_good_as_torch({"y": y, "dx": dx}, x, weight, bias, dy)
        new = dict(zip(old, outputs, strict=True))
        assert_as_good_as_torch(new, x, weight, bias, dy, added=old)


@pytest.mark.parametrize("n", [512, 131])
def test_no_tokens(n):
    x, weight, bias, dy = inputs(0, 264, n, torch.bfloat16)
    assert ops.linear_fwd(x, weight, bias).shape == (0, n)
    dweight, dbias = poisoned(n, 264, dtype=x.dtype), poisoned(n, dtype=x.dtype)
    assert ops.linear_bwd(dy, x, weight, dweight, dbias, False, True).shape == (0, 264)
    assert dweight.eq(0).all() and dbias.eq(0).all()
    ops.linear_bwd(dy, x, weight, dweight.fill_(2), dbias.fill_(3), True, False)
    assert dweight.eq(2).all() and dbias.eq(3).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "n"), [(7, 512), (192, 520), (64, 131)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_positive_part(tokens, n, with_bias, dtype):
    x, weight, bias, _ = inputs(tokens, 264, n, dtype)
    bias = bias if with_bias else None
    exact = functional.linear(*(t if t is None else t.double() for t in (x, weight, bias)))
    y = ops.linear_fwd(x, weight, bias, relu=True)
    assert y.ge(0).all() and y.eq(0).any()
    assert_as_good_as(y, functional.linear(x, weight, bias).relu(), exact.relu())


def test_not_a_number_shows():
    x, weight, bias, dy = inputs(40, 97, 131, torch.float16)
    x[3, 5] = dy[4, 6] = torch.nan
    dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
    assert ops.linear_fwd(x, weight, bias).isnan().nonzero()[:, 0].unique().tolist() == [3]
    dx = ops.linear_bwd(dy, x, weight, dweight, dbias, False, True)
    assert dx.isnan().nonzero()[:, 0].unique().tolist() == [4]
    assert dweight[6].isnan().all() and dweight[:, 5].isnan().all()
    assert dbias.isnan().nonzero().tolist() == [[6]]


@pytest.mark.parametrize("n", [256, 131])
def test_opcheck(n):
    x, weight, bias, dy = inputs(9, 256, n, torch.bfloat16)
    check_op("linear_fwd", x, weight, bias, True)
    gradients = torch.zeros_like(weight), bias.clone(), torch.ones_like(x)
    check_op("linear_bwd", dy, x, weight, *gradients, True, False)


def test_refusals():
    x, weight, bias, dy = inputs(16, 32, 64, torch.float32)
    with pytest.raises(RuntimeError, match="linear_fwd: x must be float32, float16 or bfloat16"):
        ops.linear_fwd(x.double(), weight.double(), None)
    with pytest.raises(RuntimeError, match="linear_fwd: bias must be contiguous"):
        ops.linear_fwd(x, weight, bias.repeat(2)[::2])
    with pytest.raises(RuntimeError, match="linear_bwd: dweight must have x's dtype or be float32"):
        ops.linear_bwd(dy, x, weight, weight.half(), None, False, False)
    with pytest.raises(RuntimeError, match="linear_bwd: dbias must be contiguous"):
        ops.linear_bwd(dy, x, weight, None, bias.repeat(2)[::2], False, False)
    with pytest.raises(RuntimeError, match="linear_bwd: rows of dweight must not overlap"):
        ops.linear_bwd(dy, x, weight, weight[:1].expand(64, -1), None, False, False)
    with pytest.raises(RuntimeError, match="linear_fwd: weight must not be empty"):
        ops.linear_fwd(x[:, :0], weight[:, :0], bias)
    with pytest.raises(ValueError, match="linear_fwd: x must be contiguous in its last dimension"):
        ops.linear_fwd(x.t().contiguous().t(), weight, None)


# --- The table of algorithms -----------------------------------------------------------------

# Runs in a separate process: GEMMs are compared with torch's; the first one runs within a graph.
PROGRAM = """
import sys, torch
from pathlib import Path
from lightseq_fairseq.base import library
library.DIRECTORY = Path(sys.argv[1])
import test_linear_cuda as tests
operands = tests.inputs(64, 512, 512, torch.float16)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = tests.ops.linear_fwd(*operands[:3])
graph.replay()
tests.assert_as_good_as_torch({"y": y}, *operands)
tests.check(320, 512, 1024, torch.bfloat16)
tests.check(300, 512, 1024, torch.bfloat16)
"""


def start(**environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(library.DIRECTORY)]
    search = os.pathsep.join(sys.path)
    environment = {"PYTHONPATH": search, "XDG_CACHE_HOME": "", **environment}
    return subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.PIPE,
                            text=True)  # fmt: skip


def lines_in(folder) -> list[str]:
    (table,) = (folder / "lightseq_fairseq").iterdir()
    return table.read_text(errors="replace").splitlines()


def finish(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said


@pytest.mark.large
def test_table_on_disk(tmp_path):
    """Several processes write it at the same time, the next one reads it, and repairs damaged
    lines."""
    nowhere = tmp_path / "a file"
    nowhere.touch()
    finish(
        *(start(HOME=str(tmp_path / "home")) for _ in range(2)),
        start(XDG_CACHE_HOME=str(tmp_path / "alone")),
        start(XDG_CACHE_HOME=str(nowhere)),
        start(XDG_CACHE_HOME=str(tmp_path / "off"), LIGHTSEQ_LINEAR_SEARCH="0"),
    )
    assert not (tmp_path / "off").exists() and nowhere.read_text() == ""
    assert len(set(lines_in(tmp_path / "home" / ".cache"))) >= 3
    alone = lines_in(tmp_path / "alone")
    assert len(alone) == 3  # the GEMMs of 320 tokens; neither the captured nor the ragged ones

    (table,) = (tmp_path / "alone" / "lightseq_fairseq").iterdir()
    damaged = tmp_path / "damaged" / "lightseq_fairseq" / table.name
    damaged.parent.mkdir(parents=True)
    one_wrong = alone[1].replace(" 0 ", " 1 ", 1)
    damaged.write_bytes(f"{alone[0]}\n{one_wrong}\n".encode() + b"\x00\xff\n\n1 2\n" + b"torn")
    finish(
        start(XDG_CACHE_HOME=str(tmp_path / "alone")),
        start(XDG_CACHE_HOME=str(tmp_path / "damaged")),
    )
    assert lines_in(tmp_path / "alone") == alone
    mended = lines_in(tmp_path / "damaged")
    assert mended[:2] == [alone[0], one_wrong]
    # The line after "torn" is appended twice, because "torn" has spoilt its first copy.
    products = [line.rsplit(" ", 11)[0] for line in alone]
    assert [line.rsplit(" ", 11)[0] for line in mended[-2:]] == products[1:] and len(mended) == 8
