"""Runs of the scripts in examples/multi30k."""

from __future__ import annotations

import gzip
import os
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FOLDER = EXAMPLES / "multi30k"
# Use the commands of the environment in which the tests run.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def script(name: str, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs one of the recipe's scripts."""
    return subprocess.run(
        command(name, *words), env={**os.environ, "PATH": PATH, **variables}, cwd=ROOT,
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip


def command(name: str, *words: str | Path) -> list[str]:
    program = ["bash", str(FOLDER / name)]
    if name.endswith(".py"):
        program = [sys.executable, "-m", f"examples.multi30k.{Path(name).stem}"]
    return [*program, *map(str, words)]


def prepare_numbers(folder: Path) -> Path:
    """The output of prepare.sh for a corpus of number names in Multi30k's files."""
    make_data = runpy.run_path(str(EXAMPLES / "quickstart" / "make_data.py"))
    raw = folder / "raw"
    raw.mkdir()
    numbers = make_data["split_numbers"](pairs=400, seed=1)
    for split, count in (("train", 400), ("val", 20), ("test_2016_flickr", 20)):
        source = numbers["train" if split == "train" else "test"][:count]
        make_data["write_split"](raw, split, source)
        for lang in ("de", "en"):
            text = (raw / f"{split}.{lang}").read_bytes()
            (raw / f"{split}.{lang}.gz").write_bytes(gzip.compress(text))
    result = script("prepare.sh", folder / "data", MULTI30K=str(raw), MERGES="200")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return folder / "data"
