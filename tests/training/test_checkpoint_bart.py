"""Checkpoints of BART go from fairseq to us and back, and training goes on as if never ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers.training_runs as runs
import pytest

KINDS: dict[str, dict[str, Any]] = {
    "translation": {},
    "languages": {"task": "translation_from_pretrained_bart", "langs": "src,tgt"},
}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.corpus(tmp_path_factory.mktemp("pairs"))


def train(data: Path, folder: Path, ours: bool = True, **flags: Any) -> list[float]:
    flags = {**runs.BART, **flags}
    if not ours:
        flags |= {part: flags[part].removeprefix("ls_") for part in runs.LS}
    return runs.run(data, folder, native=not ours, **flags)


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_out_and_in(pairs: Path, tmp_path: Path, kind: str) -> None:
    flags = {**KINDS[kind], **NO_DROPOUT}
    whole = train(pairs, tmp_path / "whole", False, max_update=10, **flags)
    for first in (True, False):
        folder = tmp_path / f"ls{first}"
        losses = train(pairs, folder, first, max_update=5, **flags)
        losses += train(pairs, folder, not first, max_update=10, **flags)
        assert losses == pytest.approx(whole, rel=1e-5)
        assert b"ls_" not in (folder / "checkpoint_last.pt").read_bytes()


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_in_mid_epoch(
    pairs: Path, tmp_path: Path, kind: str, precision: dict[str, Any]
) -> None:
    flags = {**KINDS[kind], **precision}
    whole = train(pairs, tmp_path / "whole", max_update=12, **flags)
    parts = train(pairs, tmp_path / "parts", max_update=4, **flags)
    parts += train(pairs, tmp_path / "parts", max_update=12, **flags)
    assert parts == whole and len(set(whole)) == len(whole) == 12
    both = [runs.trained(tmp_path / name) for name in ("whole", "parts")]
    assert runs.differing(*both) == []
