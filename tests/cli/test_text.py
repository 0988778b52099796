"""lightseq-train and other commands with --task language_modeling."""

from __future__ import annotations

import logging
import re
import shlex
import shutil
import string
from pathlib import Path

import helpers.cli_runs as cli_runs
import pytest
from click.testing import Result
from helpers.golden import matches, refusals

from lightseq_fairseq.cli.words import defaults, registries
from lightseq_fairseq.cli.words.argv import without_prefixes

ENCODER = (
    "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 24 "
    "--encoder-attention-heads 2"
)
SIZES = [word for word in cli_runs.SMALL_TEXT if word not in ("--max-tokens", "128")]


@pytest.mark.parametrize("native", [False, True])
def test_the_arch_alone_trains_by_the_recipe_of_language_models(
    text: Path, tmp_path: Path, native: bool
) -> None:
    words = [str(text), "--arch", "ls_transformer_lm", *SIZES, "--save-dir", str(tmp_path)]
    log = cli_runs.succeed("train", *words, *["--native"] * native)
    first = shlex.split(log.splitlines()[0])
    complete = defaults.complete(words, defaults.Machine())
    assert first == ["lightseq-train", *(without_prefixes(complete) if native else complete)]
    criterion = "cross_entropy" if native else "ls_cross_entropy"
    assert first[first.index("--criterion") + 1] == criterion
    assert (tmp_path / "checkpoint_last.pt").exists()


def test_an_arch_of_fairseq_that_is_no_language_model(text: Path, tmp_path: Path) -> None:
    words = "--arch transformer_tiny --optimizer adam --max-tokens 99 --max-update 1 --cpu"
    given = ["--task", "language_modeling", "--save-dir", tmp_path, *words.split()]
    result = cli_runs.run("train", text, *given)
    assert result.exit_code == 2 and result.stderr == (
        "lightseq-train: error: --arch transformer_tiny is no language model, as --task "
        "language_modeling needs: use an arch such as ls_transformer_lm, or another task.\n"
    )


def test_blocks_that_are_longer_than_a_batch(text: Path, tmp_path: Path) -> None:
    """The advice is about their length: neither text nor model is wrong."""

    def train(words: str) -> Result:
        return cli_runs.run("train", text, "--save-dir", tmp_path, *words.split())

    def refused(words: str, block: int, most: int, instead: str) -> None:
        result = train(words)
        assert result.exit_code == 2 and result.stderr.splitlines()[-1] == (
            f"lightseq-train: error: The text is read in blocks of --tokens-per-sample {block} "
            f"tokens, but a batch has at most --max-tokens {most}: set --tokens-per-sample "
            f"{instead}, or raise --max-tokens to {block} or more."
        )

    ours = f"{' '.join(SIZES)} --arch ls_transformer_lm --max-target-positions 1024"
    refused(f"{ours} --tokens-per-sample 32 --max-tokens 16", 32, 16, "16 or less")
    masked = f"--task masked_lm --arch ls_roberta_base {ENCODER} --num-workers 0 --cpu"
    refused(f"{masked} --tokens-per-sample 32 --max-tokens 16", 32, 16, "16 or less")
    assert train(f"{ours} --tokens-per-sample 16 --max-tokens 16").exit_code == 0
    instead = f"16, as in {tmp_path}/checkpoint_last.pt"
    refused(f"{ours} --tokens-per-sample 1024 --max-tokens 16", 1024, 16, instead)
    result = train(f"{ours} --tokens-per-sample 32 --max-tokens 16")  # a short last block fits
    assert "use its data, --tokens-per-sample 16 (not 32), --max-tokens, " in result.stderr


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
    assert registries.asks_for_adaptive_softmax(["data", *words.split()]) is adaptive


WIKI103 = [
    *SIZES, "--arch", "ls_transformer_lm_wiki103", "--adaptive-input-cutoff", "8,16",
    "--adaptive-softmax-cutoff", "8,16",
]  # fmt: skip


def test_adaptive_softmax_from_training_to_export(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log = cli_runs.succeed("train", text, *WIKI103, "--save-dir", tmp_path / "run")
    assert "--criterion adaptive_loss" in log.splitlines()[0]
    assert "step: fairseq's own (the arch sets --adaptive-input)" in caplog.text
    path = tmp_path / "run" / "checkpoint_last.pt"
    cli_runs.succeed("export", path, "--to", "fairseq", "--output", tmp_path / "model.pt")
    results = {}
    for file, more in ((path, []), (path, ["--native"]), (tmp_path / "model.pt", [])):
        caplog.clear()
        words = ["--path", file, "--cpu", "--context-window", "4", "--tokens-per-sample", "16"]
        cli_runs.succeed("eval-lm", text, *words, *more)
        results[(file, *more)] = [x for x in caplog.messages if x.startswith("Loss (base 2)")]
    assert len(set(map(tuple, results.values()))) == 1 and len(results) == 3
    result = cli_runs.run("export", path, "--to", "ctranslate2", "--output", tmp_path / "ct2")
    assert result.exit_code == 2 and "CTranslate2 has no adaptive softmax" in result.stderr


@pytest.mark.parametrize(("words", "sentence"), refusals(__file__, "test_text: adaptive softmax"))
def test_adaptive_loss_and_adaptive_softmax_go_together(
    text: Path, tmp_path: Path, words: str, sentence: str
) -> None:
    refused(text, tmp_path, filled_in(words), sentence)


GPT = ["--arch", "ls_transformer_lm_gpt2_tiny", "--tokens-per-sample", "16"]


@pytest.mark.parametrize(("words", "sentence"), refusals(__file__, "test_text: settings"))
def test_bad_settings(text: Path, tmp_path: Path, words: str, sentence: str) -> None:
    refused(text, tmp_path, filled_in(words), sentence)


def test_data_of_another_task(text: Path, data: Path, tmp_path: Path) -> None:
    refused(
        data, tmp_path, GPT, "contains sentence pairs (dict.de.txt, dict.en.txt), but --task la"
    )
    words = ["--arch", "ls_transformer", "--task", "translation"]
    refused(
        text, tmp_path, words, "contains running text, but --task translation reads sentence pai"
    )
    refused(
        tmp_path / "none",
        tmp_path,
        GPT,
        "none does not exist: use the folder that lightseq-preprocess wrote",
    )
    refused(
        tmp_path, tmp_path, GPT, "contains no dict.txt, but --task language_modeling reads runn"
    )


def test_broken_text(text: Path, tmp_path: Path) -> None:
    shutil.copytree(text, tmp_path / "data")
    (tmp_path / "data" / "train.bin").write_bytes((text / "train.bin").read_bytes()[:-2])
    refused(tmp_path / "data", tmp_path, GPT, "one of the files is truncated")
    shutil.copy(text / "train.bin", tmp_path / "data")
    (tmp_path / "data" / "dict.txt").write_text("w0 1\nw1 1\n")
    refused(tmp_path / "data", tmp_path, GPT, "contains the token id")


def test_text_is_read_with_its_flag_alone(text: Path, tmp_path: Path) -> None:
    words = [*SIZES, "--arch", "ls_transformer_lm"]
    part = "contains the split train in binarised form, but --dataset-impl raw reads plain text"
    refused(text, tmp_path, [*words, "--dataset-impl", "raw"], part)
    raw = tmp_path / "text"
    cli_runs.succeed(
        "preprocess", "--only-source", "--dataset-impl", "raw", "--destdir", raw,
        *("--trainpref", text.parent / "text" / "train"),
        *("--validpref", text.parent / "text" / "valid"),
    )  # fmt: skip
    refused(raw, tmp_path, words, "but --task language_modeling reads train: rename the file")
    for split in ("train", "valid"):
        (raw / f"{split}.None-None").rename(raw / split)
    part = "contains the split train as plain text, which only --dataset-impl raw reads: set that"
    refused(raw, tmp_path, [*words, "--dataset-impl", "mmap"], part)
    losses = []
    for folder, flags in ((text, []), (raw, []), (raw, ["--dataset-impl", "raw"])):
        run = tmp_path / f"run-{len(losses)}"
        cli_runs.succeed("train", folder, *words, *flags, "--save-dir", run)
        evaluate = ["--path", run / "checkpoint_last.pt", "--cpu", "--num-workers", "0"]
        log = cli_runs.succeed("validate", folder, *evaluate, *flags)
        losses += re.findall(r"valid on 'valid' subset \| (loss .*? ppl \S+)", log)
    assert losses == losses[:1] * 3


def test_a_dictionary_of_another_size(text: Path, tmp_path: Path) -> None:
    train = [*SIZES, "--arch", "ls_transformer_lm", "--save-dir", tmp_path / "run"]
    cli_runs.succeed("train", text, *train)
    before = cli_runs.digests(tmp_path / "run")
    other = cli_runs.binarise_text(tmp_path / "other", words=12)
    evaluate = ["--path", tmp_path / "run" / "checkpoint_last.pt", "--cpu"]
    for command, words in (
        ("train", [*train, "--max-update", "9"]),
        ("eval-lm", [*evaluate, "--tokens-per-sample", "16"]),
        ("validate", evaluate),
    ):
        result = cli_runs.run(command, other, *words)
        assert result.exit_code == 2, (command, result.output, result.exception)
        (error,) = (line for line in result.stderr.splitlines() if "error:" in line)
        assert "The dictionary does not match" in error and "trained with 24" in error
        assert f"the dictionary in {other} has 16 words" in error
    assert cli_runs.digests(tmp_path / "run") == before


@pytest.mark.parametrize(("words", "sentence"), refusals(__file__, "test_text: blocks"))
def test_blocks_longer_than_the_positions(
    learned: Path, text: Path, words: str, sentence: str
) -> None:
    result = cli_runs.run("eval-lm", text, "--path", learned, "--cpu", *words.split())
    assert result.exit_code == 2, (result.output, result.exception)
    assert matches(result.stderr, f"...lightseq-eval-lm: error: {sentence}\n")
    whole = ["--tokens-per-sample", "12", "--context-window", "4"]
    cli_runs.succeed("eval-lm", text, "--path", learned, "--cpu", *whole)


def test_blocks_are_those_of_training_if_fairseqs_are_too_long(learned: Path, text: Path) -> None:
    words = [text, "--path", learned, "--cpu", "--gen-subset", "test"]
    result = cli_runs.run("eval-lm", *words)
    assert result.exit_code == 0, (result.output, result.exception)
    assert result.stderr.count("note: --tokens-per-sample 16, as in training\n") == 1
    given = cli_runs.run("eval-lm", *words, "--tokens-per-sample", "16")
    assert "note" not in given.stderr and given.stdout == result.stdout


@pytest.fixture(scope="module")
def learned(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learned")
    cli_runs.succeed("train", text, *GPT, *GPT_RUN, "--save-dir", folder)
    return folder / "checkpoint_last.pt"


GPT_RUN = [
    "--task", "language_modeling", "--decoder-learned-pos", "--max-update", "2", "--cpu",
    "--no-epoch-checkpoints", "--num-workers", "0",
]  # fmt: skip


def filled_in(words: str) -> list[str]:
    given = {"GPT": shlex.join(GPT), "WIKI103": shlex.join(WIKI103)}
    return string.Template(words).substitute(given).split()


def refused(data: Path, tmp_path: Path, words: list[str], sentence: str) -> None:
    """Training must end with one sentence, and write nothing."""
    more = ["--task", "language_modeling"] if "--task" not in words else []
    result = cli_runs.run("train", data, *more, *words, "--cpu", "--save-dir", tmp_path / "run")
    assert result.exit_code == 2, (result.output, result.exception)
    (error,) = (line for line in result.stderr.splitlines() if "error:" in line)
    assert matches(error, f"...{sentence}...")
    assert not (tmp_path / "run").exists()
