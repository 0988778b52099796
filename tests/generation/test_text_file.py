"""lightseq-generate --input: text files of any size, resumed after a kill, by several processes."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from helpers.cli_runs import SMALL, binarise, run, succeed

from lightseq_fairseq.cli.translate import sentences

FLAGS = shlex.split("--cpu --beam 2 --max-len-b 5 --buffer-size 4")
LINES = [f"w{n % 7} w{n % 5} w{n % 3}" for n in range(18)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a checkpoint and a text file."""
    place = tmp_path_factory.mktemp("place")
    binarise(place)
    succeed("train", place / "data", "--arch", "ls_transformer_tiny", *SMALL, "--save-dir", place)
    (place / "in").write_text("".join(f"{line}\n" for line in LINES))
    return place


@pytest.fixture(scope="module")
def expected(place: Path) -> str:
    """What lightseq-interactive writes."""
    words = "--path", place / "checkpoint_last.pt", "--input", place / "in", *FLAGS
    succeed("interactive", place / "data", *words, "--output-text", place / "expected")
    return (place / "expected").read_text()


@pytest.fixture(name="read")
def counted_lines(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of lines of each block that is translated."""
    seen: list[int] = []
    translate = sentences.Search.translate

    def counted(self: Any, lines: Any, unknown: Any) -> Any:
        seen.append(len(lines))
        return translate(self, lines, unknown)

    monkeypatch.setattr(sentences.Search, "translate", counted)
    return seen


def generate(place: Path, out: Path, *words: str | Path) -> Result:
    given = "--path", place / "checkpoint_last.pt", "--input", place / "in", "--output-text", out
    return run("generate", place / "data", *given, *FLAGS, *words)


def test_a_text_file(place: Path, expected: str, tmp_path: Path, read: list[int]) -> None:
    result = generate(place, tmp_path / "out")
    assert result.exit_code == 0, (result.output, result.exception)
    assert (tmp_path / "out").read_text() == expected and expected.count("\n") == len(LINES)
    assert read == [4, 4, 4, 4, 2] and os.listdir(tmp_path) == ["out"]
    assert "D-0" not in result.output


@pytest.mark.parametrize("stopped", ["within a block", "within a line", "at the end"])
def test_the_same_command_resumes(
    place: Path, expected: str, tmp_path: Path, read: list[int], stopped: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Lines that are there are neither lost nor translated again."""
    out, translate = tmp_path / "out", sentences.Search.translate

    def killed(self: Any, lines: Any, unknown: Any) -> Any:
        if len(read) == 2:
            raise KeyboardInterrupt
        return translate(self, lines, unknown)

    with monkeypatch.context() as patched:
        patched.setattr(sentences.Search, "translate", killed)
        assert generate(place, out).exit_code != 0
    part = tmp_path / "out.unfinished" / "0-of-1"
    lines = expected.splitlines(keepends=True)
    assert part.read_text() == "".join(lines[:8]) and not out.exists()
    rest = {"within a block": lines[8:10], "within a line": [*lines[8:11], "half"]}
    with part.open("a") as file:
        file.writelines(rest.get(stopped, lines[8:]))
    read.clear()
    result = generate(place, out)
    assert result.exit_code == 0, (result.output, result.exception)
    assert out.read_text() == expected and os.listdir(tmp_path) == ["out"]
    assert read == ([] if stopped == "at the end" else [4, 4, 2])


def test_several_processes(
    place: Path, expected: str, tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun starts them; the last one to end joins the parts."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank, blocks in ((2, [4]), (0, [4, 4]), (1, [4, 2])):
        assert not (tmp_path / "out").exists()
        monkeypatch.setenv("RANK", str(rank))
        read.clear()
        assert generate(place, tmp_path / "out").exit_code == 0
        assert read == blocks
    assert (tmp_path / "out").read_text() == expected and os.listdir(tmp_path) == ["out"]


def test_an_empty_file(place: Path, tmp_path: Path) -> None:
    """A script that translates many files goes on: the result is empty, and a note says why."""
    (tmp_path / "empty").touch()
    words = place / "data", "--path", place / "checkpoint_last.pt", "--input", tmp_path / "empty"
    for command in ("generate", "interactive"):
        result = run(command, *words, *FLAGS, "--output-text", tmp_path / command)
        assert result.exit_code == 0, (result.output, result.exception)
        assert f"note: {tmp_path}/empty is empty, so there is nothing to do.\n" in result.stderr
        assert "sentences/s" not in result.stderr and (tmp_path / command).read_text() == ""
    assert sorted(os.listdir(tmp_path)) == ["empty", "generate", "interactive"]


def test_an_unfinished_translation_of_another_command(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    folder = tmp_path / "out.unfinished"
    folder.mkdir()
    (folder / "command.json").write_text("{}\n")
    (folder / "0-of-1").write_text("a line\n")
    result = generate(place, out)
    assert result.exit_code == 2 and "has the unfinished translation of another" in result.output
    assert sorted(os.listdir(folder)) == ["0-of-1", "command.json"]


@pytest.mark.parametrize("before", [0, 4])
def test_the_command_that_an_error_advises_resumes(
    place: Path, tmp_path: Path, read: list[int], before: int
) -> None:
    """A line is too long, in the first block or in the second."""
    text = [*LINES[:before], "w1 " * 2000, *LINES[before:7]]
    (tmp_path / "in").write_text("".join(f"{line}\n" for line in text))
    out, given = tmp_path / "out", ("--input", tmp_path / "in")
    result = generate(place, out, *given)
    skip = "--skip-invalid-size-inputs-valid-test"
    assert result.exit_code == 2 and skip in result.output
    result = generate(place, out, *given, skip)
    assert result.exit_code == 0, (result.output, result.exception)
    assert out.read_text().splitlines().index("") == before
    assert read == [4, 4, 4] and sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_a_command_replaces_another_that_has_translated_nothing(
    place: Path, expected: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = generate(
        place, out, "--lenpen", "2", "--bpe", "sentencepiece", "--sentencepiece-model", "gone"
    )
    assert result.exit_code == 2 and "gone" in result.output
    assert generate(place, out).exit_code == 0
    assert out.read_text() == expected and os.listdir(tmp_path) == ["out"]


def test_what_is_refused(place: Path, tmp_path: Path) -> None:
    checkpoint = place / "checkpoint_last.pt"
    words = place / "data", "--path", checkpoint, "--input", place / "in"
    for more in ((), ("--output-text", tmp_path / "out", "--output", tmp_path / "more")):
        result = run("generate", *words, *more)
        assert result.exit_code == 2 and "into the file of --output-text" in result.output
    words = place / "data", "--path", checkpoint, "--output-text", tmp_path / "out"
    result = run("generate", *words, "--input", tmp_path / "missing")
    sentence = f"lightseq-generate: error: {tmp_path}/missing cannot be read: No such"
    assert result.exit_code == 2 and sentence in result.output
    assert not os.listdir(tmp_path)
