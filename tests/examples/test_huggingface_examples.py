"""The examples of Hugging Face's Trainer, with few updates; each differs by one line."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import lightseq_fairseq.huggingface as lightseq

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "huggingface"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "common"))


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_by_our_layers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers.logging.set_verbosity_error()
    module = importlib.import_module(f"examples.huggingface.{name}")
    trainer = module.main(["--steps", "20", "--output", str(tmp_path)])
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 5 and losses[-1] < losses[0]
    coverage = lightseq.report(trainer.model)
    assert coverage.calls >= 20
    assert all("cache" in reason for reason in coverage.fallbacks)  # of generation
    assert trainer._why_plain is None


@pytest.mark.parametrize("name", NAMES)
def test_one_line_is_ours(name: str) -> None:
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    assert len([line for line in lines if "lightseq" in line]) == 1
    assert name in (FOLDER / "README.md").read_text()


def test_text_of_a_folder(tmp_path: Path) -> None:
    from examples.huggingface import translation

    for side, lines in (("de", "eins zwei\ndrei\n"), ("en", "one two\nthree\n")):
        (tmp_path / f"train.{side}").write_text(lines)
    pairs = translation.texts(tmp_path)
    assert pairs == [(["eins", "zwei"], ["one", "two"]), (["drei"], ["three"])]
