"""Dropout's random bits: known answers of the generator, what the mask depends on, its
statistics. The kernel's code draws them too, on the host if nvcc is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.ops_testing import make_rng

from lightseq_fairseq import ops

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


def philox_4x32(counter: tuple[int, ...], key: tuple[int, int], rounds: int) -> tuple[int, ...]:
    """The generator as in its paper, one counter at a time, in Python integers."""
    words, key_0, key_1 = tuple(counter), key[0], key[1]
    for _ in range(rounds):
        high_0, low_0 = divmod(0xD2511F53 * words[0], 1 << 32)
        high_1, low_1 = divmod(0xCD9E8D57 * words[2], 1 << 32)
        words = (high_1 ^ words[1] ^ key_0, low_1, high_0 ^ words[3] ^ key_1, low_0)
        key_0, key_1 = (key_0 + 0x9E3779B9) % (1 << 32), (key_1 + 0xBB67AE85) % (1 << 32)
    return words


def test_published_vectors():
    """The oracle itself gives the authors' known answers for 7 and 10 rounds."""
    assert philox_4x32((0, 0, 0, 0), (0, 0), 7) == (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)
    assert philox_4x32((0, 0, 0, 0), (0, 0), 10) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


# Row ids above 2^32, a seed that uses every byte, a negative seed, columns that are no multiple of
# 8.
@pytest.mark.parametrize("seed", [0, 0x0123_4567_89AB_CDEF, -5])
@pytest.mark.parametrize(("site", "micro_batch", "p"), [(0, 0, 0.1), (37, 123456, 0.5)])
def test_known_answers(seed, site, micro_batch, p):
    rows = torch.tensor([0, 1, 7, 4096, 2**31 + 3, 2**32 + 9])
    mask = ops.keep_mask(make_rng(seed, micro_batch), site, rows, 19, p)
    key = (seed % (1 << 32), (seed >> 32) % (1 << 32))
    for i, row in enumerate(rows.tolist()):
        for column in range(19):
            words = philox_4x32((column // 8, row % (1 << 32), site, micro_batch), key, 7)
            number = (words[column % 8 // 2] >> (16 * (column % 2))) & 0xFFFF
            assert mask[i, column].item() == (number >= min(round(p * 65536), 65535)), (row, column)


@pytest.mark.parametrize("seed", [0, 0x0123_4567_89AB_CDEF, -5])
@pytest.mark.parametrize(
    ("site", "micro_batch", "p"), [(0, 0, 0.1), (37, 123456, 0.5), (1, 2, 0.9999)]
)
def test_known_answers_of_attention(seed, site, micro_batch, p):
    rows = torch.tensor([0, 7, 2**32 + 9])
    mask = ops.attention_keep_mask(make_rng(seed, micro_batch), site, rows, 70, p)
    key = (seed % (1 << 32), (seed >> 32) % (1 << 32))
    rounding = philox_4x32((2**32 - 1, 2**32 - 1, site, micro_batch), key, 7)[0] & 0xFF
    least = (round(p * 65536) + rounding) // 256  # 256: no number is kept
    for i, row in enumerate(rows.tolist()):
        for column in range(70):
            words: list[int] = []
            for call in (0, 1):
                counter = (column // 32 * 2 + call, row % (1 << 32), site, micro_batch)
                words += philox_4x32(counter, key, 7)
            number = sum((word >> (column % 32) & 1) << bit for bit, word in enumerate(words))
            assert mask[i, column].item() == (number >= least), (row, column)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.3, 0.9])
def test_keep_rate_of_attention(p):
    """In each dropout the threshold is one of the two next to 256 p; on average the rate is p."""
    rows, thresholds = torch.arange(400), set()
    rates = []
    for site in range(300):
        rate = ops.attention_keep_mask(make_rng(), site, rows, 200, p).double().mean().item()
        thresholds.add(round((1 - rate) * 256))
        rates.append(rate)
    assert thresholds <= set(range(int(256 * p) - 1, int(256 * p) + 3))
    sigma = ((p * (1 - p) / (400 * 200) + 1 / (4 * 256**2)) / len(rates)) ** 0.5
    assert abs(sum(rates) / len(rates) - (1 - p)) < 4 * sigma


def test_attention_mask_is_a_function_of_row_and_column():
    rows = torch.arange(3000)
    whole = ops.attention_keep_mask(make_rng(), 2, rows, 700, 0.3)
    some = torch.tensor([2999, 0, 17, 17, 1024])
    assert torch.equal(ops.attention_keep_mask(make_rng(), 2, some, 700, 0.3), whole[some])
    assert torch.equal(ops.attention_keep_mask(make_rng(), 2, rows, 77, 0.3), whole[:, :77])
    for shift_rows, shift_columns in [(1, 0), (0, 1), (0, 16), (0, 32)]:
        agree = (
            whole[shift_rows:, shift_columns:] == whole[: 3000 - shift_rows, : 700 - shift_columns]
        )
        assert abs(agree.double().mean().item() - 0.58) < 0.005
    assert ops.attention_keep_mask(make_rng(), 2, rows, 77, 0.0).all()


@pytest.mark.parametrize("p", [0.1, 0.3, 0.9])
@pytest.mark.parametrize(("rows", "columns"), [(2000, 512), (60000, 13)])
def test_keep_rate(p, rows, columns):
    mask = ops.dropout_mask(make_rng(), 5, rows, columns, p)
    sigma = (p * (1 - p) / mask.numel()) ** 0.5
    assert abs(mask.double().mean().item() - (1 - p)) < 4 * sigma + 2**-17
    # Each column and each row alone; the limit allows for the largest of many deviations.
    for dim in (0, 1):
        worst = (mask.double().mean(dim) - (1 - p)).abs().max().item()
        assert worst < 6.5 * (p * (1 - p) / mask.shape[dim]) ** 0.5


def test_neighbours_are_independent():
    """How often an element equals the one in the next row, and those in the eight next columns."""
    mask = ops.dropout_mask(make_rng(), 1, 4000, 256, 0.5)
    for shift_rows, shift_columns in [(1, 0), *((0, c) for c in range(1, 9))]:
        agree = (
            mask[shift_rows:, shift_columns:] == mask[: 4000 - shift_rows, : 256 - shift_columns]
        )
        assert abs(agree.double().mean().item() - 0.5) < 4 * 0.5 / agree.numel() ** 0.5


def test_mask_is_a_function_of_row_and_column():
    """Any rows and any number of columns show the same bits, so tiles cannot affect the mask."""
    whole = ops.dropout_mask(make_rng(), 2, 3000, 200, 0.3)
    rows = torch.tensor([2999, 0, 17, 17, 1024])
    assert torch.equal(ops.keep_mask(make_rng(), 2, rows, 200, 0.3), whole[rows])
    assert torch.equal(ops.dropout_mask(make_rng(), 2, 40, 77, 0.3), whole[:40, :77])


def test_blocks_do_not_show():
    """With more rows than one cache block of 131072 groups, every row is the same as alone."""
    whole = ops.dropout_mask(make_rng(), 2, 70_000, 9, 0.3)
    rows = torch.arange(0, 70_000, 977)
    assert torch.equal(ops.keep_mask(make_rng(), 2, rows, 9, 0.3), whole[rows])


def test_seed_micro_batch_and_site_matter():
    masks = [
        ops.dropout_mask(make_rng(seed, micro_batch), site, 64, 64, 0.5)
        for seed, micro_batch, site in [
            (1, 1, 1),
            (2, 1, 1),
            (1 + 2**32, 1, 1),
            (1, 2, 1),
            (1, 1, 2),
        ]
    ]
    for i, first in enumerate(masks):
        assert torch.equal(first, first.clone())
        for second in masks[:i]:
            assert 0.45 < (first == second).double().mean().item() < 0.55


def test_nothing_dropped_at_zero():
    assert ops.dropout_mask(make_rng(), 0, 300, 70, 0.0).all()


@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (8, 0), (1, 1)])
def test_small_shapes(rows, columns):
    mask = ops.dropout_mask(make_rng(), 0, rows, columns, 0.5)
    assert mask.shape == (rows, columns) and mask.dtype == torch.bool


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
