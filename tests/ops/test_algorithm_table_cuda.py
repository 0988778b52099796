"""The table of GEMM algorithms on disk."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lightseq_fairseq.base import library

# Runs in a separate process: GEMMs are compared with torch's; the first one runs within a graph.
PROGRAM = """
import sys, torch
from pathlib import Path
from lightseq_fairseq.base import library
library.DIRECTORY = Path(sys.argv[1])
from helpers import linear_cases as cases
operands = cases.inputs(64, 512, 512, torch.float16)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = cases.ops.linear_fwd(*operands[:3])
graph.replay()
cases.assert_near({"y": y}, *operands)
cases.check(320, 512, 1024, torch.bfloat16)
cases.check(300, 512, 1024, torch.bfloat16)
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
