"""Which kernels compute a batch of attention (csrc/attention/method.h), without a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

# Reads a line for each batch. Prints the method of long sentences, and most_of_short.
PROGRAM = """
#include <iostream>
#include "attention/method.h"
using namespace lightseq::attention;
int main() {
  const char* names[] = {"short", "wgmma", "mma", "tf32"};
  Batch b;
  while (std::cin >> b.is_float >> b.has_wgmma >> b.backward >> b.causal >> b.width >> b.rows_q >>
         b.rows_k >> b.sentences >> b.longest >> b.is_empty) {
    const Choice choice = choose(b);
    std::cout << names[static_cast<int>(choice.of_long)];
    if (choice.of_long != Method::kShort) std::cout << " " << choice.most_of_short;
    std::cout << std::endl;
  }
}
"""

# The longest sentence is the largest of max_q and max_k. `wgmma 64`: kernels of short sentences
# compute those of up to 64 tokens, and wgmma the others; `short`: they compute all.
TABLE = """
bits wgmma pass mask   width queries keys   sentences longest | method
32   no    fwd  none   64    4096    4096   4         1024    | short
32   yes   fwd  none   64    4096    4096   4         1024    | short
32   yes   bwd  none   64    4096    4096   4         1024    | tf32 128
32   no    bwd  causal 64    4096    4096   4         1024    | tf32 128
32   no    bwd  none   64    4096    4096   64        129     | tf32 128
32   no    bwd  none   64    4096    4096   64        128     | short
32   no    bwd  none   72    4096    4096   4         1024    | short
16   no    fwd  none   64    4096    4096   4         1024    | mma 128
16   no    bwd  none   64    4096    4096   4         1024    | mma 128
16   no    fwd  causal 128   4096    4096   4         1024    | mma 128
16   no    bwd  none   64    4096    4096   64        128     | short
16   no    fwd  none   128   4096    4096   64        129     | mma 128
16   yes   fwd  none   64    1040    1040   10        104     | wgmma 0
16   yes   bwd  causal 64    1040    1040   10        104     | wgmma 0
16   yes   fwd  none   64    1039    1039   10        129     | wgmma 64
16   yes   fwd  none   64    1039    1039   10        64      | short
16   yes   fwd  causal 64    1039    1039   10        129     | wgmma 128
16   yes   bwd  causal 64    1039    1039   10        128     | short
16   yes   fwd  none   64    480     480    10        65      | wgmma 64
16   yes   bwd  none   64    479     479    10        128     | short
16   yes   bwd  none   64    479     479    10        129     | wgmma 128
16   yes   fwd  none   72    720     720    10        72      | wgmma 0
16   yes   bwd  causal 128   720     720    10        72      | wgmma 0
16   yes   fwd  none   72    719     719    10        65      | wgmma 64
16   yes   bwd  causal 128   100     100    10        65      | wgmma 64
16   yes   bwd  causal 128   100     100    10        64      | short
16   yes   fwd  none   64    80      2000   10        200     | wgmma 0
16   yes   fwd  none   64    0       2000   10        200     | short
16   yes   fwd  none   64    425984  425984 4096      104     | wgmma 0
16   yes   fwd  none   64    426088  426088 4097      104     | short
16   no    fwd  none   64    264193  264192 4096      129     | mma 128
16   no    fwd  none   64    264321  264192 4097      129     | short
"""


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The method of each row of the table."""
    folder = tmp_path_factory.mktemp("method")
    (folder / "main.cpp").write_text(PROGRAM)
    csrc = Path(__file__).parents[2] / "csrc"
    # Set-up compiles fairseq, so there is a compiler.
    command = ["c++", "-std=c++20", "-Wall", "-Werror", f"-I{csrc}", "main.cpp", "-o", "main"]
    subprocess.run(command, cwd=folder, check=True)
    lines = []
    for row in ROWS:
        bits, wgmma, pass_, mask, width, *sizes = row.split("|")[0].split()
        is_empty = int(sizes[0]) * int(sizes[1]) == 0
        flags = bits == "32", wgmma == "yes", pass_ == "bwd", mask == "causal"
        lines.append(" ".join(map(str, (*map(int, flags), width, *sizes, int(is_empty)))))
    answer = subprocess.run(
        folder / "main", input="\n".join(lines), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return dict(zip(ROWS, answer, strict=True))


ROWS = TABLE.strip().splitlines()[1:]


@pytest.mark.parametrize("row", ROWS)
def test_method(chosen: dict[str, str], row: str) -> None:
    assert chosen[row] == row.partition("| ")[2]
