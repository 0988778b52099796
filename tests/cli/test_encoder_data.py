"""lightseq-train refuses text to mask or to noise, and sentences with labels, in one sentence."""

from __future__ import annotations

import shutil
from pathlib import Path

import helpers.cli_runs as cli_runs
import pytest
from helpers.golden import matches, refusals

MASKED = [
    "--task", "masked_lm", "--arch", "ls_roberta_base", "--criterion", "ls_masked_lm",
    "--tokens-per-sample", "16",
]  # fmt: skip
NOISE = ["--task", "denoising", "--arch", "ls_bart_base"]
CLASSES = [
    "--task", "sentence_prediction", "--arch", "ls_roberta_base",
    "--criterion", "ls_sentence_prediction",
]  # fmt: skip


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of sentences with one of three classes, and with two numbers."""
    folder = tmp_path_factory.mktemp("sentences")
    for name in ("input0", "input1", "label"):
        words: list[str | Path] = []
        for split, count in (("train", 12), ("valid", 6)):
            lines = [f"c{i % 3}" if name == "label" else f"w{i} w{i % 4}" for i in range(count)]
            (folder / f"{name}.{split}").write_text("\n".join(lines) + "\n")
            words += [f"--{split}pref", folder / f"{name}.{split}"]
        cli_runs.succeed("preprocess", "--only-source", "--destdir", folder / "data" / name, *words)
    for split, count in (("train", 12), ("valid", 6)):
        (folder / "data" / "label" / f"{split}.label").write_text("0.5 -1\n" * count)
    return folder / "data"


def refused(data: Path, folder: Path, words: list[str], sentence: str) -> None:
    """Training must end with one sentence, and write nothing."""
    more = ["--cpu", "--max-update", "1", "--save-dir", folder / "run"]
    result = cli_runs.run("train", data, *words, *more)
    assert result.exit_code == 2, (result.output, result.exception)
    (error,) = (line for line in result.stderr.splitlines() if "error:" in line)
    assert matches(error, f"...{sentence}...")
    assert not (folder / "run").exists()


@pytest.mark.parametrize(("words", "sentence"), refusals(__file__, "test_encoder_data: text"))
def test_masked_text(text: Path, tmp_path: Path, words: str, sentence: str) -> None:
    refused(text, tmp_path, [*MASKED, *words.split()], sentence)


def test_text_for_masking_that_is_damaged_or_other(
    text: Path, sentences: Path, tmp_path: Path
) -> None:
    refused(sentences, tmp_path, MASKED, "contains sentences with labels (input0), but --task mask")
    data = shutil.copytree(text, tmp_path / "data")
    (data / "dict.txt").write_text("w0 1\nw1 1\n")
    refused(data, tmp_path, MASKED, "contains the token id")
    words = [line.split()[0] for line in (text / "dict.txt").read_text().splitlines()]
    (data / "dict.txt").write_text("".join(f"{word} 0\n" for word in words))
    refused(data, tmp_path, [*MASKED, "--freq-weighted-replacement"], "but all are 0 in dict.txt")
    (data / "valid.bin").write_bytes((text / "valid.bin").read_bytes()[:-2])
    refused(data, tmp_path, MASKED, "one of the files is truncated")


@pytest.mark.parametrize(("words", "sentence"), refusals(__file__, "test_encoder_data: noise"))
def test_noise(text: Path, tmp_path: Path, words: str, sentence: str) -> None:
    refused(text, tmp_path, [*NOISE, *words.split()], sentence)


def test_text_to_noise_that_is_damaged_or_other(
    text: Path, sentences: Path, tmp_path: Path
) -> None:
    refused(sentences, tmp_path, NOISE, "contains sentences with labels (input0), but --task denoi")
    languages = [*NOISE, "--task", "multilingual_denoising"]
    data = shutil.copytree(text, tmp_path / "data" / "de").parent
    refused(data, tmp_path, languages, "contains no dict.txt, but --task multilingual_denoising")
    (data / "dict.txt").write_text("w0 1\nw1 1\n")
    refused(data, tmp_path, languages, "contains the token id")
    shutil.copy(text / "dict.txt", data)
    (data / "de" / "valid.bin").unlink()
    refused(data, tmp_path, languages, "valid.idx has no .bin file")
    (data / "en").mkdir()
    refused(data, tmp_path, [*languages, "--disable-validation"], "en contains no train split")


@pytest.mark.parametrize(("words", "sentence"), refusals(__file__, "test_encoder_data: labels"))
def test_labels(sentences: Path, tmp_path: Path, words: str, sentence: str) -> None:
    refused(sentences, tmp_path, [*CLASSES, *words.split()], sentence)


def test_sentences_that_are_damaged_or_other(text: Path, sentences: Path, tmp_path: Path) -> None:
    words = [*CLASSES, "--num-classes", "3"]
    refused(text, tmp_path, words, "contains running text, and no input0/dict.txt, which --task s")
    data = shutil.copytree(sentences, tmp_path / "data")
    for ending in (".idx", ".bin"):
        shutil.copy(data / "input1" / f"valid{ending}", data / "label" / f"valid{ending}")
    refused(data, tmp_path, words, "valid has 2 words, but a label is one word")
    for ending in (".idx", ".bin"):
        shutil.copy(data / "label" / f"train{ending}", data / "label" / f"valid{ending}")
    refused(data, tmp_path, words, "valid has 6 sentences, but")
    for ending in (".idx", ".bin"):
        (data / "label" / f"valid{ending}").unlink()
    refused(data, tmp_path, words, "valid.idx, the labels, does not exist")
    numbers = [*CLASSES, "--num-classes", "2", "--regression-target"]
    (data / "label" / "train.label").unlink()
    refused(data, tmp_path, numbers, "train.label does not exist, from which --regression-target")
    (data / "label" / "dict.txt").unlink()
    refused(data, tmp_path, words, "contains no label/dict.txt")
