"""Common code of the benchmarks of ``lightseq-bench``: runs, their caches, their memory."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightseq_fairseq.base import result_rows
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.benchmark import runs
from lightseq_fairseq.cli.benchmark.memory import MemoryMeter


def test_systems_that_turn_out_to_be_unable(tmp_path: Path) -> None:
    def measure(*arguments: Any) -> None:
        raise runs.Unable("cannot run here: no library.")

    nothing = runs.Bench(measure, lambda *found: {}, lambda found: [])
    with pytest.raises(UserError, match="Nothing was measured"):
        runs.take_turns(nothing, {"case": ["one"]}, 2, tmp_path, None)


def test_each_run_has_its_own_files(tmp_path: Path) -> None:
    stems = []

    def measure(case: str, system: str, stem: Path) -> None:
        stems.append(stem)

    cases = {case: ["ours"] for case in ("nllb_1.3b/verses/bf16", "nllb_1.3b/8192/bf16")}
    runs.take_turns(runs.Bench(measure, lambda *_: {}, lambda _: []), cases, 2, tmp_path, None)
    assert len({stem.with_suffix(".log") for stem in stems}) == 4


def test_commit_is_that_of_this_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("COMMIT", raising=False)
    assert re.fullmatch("[0-9a-f]{40}", result_rows.current_commit())
    # An environment of packages inside the clone of another project.
    environment = tmp_path / "result_rows.py"
    environment.touch()
    who = ("-c", "user.name=x", "-c", "user.email=x")
    for words in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "else"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(result_rows, "SOURCE", environment)
    with pytest.raises(UserError, match="not in a git clone"):
        result_rows.current_commit()
    monkeypatch.setenv("COMMIT", "abc")
    assert result_rows.current_commit() == "abc"


def test_every_run_finds_its_caches_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "table").write_text("algorithms")
    stem = tmp_path / "run"
    code = (
        "import json, os, pathlib, sys\n"
        "cache = pathlib.Path(os.environ['XDG_CACHE_HOME'])\n"
        "json.dump([str(cache), *map(str, cache.iterdir())], open(sys.argv[1], 'w'))\n"
        "(cache / 'table').write_text('mine')\n"
    )
    words = [sys.executable, "-c", code, str(stem.with_suffix(".json"))]
    folders = [tuple(runs.process(words, {}, stem)[1]) for _ in range(2)]
    for (folder,) in folders:  # it was empty, and it has been deleted
        assert Path(folder) != tmp_path and not Path(folder).exists()


def test_memory_is_what_the_process_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    use = {"free": 700, "reserved": 0, "peak": 0}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (use["free"], 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: use["reserved"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: use["peak"])
    memory = MemoryMeter(gpu=True)  # other processes use 300
    # torch uses 200 of its 250, and 60 are outside torch
    use.update(free=440, reserved=200, peak=250)
    assert memory.peak() == 310
    assert MemoryMeter(gpu=False).peak() > 1 << 26


@pytest.mark.gpu
def test_memory_beside_torch_counts() -> None:
    torch.cuda.reset_peak_memory_stats()  # memory that earlier tests have freed
    memory, driver = MemoryMeter(gpu=True), ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_uint64()
    size = torch.cuda.mem_get_info()[0] // 4
    assert driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
    peak = memory.peak()
    assert driver.cuMemFree_v2(pointer) == 0
    # Other tests may share the GPU, but they do not allocate or free as much in the meantime.
    assert size / 2 < peak < 2 * size
