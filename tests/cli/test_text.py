"""lightseq-train and its relatives with --task language_modeling."""

from __future__ import annotations

import logging
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


WIKI103 = [
    *SIZES, "--arch", "ls_transformer_lm_wiki103", "--adaptive-input-cutoff", "8,16",
    "--adaptive-softmax-cutoff", "8,16",
]  # fmt: skip


def test_adaptive_softmax_from_training_to_export(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log = cli_runs.succeed("train", data, *WIKI103, "--save-dir", tmp_path / "run")
    assert "--criterion adaptive_loss" in log.splitlines()[0]
    assert "fairseq's own steps: --adaptive-input" in caplog.text
    path = tmp_path / "run" / "checkpoint_last.pt"
    cli_runs.succeed("export", path, "--to", "fairseq", "--output", tmp_path / "model.pt")
    results = {}
    for file, more in ((path, []), (path, ["--native"]), (tmp_path / "model.pt", [])):
        caplog.clear()
        words = ["--path", file, "--cpu", "--context-window", "4", "--tokens-per-sample", "16"]
        cli_runs.succeed("eval-lm", data, *words, *more)
        results[(file, *more)] = [x for x in caplog.messages if x.startswith("Loss (base 2)")]
    assert len(set(map(tuple, results.values()))) == 1 and len(results) == 3
    result = cli_runs.run("export", path, "--to", "ctranslate2", "--output", tmp_path / "ct2")
    assert result.exit_code == 2 and "CTranslate2 has no adaptive softmax" in result.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--arch", "ls_transformer_lm", "--criterion", "adaptive_loss"],
            "does not support --criterion (adaptive_loss is for models with adaptive softmax): use",
        ),
        (
            ["--arch", "ls_transformer", "--task", "translation", "--criterion", "adaptive_loss"],
            "does not support --criterion (adaptive_loss is for models with adaptive softmax): use",
        ),
        (
            [*WIKI103, "--criterion", "ls_cross_entropy"],
            "use --criterion adaptive_loss, or train without --adaptive-softmax-cutoff",
        ),
        (
            [*WIKI103, "--criterion", "cross_entropy"],
            "use --criterion adaptive_loss, or train without --adaptive-softmax-cutoff",
        ),
        ([*WIKI103, "--criterion", "adaptive_loss"], "use --ddp-backend legacy_ddp"),
    ],
)
def test_adaptive_loss_and_adaptive_softmax_go_together(
    data: Path, tmp_path: Path, words: list[str], sentence: str
) -> None:
    refused(data, tmp_path, words, sentence)


def refused(data: Path, tmp_path: Path, words: list[str], sentence: str) -> None:
    """Training ends with a sentence, and has written nothing."""
    more = ["--task", "language_modeling"] if "--task" not in words else []
    result = cli_runs.run("train", data, *more, *words, "--cpu", "--save-dir", tmp_path / "run")
    assert result.exit_code == 2, (result.output, result.exception)
    (error,) = (line for line in result.stderr.splitlines() if "error:" in line)
    assert sentence in error
    assert not (tmp_path / "run").exists()
