"""lightseq-train and other commands with --task language_modeling."""

from __future__ import annotations

import shlex
from pathlib import Path

import helpers.cli_runs as cli_runs
import pytest

from lightseq_fairseq.cli.start import defaults, registries


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cli_runs.binarise_text(tmp_path_factory.mktemp("text"))


SIZES = [word for word in cli_runs.SMALL_TEXT if word not in ("--max-tokens", "128")]


@pytest.mark.parametrize("native", [False, True])
def test_the_arch_alone_trains_by_the_recipe_of_language_models(
    data: Path, tmp_path: Path, native: bool
) -> None:
    words = [str(data), "--arch", "ls_transformer_lm", *SIZES, "--save-dir", str(tmp_path)]
    log = cli_runs.succeed("train", *words, *["--native"] * native)
    first = shlex.split(log.splitlines()[0])
    complete = defaults.complete(words, defaults.Machine())
    assert first == ["lightseq-train", *(defaults.native_twin(complete) if native else complete)]
    criterion = "cross_entropy" if native else "ls_cross_entropy"
    assert first[first.index("--criterion") + 1] == criterion
    assert (tmp_path / "checkpoint_last.pt").exists()


@pytest.mark.parametrize(
    ("words", "adaptive"),
    [
        ("--arch ls_transformer_lm", False),
        ("--arch ls_transformer_lm_gbw", False),
        ("--arch ls_transformer_lm_gpt2_small", False),
        ("--arch ls_transformer", False),
        ("--arch lstm", True),
        ("--arch unknown", False),
        ("--arch ls_transformer_lm_wiki103", True),
        ("--arch=ls_transformer_lm_baevski_wiki103", True),
        ("--arch ls_transformer_lm --adaptive-softmax-cutoff 5,7", True),
    ],
)
def test_who_has_adaptive_softmax(words: str, adaptive: bool) -> None:
    assert registries.has_adaptive_softmax(["data", *words.split()]) is adaptive
