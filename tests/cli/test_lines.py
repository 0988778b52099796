"""A line of text ends at a line feed, in all commands; a carriage return within it is a space."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import forked_commands
from helpers.cli_runs import SMALL, run, succeed

# isort: split
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, data_utils

from lightseq_fairseq import Translator

LANGUAGES = ("aa", "bb")
COUNT = 40
RETURNS = {"aa": 4, "bb": 9}  # language -> number of the line with a carriage return


def write_text(folder: Path, between: str = " ", end: str = "\n") -> Path:
    """Writes train.aa and train.bb; ``between`` replaces a space of one line of each."""
    source = random.Random(2)
    folder.mkdir()
    for language in LANGUAGES:
        lines = [
            " ".join(f"{language}{source.randrange(9)}" for _ in range(source.randint(3, 9)))
            for _ in range(COUNT)
        ]
        number = RETURNS[language] - 1
        lines[number] = lines[number].replace(" ", between, 1)
        text = "".join(line + end for line in lines)
        (folder / f"train.{language}").write_bytes(text.encode())
    return folder


def command(text: Path, *words: str | Path) -> list[str | Path]:
    prefixes: list[str | Path] = ["--trainpref", text / "train", "--validpref", text / "train"]
    return ["-s", "aa", "-t", "bb", *prefixes, *words]


def sides(folder: Path, form: str) -> list[list[list[int]]]:
    """The numbers of all tokens of both languages."""
    found = []
    for language in LANGUAGES:
        words = Dictionary.load(str(folder / f"dict.{language}.txt"))
        side = data_utils.load_indexed_dataset(f"{folder}/train.aa-bb.{language}", words, form)
        found.append([side[number].tolist() for number in range(len(side))])
    return found


@pytest.mark.parametrize("workers", ["1", "3"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_preprocess_reads_a_return_as_a_space(tmp_path: Path, workers: str, end: str) -> None:
    found = []
    for name, between in (("space", " "), ("return", "\r")):
        text, data = write_text(tmp_path / name, between, end), tmp_path / f"{name}-bin"
        result = run("preprocess", *command(text, "--destdir", data, "--workers", workers))
        assert result.exit_code == 0, (result.output, result.exception)
        for language, number in RETURNS.items():
            told = f"note: Line {number} of {text}/train.{language} contains a carriage return"
            assert (told in result.stderr) == (between == "\r")
        words = [(data / f"dict.{language}.txt").read_text() for language in LANGUAGES]
        found.append((words, sides(data, "mmap")))
    assert found[0] == found[1]
    assert [len(side) for side in found[1][1]] == [COUNT, COUNT]


def test_text_is_trained_on_as_preprocess_reads_it(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text", "\r")
    for form in ("mmap", "raw"):
        succeed("preprocess", *command(text, "--destdir", tmp_path / form, "--dataset-impl", form))
    assert sides(tmp_path / "raw", "raw") == sides(tmp_path / "mmap", "mmap")
    weights = []
    for form in ("mmap", "raw"):
        saved = tmp_path / f"{form}-saved"
        succeed("train", tmp_path / form, "--arch", "ls_transformer_tiny", *SMALL,
                "--dataset-impl", form, "--save-dir", saved)  # fmt: skip
        file = checkpoint_utils.load_checkpoint_to_cpu(str(saved / "checkpoint_last.pt"))
        weights.append(file["model"])
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("case", ["sides", "alignments", "second validation"])
def test_files_of_different_lengths_are_refused_before_anything_is_written(
    tmp_path: Path, case: str
) -> None:
    text = write_text(tmp_path / "text", "\r")
    words = command(text, "--destdir", tmp_path / "bin")
    longer = text / "train.bb"
    if case == "alignments":
        words += ["--align-suffix", "align"]
        longer = text / "train.align"
        longer.write_text("0-0\n" * COUNT)
    elif case == "second validation":
        for language in LANGUAGES:
            (text / f"more.{language}").write_text("a\n" * COUNT)
        words += ["--validpref", f"{text / 'train'},{text / 'more'}"]
        longer = text / "more.bb"
    with longer.open("a") as file:
        file.write("one more")
    result = run("preprocess", *words)
    assert result.exit_code == 2, (result.output, result.exception)
    assert f"{longer} has {COUNT + 1} lines: line n of each file must" in result.stderr
    assert not (tmp_path / "bin").exists()


@pytest.mark.parametrize("more", [[], ["--only-source"]])
def test_an_empty_file_is_refused(tmp_path: Path, more: list[str]) -> None:
    text = write_text(tmp_path / "text", "\r")
    (text / "train.aa").write_text("")
    result = run("preprocess", *command(text, "--destdir", tmp_path / "bin", *more))
    assert result.exit_code == 2
    assert f"error: {text}/train.aa is empty: name a file with at least" in result.stderr
    assert not (tmp_path / "bin").exists()


def test_a_dictionary_of_alignments_needs_text_without_returns(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text", "\r")
    (text / "align").write_text("0-0\n" * COUNT)
    result = run("preprocess", *command(text, "--destdir", tmp_path / "bin", "--alignfile",
                                        text / "align"))  # fmt: skip
    assert result.exit_code == 2
    assert f"Line 4 of {text}/train.aa contains a carriage return" in result.stderr
    assert "--alignfile cannot be used with it" in result.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    write_text(place / "text")
    succeed("preprocess", *command(place / "text", "--destdir", place / "data"))
    limits = ("--max-source-positions", "20", "--max-target-positions", "20")
    succeed("train", place / "data", "--arch", "ls_transformer_tiny", *SMALL, *limits,
            "--save-dir", place)  # fmt: skip
    return place


@pytest.mark.parametrize("native", [False, True])
def test_interactive_reads_the_same_lines_from_a_file_and_a_pipe(place: Path, native: bool) -> None:
    (place / "input").write_bytes(b"aa1 aa2\raa3\naa4\r\naa5\n")
    words = [str(place / "data"), "--path", str(place / "checkpoint_last.pt"), "--cpu",
             "--max-len-b", "3", *["--native"] * native]  # fmt: skip
    from_file = succeed("interactive", *words, "--input", place / "input")
    python = [forked_commands.python(), "-m", "lightseq_fairseq.cli.interactive", *words]
    with (place / "input").open("rb") as pipe:
        done = subprocess.run(python, stdin=pipe, capture_output=True, text=True, timeout=100)
    for printed in (from_file, done.stdout):
        found = re.findall(r"^S-(\d)\t(.*)$", printed, re.MULTILINE)
        assert found == [("0", "aa1 aa2 aa3"), ("1", "aa4"), ("2", "aa5")]


def test_line_breaks_within_a_sentence_are_spaces(place: Path) -> None:
    translator = Translator.from_pretrained(place, place / "data", cpu=True)
    found = translator.translate(["aa1 aa2 aa3", "aa1\raa2\naa3"])
    assert found[0].hypotheses == found[1].hypotheses and found[1].source == "aa1 aa2 aa3"
