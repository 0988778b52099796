"""The rows of docs/flags.md, and runs of the commands with settings given.

A module tests/test_flags_*.py says in ``PROVEN`` which rows its tests run: (command, answer) ->
names. tests/test_flags_proofs.py adds them up.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import cli_runs
import pytest
import torch
import training_runs as runs
from click.testing import Result

import fairseq_cli.train  # isort: skip

ROOT = Path(__file__).resolve().parent.parent

Proofs = dict[tuple[str, str], set[str]]


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"scripts_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


table = _load(ROOT / "scripts" / "flags.py")
SETTINGS = table.settings()


def rows(command: str, kind: str) -> set[str]:
    """Settings of a command with that answer."""
    return {
        name
        for name, row in SETTINGS.items()
        if command in row.commands and table.answer(command, name, row.choices)[0] == kind
    }


def names(*lines: str) -> set[str]:
    """Settings that command lines give, under the names of their rows."""
    words = {word.partition("=")[0] for line in lines for word in line.split()}
    return {name for name, row in SETTINGS.items() if words & {name, *row.aliases}}


# ---- short runs of the launchers ----


def launch(command: str, data: Path, place: Path, line: str, ok: bool = False) -> Result:
    """``lightseq-<command>``; ``place`` is the folder for checkpoints, or the one to load."""
    own = {
        "train": ["--arch", "ls_transformer_tiny", *cli_runs.SMALL, "--save-dir", place],
        "generate": ["--path", place, "--cpu", "--beam", 2, "--max-len-b", 9,
                     "--num-workers", 0],
        "validate": ["--path", place, "--cpu", "--max-tokens", 200, "--num-workers", 0],
        "interactive": ["--path", place, "--cpu", "--input", data.parent / "text" / "test.de",
                        "--beam", 2, "--max-len-b", 9],
    }[command]  # fmt: skip
    result = cli_runs.run(command, data, *map(str, own), *line.split())
    assert not ok or result.exit_code == 0, (result.output, result.exception)
    return result


# ---- whole training runs ----

PLAIN: dict[str, Any] = {
    "dropout": 0, "attention-dropout": 0, "activation-dropout": 0, "max-update": 4,
    "log-format": "json", "log-interval": 1, "share-decoder-input-output-embed": None,
    "warmup-updates": None, "lr-scheduler": "fixed", "max-tokens": 128,
    "disable-validation": True, "no-save": True,
}  # fmt: skip


class Trace:
    """What a run shows: losses, the statistics it logs, the files it leaves; and ``refusals``, why
    the captured step was not taken."""

    def __init__(
        self, losses: list[float], logged: list[dict[str, Any]], files: list[str],
        refusals: list[str],
    ) -> None:  # fmt: skip
        self.losses, self.files, self.refusals = losses, files, refusals
        # As text: fairseq logs numbers so. Times are each run's own.
        own = ("wall", "wps", "ups")
        self.logged = [{k: v for k, v in x.items() if not k.endswith(own)} for x in logged]

    def agrees(self, other: Trace, tolerance: float) -> bool:
        if self.files != other.files or len(self.logged) != len(other.logged):
            return False
        if self.losses != pytest.approx(other.losses, rel=tolerance):
            return False
        return all(
            ours.keys() == theirs.keys()
            and all(_close(ours[k], theirs[k], 10 * tolerance + 1e-3) for k in ours)
            for ours, theirs in zip(self.logged, other.logged, strict=True)
        )


def _close(a: Any, b: Any, tolerance: float) -> bool:
    try:
        return float(a) == pytest.approx(float(b), rel=tolerance, abs=tolerance)
    except ValueError:
        return bool(a == b)


def _described(path: Path) -> str:
    """A file's name, and whether there is an optimizer's state in it."""
    state = torch.load(path, weights_only=False) if path.suffix == ".pt" else {}
    return path.name + " with optimizer" * (state.get("last_optimizer_state") is not None)


def inputs(folder: Path) -> dict[str, Path]:
    """Files that lines of settings name in braces, made in ``folder``."""
    data = runs.corpus(folder / "corpus")
    for side in ("src", "tgt"):  # the second part of a sharded training set
        shutil.copy(data / f"valid.src-tgt.{side}", data / f"train1.src-tgt.{side}")
    (folder / "user").mkdir()
    (folder / "user" / "__init__.py").touch()
    vectors = folder / "vectors"
    lines = [f"w{i} " + " ".join(f"{(i * j) % 7 / 7}" for j in range(16)) for i in range(90)]
    vectors.write_text("\n".join([f"{len(lines)} 16", *lines]) + "\n")
    found = {"folder": folder, "data": data, "vectors": vectors}
    train(found, folder / "saved", "--max-update 3 --no-save None", native=True)
    return {**found, "checkpoint": folder / "saved" / "checkpoint_last.pt"}


def train(inputs: dict[str, Path], save_dir: Path, line: str, native: bool) -> Trace:
    """Trains with the settings of ``line``, on top of PLAIN; None as a value leaves one out."""
    for name, path in inputs.items():
        line = line.replace(f"{{{name}}}", str(path))
    given: dict[str, Any] = {}
    for word in line.split():
        if word.startswith("--"):
            given[name := word[2:]] = True
        else:
            given[name] = None if word == "None" else word
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    vars(fairseq_cli.train.should_stop_early).clear()
    try:
        parts = runs.NATIVE if native else runs.LS
        # After an overflow fairseq asks for a number on the GPU.
        with mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor):
            losses = runs.run(inputs["data"], save_dir, native, **{**parts, **PLAIN, **given})
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    told = "training takes fairseq's own steps: "
    messages = [record.getMessage() for record in records]
    refusals = [m.removeprefix(told) for m in messages if m.startswith(told)]
    logged = [
        json.loads(r.getMessage()) for r in records if r.name in ("train_inner", "train", "valid")
        and r.getMessage().startswith("{")
    ]  # fmt: skip
    logged += [{"told": m} for m in messages if m.startswith("example ")]
    files = sorted(_described(path) for path in save_dir.glob("*")) if save_dir.exists() else []
    return Trace(losses, logged, files, refusals)
