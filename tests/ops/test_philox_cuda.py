"""The kernel's bits are the reference's: on the host wherever nvcc is installed, and on a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from lightseq_fairseq import ops
from lightseq_fairseq.base import library

CSRC = Path(__file__).resolve().parents[2] / "csrc"

# The device functions can also be compiled for the host. argv: seed, micro-batch, site, p, columns,
# rows...
HOST_PROGRAM = r"""
#include <cstdio>
#include <cstdlib>
#include "common/philox.cuh"
int main(int argc, char** argv) {
  const int64_t rng[2] = {std::atoll(argv[1]), std::atoll(argv[2])};
  const lightseq::Dropout dropout{rng, static_cast<uint32_t>(std::atoll(argv[3])),
                                  lightseq::Dropout::threshold_of(std::atof(argv[4]))};
  const int64_t columns = std::atoll(argv[5]);
  for (int i = 6; i < argc; ++i) {
    for (int64_t c = 0; c < columns; ++c) {
      const uint32_t bits = lightseq::keep_bits(dropout, std::atoll(argv[i]), c / 8);
      std::putchar(bits >> (c % 8) & 1u ? '1' : '0');
    }
  }
  const lightseq::AttentionDropout attention(dropout);
  for (int i = 6; i < argc; ++i) {
    for (int64_t c = 0; c < columns; ++c) {
      const uint32_t word = attention.keep_word(std::atoll(argv[i]), c / 32);
      std::putchar(word >> (c % 32) & 1u ? '1' : '0');
    }
  }
}
"""

CASES = [
    (0, 0, 0, 0.1),
    (0x0123_4567_89AB_CDEF, 123456, 37, 0.5),
    (-5, 2**32 + 7, 2**31, 0.3),
    (1, 2, 3, 0.0),
    (1, 2, 3, 0.999999),  # rounds to 1
    (11, 5, 2, 0.5 / 65536),  # half-way between two thresholds
    (11, 5, 2, 1.5 / 65536),
]


def make_rng(seed: int, micro_batch: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor([seed, micro_batch], dtype=torch.int64, device=device)


@pytest.fixture(scope="module")
def host_program(tmp_path_factory):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not on the PATH")
    folder = tmp_path_factory.mktemp("philox")
    (folder / "main.cu").write_text(HOST_PROGRAM)
    program = folder / "main"
    subprocess.run(
        [nvcc, "-std=c++17", f"-I{CSRC}", str(folder / "main.cu"), "-o", str(program)], check=True
    )
    return program


@pytest.mark.parametrize(("seed", "micro_batch", "site", "p"), CASES)
def test_source_draws_the_reference_bits(host_program, seed, micro_batch, site, p):
    rows, columns = [0, 1, 4095, 2**31 + 3, 2**32 + 9], 500
    words = [seed, micro_batch, site, repr(p), columns, *rows]
    answer = subprocess.run(
        [str(host_program), *map(str, words)], capture_output=True, text=True, check=True
    ).stdout
    drawn = torch.tensor([c == "1" for c in answer]).view(2, len(rows), columns)
    arguments = make_rng(seed, micro_batch), site, torch.tensor(rows), columns, p
    assert torch.equal(drawn[0], ops.keep_mask(*arguments))
    assert torch.equal(drawn[1], ops.attention_keep_mask(*arguments))


@pytest.mark.gpu
def test_kernel_is_loaded():
    assert "dropout_mask" in library.load().kernels


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (9, 8), (1000, 513), (4096, 1024)])
@pytest.mark.parametrize(("seed", "micro_batch", "site", "p"), CASES)
def test_kernel_draws_the_reference_bits(seed, micro_batch, site, p, rows, columns):
    mask = ops.dropout_mask(make_rng(seed, micro_batch, "cuda"), site, rows, columns, p)
    expected = ops.dropout_mask(make_rng(seed, micro_batch), site, rows, columns, p)
    assert mask.device.type == "cuda" and mask.dtype == torch.bool
    assert torch.equal(mask.cpu(), expected)


@pytest.mark.large
@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    rows, columns = 2**22 + 1, 1024
    mask = ops.dropout_mask(make_rng(3, 4, "cuda"), 5, rows, columns, 0.5)
    last = torch.tensor([0, 2**21, rows - 1])
    expected = ops.keep_mask(make_rng(3, 4), 5, last, columns, 0.5)
    assert torch.equal(mask[last.cuda()].cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (8, 0), (0, 0)])
def test_empty(rows, columns):
    assert ops.dropout_mask(make_rng(1, 1, "cuda"), 1, rows, columns, 0.5).shape == (rows, columns)


@pytest.mark.gpu
def test_runs_on_the_current_stream():
    """The kernel waits only for earlier work on its stream."""
    side = torch.cuda.Stream()
    rng = make_rng(0, 0, "cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        rng.copy_(make_rng(7, 8))
        mask = ops.dropout_mask(rng, 1, 64, 64, 0.5)
    side.synchronize()
    assert torch.equal(mask.cpu(), ops.dropout_mask(make_rng(7, 8), 1, 64, 64, 0.5))


@pytest.mark.gpu
def test_replayed_graph_draws_anew():
    """Every replay reads the micro-batch number of the rng on the device."""
    rng = make_rng(1, 0, "cuda")
    ops.dropout_mask(rng, 2, 32, 256, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = ops.dropout_mask(rng, 2, 32, 256, 0.5)
    for micro_batch in (1, 2):
        rng[1] = micro_batch
        graph.replay()
        assert torch.equal(mask.cpu(), ops.dropout_mask(make_rng(1, micro_batch), 2, 32, 256, 0.5))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rng", "rows", "p"),
    [
        (torch.tensor([1, 2, 3]), 4, 0.5),
        (torch.tensor([1, 2], dtype=torch.int32), 4, 0.5),
        (torch.tensor([1, 0, 2])[::2], 4, 0.5),
        (torch.tensor([1, 2]), -1, 0.5),
        (torch.tensor([1, 2]), 4, 1.0),
    ],
)
def test_launcher_refuses_what_the_kernel_cannot_read(rng, rows, p):
    on_gpu = torch.empty_strided(rng.shape, rng.stride(), dtype=rng.dtype, device="cuda")
    with pytest.raises(RuntimeError, match="dropout_mask"):
        torch.ops.lightseq.dropout_mask(on_gpu.copy_(rng), 1, rows, 8, p)
