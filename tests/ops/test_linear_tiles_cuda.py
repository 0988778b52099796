"""GEMMs of a middle number of rows by our own tiles: any size; started before the kernel before has
ended.

A timed search decides where tiles are used. Here its table on disk is rewritten, so that each tile
computes every GEMM once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.linear_cases import (
    Chain,
    assert_replays_have_new_weights,
    captured,
    drawn,
    inside,
    positive_part,
)
from helpers.ops_testing import assert_as_good_as, poison_cache
from torch.nn import functional

from lightseq_fairseq import ops
from lightseq_fairseq.base import library

# bytes of shared memory that a block of each tile needs
SHARED = {1: 128 << 10, 2: 192 << 10, 3: 192 << 10}
# Bytes that a block can use on GPUs of other compute capabilities, as in csrc/common/device.h.
ACTED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 100: 227 << 10, 120: 99 << 10}
TILE_FIELD = 8  # index in a line of the table, after the sizes of the GEMM
ROWS = [32, 64, 128]  # row counts that are searched
# Inputs and outputs: one tile; an incomplete chunk of inputs; no inputs for some warps; widths that
# are padded; more inputs than are in flight; more tiles than run at the same time.
SMALL = [(8, 8), (72, 24), (256, 40), (97, 131)]
LARGE = [(1024, 1024), (1032, 1048), (4096, 1024), (1024, 4096)]


def products(sizes: list[tuple[int, int]], dtype: torch.dtype) -> None:
    for k, n in sizes:
        weight, bias = drawn(n, k, dtype=dtype, scale=k**-0.5), drawn(n, dtype=dtype)
        wide_weight = inside(weight)
        for rows in ROWS:
            x = drawn(rows, k, dtype=dtype)
            wide_x, exact = inside(x), x.double() @ weight.double().t()
            what = f"{rows} x {k} x {n}"
            poison_cache()
            y = ops.linear_fwd(x, weight, None)
            assert_as_good_as(y, functional.linear(x, weight), exact, what)
            y = ops.linear_fwd(wide_x, wide_weight, bias)
            plain, exact = functional.linear(x, weight, bias), exact + bias.double()
            assert_as_good_as(y, plain, exact, f"{what}, bias")
            y = positive_part(wide_x, weight, bias)
            assert_as_good_as(y, plain.relu(), exact.relu(), f"{what}, positive part")
            assert y.ge(0).all()


def everything(sizes: list[tuple[int, int]], *widths: int) -> None:
    """Single GEMMs, and a chain of them in a graph."""
    torch.manual_seed(8)
    for dtype in (torch.float16, torch.bfloat16):
        products(sizes, dtype)
        chain = Chain(64, *widths, dtype)
        assert_replays_have_new_weights(chain, *captured(chain))


def small(tile: int) -> None:
    """The part that compute-sanitizer checks, so without the profiler."""
    everything(SMALL, 256, 520, 1000)


def shared_memory_of_block() -> int:
    """Bytes that the library can use per block: of this GPU, or of the GPU that it acts as."""
    most: int = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    acts_as = library.load().acts_as
    return most if acts_as is None else min(most, ACTED[acts_as])


def large(tile: int) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        everything(SMALL + LARGE, 1024, 4096, 40_000)
        torch.cuda.synchronize()
    runs = {e.key: e.count for e in profile.key_averages() if "linear_tiles_kernel" in e.key}
    if tile == 0:
        return
    if shared_memory_of_block() < SHARED[tile]:
        assert not runs  # cuBLAS has computed the GEMMs above
    else:
        assert len(runs) == 2, runs  # one for each dtype, and no other tile
        assert min(runs.values()) > 3 * len(SMALL + LARGE) * len(ROWS), runs


def run(cache: Path, program: str, tile: int) -> None:
    """Runs the program in a separate process, with this tile if the table says so."""
    code = f"import test_linear_tiles_cuda as test; test.{program}({tile})"
    environment = {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=os.path.dirname(__file__), capture_output=True, text=True,
        env={**os.environ, **environment}, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def checksum(text: str) -> int:  # FNV-1a, as in csrc/linear/algorithm_table.h
    total = 0xCBF29CE484222325
    for byte in text.encode():
        total = (total ^ byte) * 0x100000001B3 % 2**64
    return total


def with_tile(line: str, tile: int) -> str:
    fields = line.split(" ")[:-1]
    fields[TILE_FIELD] = str(tile)
    text = " ".join(fields)
    return f"{text} {checksum(text):x}\n"


@pytest.fixture(scope="module", params=["small", pytest.param("large", marks=pytest.mark.large)])
def searched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A program, and the table that its search has written."""
    cache = tmp_path_factory.mktemp("searched")
    run(cache, request.param, 0)
    (file,) = (cache / "lightseq_fairseq").iterdir()
    return request.param, file


@pytest.mark.parametrize("tile", SHARED)
def test_every_product_by_one_tile(tile: int, searched: tuple[str, Path], tmp_path: Path) -> None:
    program, table = searched
    lines = table.read_text().splitlines()
    assert len(lines) == len(set(lines)) > 50
    rewritten = tmp_path / "lightseq_fairseq" / table.name
    rewritten.parent.mkdir()
    rewritten.write_text("".join(with_tile(line, tile) for line in lines))
    run(tmp_path, program, tile)
    assert len(rewritten.read_text().splitlines()) == len(lines)  # no algorithm had to be searched
