"""The scripts of the Multi30k recipe, run on number names instead of Multi30k."""

from __future__ import annotations

import gzip
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import helpers.forked_commands as forked_commands
import pytest
import torch
from helpers.multi30k_runs import EXAMPLES, ROOT, command, script

from examples import record

RUN = "small-lightseq-seed3-fp32"
UPDATES = 13  # run.sh wants ten checkpoints, and none is at the end of an epoch: 6 and 12
# One tiny layer per side; the 16 heads of t2t_big have width 2.
TINY = ["--max-tokens=400"] + [
    word
    for side in ("encoder", "decoder")
    for word in (f"--{side}-layers=1", f"--{side}-embed-dim=32", f"--{side}-ffn-embed-dim=32")
]

make_data = runpy.run_path(str(EXAMPLES / "quickstart" / "make_data.py"))


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
        record.write_row(row, results)
    rows = json.loads(results.read_text())
    assert [(row["case"], row["system"], row["seed"], row["bleu"]) for row in rows] == [
        ("a", "fairseq", 1, 1),
        ("a", "lightseq", 1, 2),
        ("a", "lightseq", 2, 4),
        ("b", "lightseq", 2, 3),
    ]
    assert {path.name for path in results.parent.iterdir()} == {"bleu.json", "bleu.json.lock"}


def test_updates_and_time_come_from_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = {
        "model": {},
        "optimizer_history": [{"num_updates": 8000}],
        "extra_state": {"previous_training_time": 12.34},
    }
    torch.save(checkpoint, tmp_path / "checkpoint_last.pt")
    figures = record.training_figures(tmp_path / "checkpoint_last.pt")
    assert figures == {"updates": 8000, "train_seconds": 12.3}


def test_missing_raw_data_is_explained(tmp_path: Path) -> None:
    result = script("prepare.sh", tmp_path / "data", MULTI30K=str(tmp_path))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "set MULTI30K" in result.stderr
    assert not (tmp_path / "data").exists()


def test_an_unknown_precision_is_refused(tmp_path: Path) -> None:
    result = script("run.sh", "--out", tmp_path / "out", PRECISION="fp4")
    assert result.returncode == 2
    assert "PRECISION must be fp32, fp16, bf16 or fp8, not fp4" in result.stderr


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of prepare.sh for a corpus of number names."""
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
    """A short run of run.sh: its last line and the rows it added."""
    words = (*words, "--updates", str(UPDATES), "--data", str(data), "--out", str(out))
    result = script("run.sh", *words, "--", *TINY)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout.splitlines()[-1], json.loads((out / "bleu.json").read_text())


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run of ours; its row is in bleu.json, its last line in a file."""
    out = tmp_path_factory.mktemp("trained")
    last_line, _ = train(data, out, "--seed", "3")
    (out / "last_line").write_text(last_line)
    return out


def test_a_run_ends_with_a_score_and_its_row(data: Path, trained: Path) -> None:
    last_line = (trained / "last_line").read_text()
    assert re.match(r"BLEU\|nrefs:1\|\S+ = \d", last_line), last_line
    (row,) = rows = json.loads((trained / "bleu.json").read_text())
    signature = row["signature"]
    assert last_line.startswith(f"BLEU|{signature} = {row['bleu']:.2f} ")
    assert {"commit", "date", "gpu", "torch", "case"} <= row.keys()
    assert (row["system"], row["seed"], row["updates"]) == ("lightseq", 3, UPDATES)
    assert row["train_seconds"] > 0

    run = trained / RUN
    assert (run / "generate.log").read_text().count("\nD-") == 20
    assert len(list((run / "checkpoints").glob("checkpoint_*_*.pt"))) == 10
    assert (run / "averaged.pt").exists()

    # Run it again: the finished training is not touched, and the same row is written.
    written = (run / "checkpoints" / "checkpoint_last.pt").stat().st_mtime_ns
    assert train(data, trained, "--seed", "3") == (last_line, rows)
    assert (run / "checkpoints" / "checkpoint_last.pt").stat().st_mtime_ns == written


def test_validations_by_bleu_are_timed(data: Path, trained: Path, tmp_path: Path) -> None:
    checkpoint, results = trained / RUN / "averaged.pt", tmp_path / "rows.json"
    words = ("--checkpoint", checkpoint, "--data", data, "--out", tmp_path, "--results", results)
    result = script("translation.py", *words, "--eval-bleu", "--updates", "3", "--", *TINY)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    rows = json.loads(results.read_text())
    assert [row["system"] for row in rows] == ["fairseq_no_cudnn", "ours"]
    for row in rows:
        assert (row["case"], row["updates"]) == ("eval_bleu/fp32", 3) and 0 <= row["bleu"] <= 100
        first, *others = row["validation_s"]
        assert first > 0 and len(others) == 2 and min(others) > 0
        assert row["s_per_validation"] == pytest.approx(sum(others) / 2, abs=1e-3)

        log = (tmp_path / "eval-bleu" / row["system"] / "output.txt").read_text()
        command, _, rest = log.partition("--save-dir")
        assert ("ls_" in command) == (row["system"] == "ours")
        assert rest.count("begin validation on") == 3
    assert not list(tmp_path.rglob("*.pt"))


def test_runs_of_both_systems_and_models_leave_rows_and_curves(data: Path, tmp_path: Path) -> None:
    words = ("--data", data, "--out", tmp_path, "--jobs", "4", "--seeds", "1")
    words = (*words, "--updates", str(UPDATES), "--", *TINY)
    result = script("convergence.py", *words)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]

    file = tmp_path / "convergence.json"
    rows = json.loads(file.read_text())
    assert [(row["case"], row["system"], row["seed"], row["updates"]) for row in rows] == [
        (case, system, 1, UPDATES)
        for case in ("small/fp32", "t2t_big/bf16")
        for system in ("fairseq", "lightseq")
    ]
    for row in rows:
        assert {"commit", "date", "gpu", "torch"} <= row.keys() and row["runs_at_once"] == 4
        assert (row["bleu"] is None) == (row["case"] == "t2t_big/bf16")
        for curve in (row["train_curve"], row["valid_curve"]):
            updates, seconds, losses = zip(*curve)
            assert updates[-1] == UPDATES and sorted(updates) == list(updates)
            assert seconds[-1] == row["seconds"] and sorted(seconds) == list(seconds)
            assert min(losses) > 4 and max(losses) < 14
        assert row["valid_loss"] == row["valid_curve"][-1][2]

        run = tmp_path / f"{row['case'].replace('/', '-' + row['system'] + '-seed1-')}"
        command = (run / "train.log").read_text().split("--save-dir")[0]
        assert ("ls_" in command) == (row["system"] == "lightseq")
        assert not list(run.rglob("*.pt"))

    # Run it again: it finds every row.
    written = file.stat().st_mtime_ns
    result = script("convergence.py", *words)
    assert (result.returncode, result.stdout, file.stat().st_mtime_ns) == (0, "", written)


def test_each_seed_trains_in_each_precision(data: Path, tmp_path: Path) -> None:
    words = ("--data", data, "--out", tmp_path, "--jobs", "2", "--model", "small", "--seeds", "5-5")
    words = (*words, "--precisions", "bf16,fp8", "--updates", str(UPDATES), "--", *TINY)
    result = script("convergence.py", *words)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    rows = json.loads((tmp_path / "convergence.json").read_text())
    assert [(row["case"], row["system"]) for row in rows] == [
        ("small/bf16", "lightseq"), ("small/fp8", "lightseq")
    ]  # fmt: skip
    assert rows[0]["valid_loss"] == pytest.approx(rows[1]["valid_loss"], rel=0.03)
    log = (tmp_path / "small-lightseq-seed5-fp8" / "train.log").read_text()
    assert '"fp8_sat"' in log


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, str]:
    """An environment whose lightseq-train logs two records and then behaves as BEHAVIOUR says."""
    command = tmp_path / "bin" / "lightseq-train"
    command.parent.mkdir()
    command.write_text(
        """#!/usr/bin/env bash
        while [ $# -gt 0 ]; do [ "$1" != --seed ] || seed=$2; shift; done
        echo '1 | INFO | train_inner | {"loss": "5.5", "num_updates": "3", "wall": "7"}'
        echo '1 | INFO | valid | {"valid_loss": "5.25", "valid_num_updates": "3"}'
        eval "$BEHAVIOUR"
        """
    )
    command.chmod(0o755)
    return {"PATH": os.pathsep.join([str(command.parent), forked_commands.path()])}


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Runs four trainings of the big model at once; no data are read."""
    (tmp_path / "data" / "bin").mkdir(parents=True)
    folders = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    return ["--model", "t2t_big", "--seeds", "2", "--jobs", "4", *folders]


def test_a_failed_run_costs_its_own_row_alone(
    stand_in: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    stand_in["BEHAVIOUR"] = '[ "$seed" = 1 ] || { echo the GPU has gone; exit 3; }'
    result = script("convergence.py", *words, **stand_in)
    assert result.returncode == 1 and result.stdout.count("the GPU has gone") == 2
    assert "t2t_big-fairseq-seed2-bf16, t2t_big-lightseq-seed2-bf16 failed" in result.stderr
    rows = json.loads((tmp_path / "out" / "convergence.json").read_text())
    assert [(row["system"], row["seed"]) for row in rows] == [("fairseq", 1), ("lightseq", 1)]
    assert rows[0]["train_curve"] == [[3, 7.0, 5.5]]
    assert rows[0]["valid_curve"] == [[3, 7.0, 5.25]]

    stand_in["BEHAVIOUR"] = '[ "$LIGHTSEQ_CUDNN_ATTENTION" = 0 ]'
    stand_in["LIGHTSEQ_CUDNN_ATTENTION"] = "1"
    result = script("convergence.py", *words, **stand_in)
    assert result.returncode == 0 and result.stdout.count("started") == 2
    assert len(json.loads((tmp_path / "out" / "convergence.json").read_text())) == 4


def test_trainings_end_with_the_command(
    stand_in: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    stand_in["BEHAVIOUR"] = f"echo $$ >>{tmp_path}/training; sleep 60 & wait"
    with subprocess.Popen(
        command("convergence.py", *words, python=sys.executable), cwd=ROOT,
        env={**os.environ, **stand_in}, stderr=subprocess.PIPE,
    ) as run:  # fmt: skip
        training = tmp_path / "training"
        deadline = time.monotonic() + 60
        while not training.exists() or len(training.read_text().split()) < 4:
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        _, stderr = run.communicate(timeout=30)
    assert run.returncode == 1 and stderr == b"convergence.py: stopped by a signal\n"
    deadline = time.monotonic() + 20
    while any(map(is_running, training.read_text().split())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    return True


def test_a_model_that_there_is_not_is_refused(tmp_path: Path) -> None:
    result = script("run.sh", "--model", "huge", "--out", tmp_path / "out")
    assert result.returncode == 2
    assert result.stderr == "run.sh: --model must be small or t2t_big, not huge\n"
