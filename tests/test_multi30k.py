"""The Multi30k recipe's scripts, on number names in the place of Multi30k."""

from __future__ import annotations

import gzip
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
FOLDER = EXAMPLES / "multi30k"
UPDATES = 22  # two an epoch, and fairseq numbers no checkpoint at the end of one: 11 of them

record = runpy.run_path(str(EXAMPLES / "record.py"))
make_data = runpy.run_path(str(EXAMPLES / "quickstart" / "make_data.py"))


def script(name: str, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """One of the shell scripts, in the environment that these tests run in."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", str(FOLDER / name), *map(str, words)],
        env={**os.environ, "PATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_a_row_replaces_that_of_its_case_system_and_seed(tmp_path: Path) -> None:
    results = tmp_path / "results" / "bleu.json"
    keys = (
        ("a", "lightseq", 2),
        ("a", "fairseq", 1),
        ("a", "lightseq", 1),
        ("b", "lightseq", 2),
        ("a", "lightseq", 2),
    )
    for bleu, (case, system, seed) in enumerate(keys):
        row = {"case": case, "system": system, "seed": seed, "bleu": bleu}
        record["write_row"](row, results)
    rows = json.loads(results.read_text())
    assert [(row["case"], row["system"], row["seed"], row["bleu"]) for row in rows] == [
        ("a", "fairseq", 1, 1),
        ("a", "lightseq", 1, 2),
        ("a", "lightseq", 2, 4),
        ("b", "lightseq", 2, 3),
    ]
    assert [path.name for path in results.parent.iterdir()] == ["bleu.json"]


def test_updates_and_time_come_from_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = {
        "model": {},
        "optimizer_history": [{"num_updates": 8000}],
        "extra_state": {"previous_training_time": 12.34},
    }
    torch.save(checkpoint, tmp_path / "checkpoint_last.pt")
    figures = record["training_figures"](tmp_path / "checkpoint_last.pt")
    assert figures == {"updates": 8000, "train_seconds": 12.3}


def test_missing_raw_data_is_explained(tmp_path: Path) -> None:
    result = script("prepare.sh", tmp_path / "data", MULTI30K=str(tmp_path))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "set MULTI30K" in result.stderr
    assert not (tmp_path / "data").exists()


def test_an_unknown_precision_is_refused(tmp_path: Path) -> None:
    result = script("run.sh", "--out", tmp_path / "out", PRECISION="fp8")
    assert result.returncode == 2
    assert "PRECISION must be fp32, fp16 or bf16, not fp8" in result.stderr


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What prepare.sh makes of a corpus of number names."""
    raw = tmp_path_factory.mktemp("raw")
    numbers = make_data["split_numbers"](pairs=400, seed=1)
    for split, count in (("train", 400), ("val", 20), ("test_2016_flickr", 20)):
        source = numbers["train" if split == "train" else "test"][:count]
        make_data["write_split"](raw, split, source)
        for lang in ("de", "en"):
            text = (raw / f"{split}.{lang}").read_bytes()
            (raw / f"{split}.{lang}.gz").write_bytes(gzip.compress(text))
    data = tmp_path_factory.mktemp("multi30k") / "data"
    result = script("prepare.sh", data, MULTI30K=str(raw), MERGES="200")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return data


def train(data: Path, out: Path, *words: str) -> tuple[str, list[dict[str, Any]]]:
    """A short run of run.sh: its last line and the rows after it."""
    results = out / "bleu.json"
    result = script(
        *("run.sh", *words, "--updates", str(UPDATES)),
        *("--data", data, "--out", out, "--results", results),
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout.splitlines()[-1], json.loads(results.read_text())


def test_a_run_ends_with_a_score_and_its_row(data: Path, tmp_path: Path) -> None:
    last_line, rows = train(data, tmp_path, "--seed", "3")
    assert re.match(r"BLEU\|nrefs:1\|\S+ = \d", last_line), last_line
    (row,) = rows
    signature = row["signature"]
    assert last_line.startswith(f"BLEU|{signature} = {row['bleu']:.2f} ")
    assert {"commit", "date", "gpu", "torch", "case"} <= row.keys()
    assert (row["system"], row["seed"], row["updates"]) == ("lightseq", 3, UPDATES)
    assert row["train_seconds"] > 0

    run = tmp_path / "lightseq-seed3-fp32"
    assert (run / "generate.log").read_text().count("\nD-") == 20
    assert len(list((run / "checkpoints").glob("checkpoint_*_*.pt"))) == 10
    assert (run / "averaged.pt").exists()

    # Again: the training is complete and is not touched, the row is replaced by the same one.
    written = (run / "checkpoints" / "checkpoint_last.pt").stat().st_mtime_ns
    assert train(data, tmp_path, "--seed", "3") == (last_line, rows)
    assert (run / "checkpoints" / "checkpoint_last.pt").stat().st_mtime_ns == written


def test_the_native_twin_runs_with_the_same_flags(data: Path, tmp_path: Path) -> None:
    _, rows = train(data, tmp_path, "--native")
    assert [(row["system"], row["updates"]) for row in rows] == [("fairseq", UPDATES)]
    log = (tmp_path / "fairseq-seed1-fp32" / "train.log").read_text()
    assert "--arch transformer " in log and "ls_" not in log.split("--save-dir")[0]
