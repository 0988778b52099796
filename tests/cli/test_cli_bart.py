"""BART's way through the commands: training by its recipe, search, validation, export."""

from __future__ import annotations

import logging
import re
import shlex
from pathlib import Path

import pytest
from helpers import cli_runs, parity

from lightseq_fairseq.base.families import BART

SMALL = shlex.split(
    "--arch ls_bart_base --encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 "
    "--encoder-ffn-embed-dim 16 --encoder-attention-heads 2 --decoder-attention-heads 2 "
    "--max-update 6 --cpu"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    raw = parity.write_corpus(folder / "raw")
    splits = [
        word
        for split in ("train", "valid", "test")
        for word in (f"--{split}pref", raw / f"{split.replace('test', 'valid')}.src-tgt")
    ]
    languages = ["--source-lang", "src", "--target-lang", "tgt"]
    words = [*languages, "--joined-dictionary", "--srcdict", raw / "dict.src.txt"]
    cli_runs.succeed("preprocess", *words, *splits, "--destdir", folder / "pairs")
    return folder / "pairs"


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A checkpoint trained by the recipe, and the printed command."""
    folder = tmp_path_factory.mktemp("run")
    log = cli_runs.succeed("train", data, *SMALL, "--save-dir", folder)
    return folder / "checkpoint_last.pt", log.splitlines()[0]


def test_the_recipe_is_that_of_summaries(trained: tuple[Path, str]) -> None:
    recipe = BART.recipes["translation"]
    for flags in (recipe.optimizer, recipe.criterion, "--lr 3e-5", recipe.data):
        assert flags in trained[1]
    assert "--total-num-update 6" in trained[1]


@pytest.mark.parametrize("native", [False, True])
def test_it_trains_packed(
    data: Path, tmp_path: Path, native: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cli_runs.succeed("train", data, *SMALL, "--save-dir", tmp_path, *["--native"] * native)
    assert ("step: eager, without pads" in caplog.text) != native


def hypotheses(log: str) -> list[tuple[str, ...]]:
    """Sentence, score and words; scores of float32 have four digits."""
    return re.findall(r"^H-(\d+)\t(-?\d+\.\d{4})\d*\t(.*)$", log, re.MULTILINE)


def test_our_search_finds_what_fairseqs_finds(data: Path, trained: tuple[Path, str]) -> None:
    words = [data, "--path", trained[0], "--beam", "4", "--lenpen", "2", "--max-len-b", "9",
             "--min-len", "3", "--no-repeat-ngram-size", "3", "--cpu"]  # fmt: skip
    ours, native = (
        hypotheses(cli_runs.succeed("generate", *words, *more)) for more in ([], ["--native"])
    )
    assert [(n, words) for n, _, words in ours] == [(n, words) for n, _, words in native]
    for (_, a, _), (_, b, _) in zip(ours, native, strict=True):
        assert float(a) == pytest.approx(float(b), abs=2e-4)
    assert len(ours) == 48


def test_validation(data: Path, trained: tuple[Path, str]) -> None:
    log = cli_runs.succeed("validate", data, "--path", trained[0], "--cpu")
    assert " | valid | " in log


@pytest.mark.parametrize("kind", ["fairseq", "safetensors", "ctranslate2"])
def test_export(data: Path, tmp_path: Path, trained: tuple[Path, str], kind: str) -> None:
    words = ["--to", kind, "--output", tmp_path / "out", "--data", data]
    cli_runs.succeed("export", trained[0], *words[: 4 if kind == "fairseq" else None])
    assert (tmp_path / "out").exists()
