"""lightseq-train pre-trains and fine-tunes RoBERTa by recipes, and refuses what does not fit it."""

from __future__ import annotations

import logging
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from helpers import cli_runs, parity
from helpers.golden import matches, refusals

from lightseq_fairseq.cli.start import logs
from lightseq_fairseq.cli.words import defaults
from lightseq_fairseq.cli.words.argv import without_prefixes

SMALL = shlex.split(
    "--arch ls_roberta_base --encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 "
    "--encoder-attention-heads 2 --max-update 6 --cpu"
)
MASKED = [*SMALL, "--task", "masked_lm", "--tokens-per-sample", "32", "--max-tokens", "64"]
CLASSES = [*SMALL, "--task", "sentence_prediction", "--num-classes", "3", "--max-positions", "32"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    raw = folder / "raw"
    parity.write_text(raw / "text")
    parity.write_classes(raw / "classes")
    for part in ("text", "classes/input0", "classes/input1", "classes/label"):
        splits = [word for split in ("train", "valid")
                  for word in (f"--{split}pref", raw / part / split)]  # fmt: skip
        words = ["--only-source", "--srcdict", raw / part / "dict.txt", *splits]
        cli_runs.succeed("preprocess", *words, "--destdir", folder / part)
    return folder


@pytest.mark.parametrize("native", [False, True])
def test_both_trainings_by_their_recipes(
    data: Path, tmp_path: Path, native: bool, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO)
    pretrained = tmp_path / "pretrained" / "checkpoint_last.pt"
    for words in (
        [data / "text", *MASKED, "--save-dir", pretrained.parent],
        [data / "classes", *CLASSES, "--save-dir", tmp_path / "tuned",
         "--finetune-from-model", pretrained],
    ):  # fmt: skip
        log = cli_runs.succeed("train", *words, *["--native"] * native)
        complete = defaults.complete([str(word) for word in words], defaults.Machine())
        complete = without_prefixes(complete) if native else complete
        first = shlex.split(log.splitlines()[0])
        assert first == ["lightseq-train", *complete]
        assert first[first.index("--total-num-update") + 1] == "6"
        assert ("step: without CUDA graphs, without padding" in caplog.text) != native
        kind = "samples" if words[0] == data / "classes" else "blocks of text"
        assert re.search(rf"data: \d+ {kind}, ", caplog.text)
        # fairseq tells of each weight of a new head that it is overwritten.
        monkeypatch.setattr(sys, "argv", ["lightseq-train"])
        heads = [line for line in caplog.records if "classification_heads." in line.getMessage()]
        assert bool(heads) == (kind == "samples") and not any(map(logs.is_shown, heads))
        caplog.clear()
    tuned = tmp_path / "tuned" / "checkpoint_last.pt"
    # The criterion is that of the checkpoint.
    words = ["--task", "sentence_prediction", "--num-classes", "3", "--path", tuned, "--cpu"]
    result = cli_runs.succeed("validate", data / "classes", *words, *["--native"] * native)
    assert " | accuracy " in result


@pytest.mark.parametrize(("line", "sentence"), refusals(__file__, "test_cli_roberta"))
def test_what_does_not_fit_is_refused(data: Path, tmp_path: Path, line: str, sentence: str) -> None:
    kind, *words = line.split()
    flags = MASKED if kind == "text" else CLASSES
    done = cli_runs.run("train", data / kind, *flags, *words, "--save-dir", tmp_path)
    assert done.exit_code != 0
    assert matches(done.output.splitlines()[-1], f"lightseq-train: error: {sentence}")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def others(data: Path) -> Path:
    """The data of fairseq's other two tasks for RoBERTa: "ranked" and "corpora"."""
    for part in ("input0", "input1"):
        shutil.copytree(data / "classes" / part, data / "ranked" / part)
    shutil.copytree(data / "classes" / "input0", data / "ranked" / "input2")
    (data / "ranked" / "label").mkdir()
    for split in ("train", "valid"):
        count = len((data / "raw" / "classes" / "label" / split).read_text().splitlines())
        labels = "".join(f"{place % 2}\n" for place in range(count))
        (data / "ranked" / "label" / f"{split}.label").write_text(labels)
    for language in ("aa", "bb"):
        shutil.copytree(data / "text", data / "corpora" / language)
    shutil.copy(data / "text" / "dict.txt", data / "corpora")
    return data


@pytest.mark.parametrize(
    ("folder", "words", "step"),
    [
        ("ranked", "--task sentence_ranking --criterion sentence_ranking --optimizer adam --lr 1e-3"
         " --num-classes 2 --max-positions 64 --separator-token 2 --batch-size 8",
         "fairseq's own (our step does not support the criterion)"),
        ("corpora", "--task multilingual_masked_lm --tokens-per-sample 32 --batch-size 4 --lr 1e-3",
         "without CUDA graphs, without padding"),
    ],
)  # fmt: skip
def test_its_other_tasks(
    others: Path, caplog: pytest.LogCaptureFixture, folder: str, words: str, step: str
) -> None:
    losses = []
    flags = "--dropout 0 --attention-dropout 0 --no-save --log-format simple --log-interval 1"
    for native in ([], ["--native"]):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            cli_runs.succeed("train", others / folder, *SMALL, *words.split(), *flags.split(),
                             *native)  # fmt: skip
        losses.append(re.findall(r"epoch \d+:.* (loss=\S+)", caplog.text))
        assert (f"step: {step}" in caplog.text) != bool(native)
    assert losses[0] == losses[1] and len(losses[0]) == 6
