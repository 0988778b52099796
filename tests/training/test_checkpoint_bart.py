"""Checkpoints of BART go from fairseq to us and back, and training goes on as if never ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers.parity as parity
import helpers.training_runs as runs
import pytest

KINDS: dict[str, dict[str, Any]] = {
    "translation": runs.BART,
    "languages": {**runs.BART, "task": "translation_from_pretrained_bart", "langs": "src,tgt"},
    "classes": runs.BART_CLASSES,
    "noise": runs.NOISED,
}
NO_DROPOUT = {
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pooler_dropout": 0.0,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    pairs = runs.corpus(folder / "pairs")
    others = {
        "classes": parity.write_classes(folder / "classes"),
        "noise": parity.write_text(folder / "text"),
    }
    return {kind: others.get(kind, pairs) for kind in KINDS}


def train(data: Path, folder: Path, ours: bool = True, **flags: Any) -> list[float]:
    if not ours:
        flags |= {part: flags[part].removeprefix("ls_") for part in runs.LS}
    return runs.run(data, folder, native=not ours, **flags)


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_out_and_in(data: dict[str, Path], tmp_path: Path, kind: str) -> None:
    flags = {**KINDS[kind], **NO_DROPOUT}
    whole = train(data[kind], tmp_path / "whole", False, max_update=10, **flags)
    for first in (True, False):
        folder = tmp_path / f"ls{first}"
        losses = train(data[kind], folder, first, max_update=5, **flags)
        losses += train(data[kind], folder, not first, max_update=10, **flags)
        assert losses == pytest.approx(whole, rel=1e-5)
        assert b"ls_" not in (folder / "checkpoint_last.pt").read_bytes()


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_in_mid_epoch(
    data: dict[str, Path], tmp_path: Path, kind: str, precision: dict[str, Any]
) -> None:
    flags = {**KINDS[kind], **precision}
    whole = train(data[kind], tmp_path / "whole", max_update=12, **flags)
    parts = train(data[kind], tmp_path / "parts", max_update=4, **flags)
    parts += train(data[kind], tmp_path / "parts", max_update=12, **flags)
    assert parts == whole and len(set(whole)) == len(whole) == 12
    both = [runs.trained(tmp_path / name) for name in ("whole", "parts")]
    assert runs.differing(*both) == []


def test_fine_tuning_begins_with_either_file(data: dict[str, Path], tmp_path: Path) -> None:
    """The first dictionary has <mask>, the second one, of the same words, lacks it."""
    found = []
    for first in (True, False):
        path = tmp_path / f"first{first}"
        flags = {**runs.BART_CLASSES, **NO_DROPOUT, "encoder_ffn_embed_dim": 32, "max_update": 4}
        train(data["classes"], path, first, **flags)
        start = {"finetune_from_model": str(path / "checkpoint_last.pt")}
        for ours in (True, False):
            flags = {**runs.BART, **NO_DROPOUT, "max_update": 4}
            folder = tmp_path / f"tuned{first}{ours}"
            found.append(train(data["translation"], folder, ours, **flags, **start))
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], rel=1e-5)
    scratch = train(data["translation"], tmp_path / "x", **flags)
    assert found[0] != pytest.approx(scratch, rel=1e-5)
