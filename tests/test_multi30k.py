"""The Multi30k recipe's scripts, on number names in the place of Multi30k."""

from __future__ import annotations

import argparse
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

average = runpy.run_path(str(FOLDER / "average.py"))
record = runpy.run_path(str(FOLDER / "record.py"))
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


def write_checkpoint(path: Path, model: dict[str, torch.Tensor]) -> None:
    torch.save(
        {
            "args": None,
            "cfg": {"model": argparse.Namespace(arch="transformer")},
            "model": model,
            "optimizer_history": [{"num_updates": 8000}],
            "extra_state": {"previous_training_time": 12.34},
            "last_optimizer_state": {"state": {0: torch.zeros(3)}},
        },
        path,
    )


def test_the_checkpoints_with_the_most_updates_are_averaged(tmp_path: Path) -> None:
    for updates in (900, 1000, 1100):
        (tmp_path / f"checkpoint_{updates // 100}_{updates}.pt").touch()
    for other in ("checkpoint_last.pt", "checkpoint_best.pt", "checkpoint12.pt"):
        (tmp_path / other).touch()
    names = [path.name for path in average["last_checkpoints"](tmp_path, 2)]
    assert names == ["checkpoint_10_1000.pt", "checkpoint_11_1100.pt"]
    with pytest.raises(SystemExit, match=r"holds 3 checkpoints .* not 4"):
        average["last_checkpoints"](tmp_path, 4)


def test_the_average_is_rounded_once(tmp_path: Path) -> None:
    # 2048 + 1 rounds to 2048 in float16, so sums in float16 would lose both ones.
    halves = [torch.tensor([value], dtype=torch.float16) for value in (2048.0, 1.0, 1.0)]
    paths = []
    for number, half in enumerate(halves):
        paths.append(tmp_path / f"checkpoint_1_{number}.pt")
        single = torch.tensor([1.0, 4.0 * number])
        counter = torch.tensor([number])
        write_checkpoint(paths[-1], {"half": half, "single": single, "counter": counter})
    merged = average["average"](paths)
    model = merged["model"]
    assert torch.equal(model["half"], torch.tensor([2050 / 3], dtype=torch.float16))
    assert torch.equal(model["single"], torch.tensor([1.0, 4.0]))
    assert torch.equal(model["counter"], torch.tensor([2]))
    assert merged["last_optimizer_state"] is None
    assert merged["cfg"]["model"].arch == "transformer"


def test_different_models_are_not_averaged(tmp_path: Path) -> None:
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    write_checkpoint(paths[0], {"one": torch.ones(2)})
    write_checkpoint(paths[1], {"two": torch.ones(2)})
    with pytest.raises(SystemExit, match="different models"):
        average["average"](paths)


def test_a_row_replaces_that_of_its_system_and_seed(tmp_path: Path) -> None:
    results = tmp_path / "results" / "bleu.json"
    keys = (("lightseq", 2), ("fairseq", 1), ("lightseq", 1), ("lightseq", 2))
    for bleu, (system, seed) in enumerate(keys):
        record["write_row"]({"system": system, "seed": seed, "bleu": bleu}, results)
    rows = json.loads(results.read_text())
    assert [(row["system"], row["seed"], row["bleu"]) for row in rows] == [
        ("fairseq", 1, 1),
        ("lightseq", 1, 2),
        ("lightseq", 2, 3),
    ]
    assert [path.name for path in results.parent.iterdir()] == ["bleu.json"]


def test_updates_and_time_come_from_the_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint_last.pt", {"one": torch.ones(2)})
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
    assert last_line.startswith(f"BLEU|{signature} = {row['bleu']} ")
    assert {"commit", "date", "gpu", "torch", "case"} <= row.keys()
    assert (row["system"], row["seed"], row["updates"]) == ("lightseq", 3, UPDATES)
    assert row["train_seconds"] > 0

    run = tmp_path / "lightseq-seed3-fp32"
    reference = (data / "text" / "test_2016_flickr.de").read_text().splitlines()
    hypothesis = (run / "test.hyp.de").read_text().splitlines()
    assert len(hypothesis) == len(reference) == 20
    averaged = [path.name for path in average["last_checkpoints"](run / "checkpoints", 10)]
    assert len(list((run / "checkpoints").glob("checkpoint_*_*.pt"))) == len(averaged)

    # Again: the training is complete and is not touched, the row is replaced by the same one.
    written = (run / "checkpoints" / "checkpoint_last.pt").stat().st_mtime_ns
    assert train(data, tmp_path, "--seed", "3") == (last_line, rows)
    assert (run / "checkpoints" / "checkpoint_last.pt").stat().st_mtime_ns == written


def test_the_native_twin_runs_with_the_same_flags(data: Path, tmp_path: Path) -> None:
    _, rows = train(data, tmp_path, "--native")
    assert [(row["system"], row["updates"]) for row in rows] == [("fairseq", UPDATES)]
    log = (tmp_path / "fairseq-seed1-fp32" / "train.log").read_text()
    assert "--arch transformer " in log and "ls_" not in log.split("--save-dir")[0]
