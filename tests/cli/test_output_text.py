"""--output-text: the translations as plain text, one in a line, in the order of the input."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.cli_runs import SMALL, run, succeed

SEARCH = ["--beam", "3", "--nbest", "2", "--max-len-b", "6", "--cpu"]


@pytest.fixture(scope="module")
def trained(data: Path) -> Path:
    folder = data.parent / "run"
    succeed("train", data, "--arch", "ls_transformer_tiny", *SMALL, "--save-dir", folder)
    return folder


def best(output: str) -> dict[int, str]:
    """The first D- line of each number."""
    found: dict[int, str] = {}
    for number, text in re.findall(r"^D-(\d+)\t.*?\t(.*)$", output, re.M):
        found.setdefault(int(number), text)
    return found


@pytest.mark.parametrize("own", [[], ["--native"], ["--quiet"], ["--batch-size", "1"]], ids=str)
def test_of_a_test_set(data: Path, trained: Path, tmp_path: Path, own: list[str]) -> None:
    words = [data, "--path", trained, *SEARCH, *(own or ["--max-tokens", "100"])]
    said = succeed("generate", *words, "--output-text", tmp_path / "texts")
    lines = (tmp_path / "texts").read_text().split("\n")
    expected = best(said if "--quiet" not in own else succeed("generate", *words[:-1]))
    sentences = (data.parent / "text" / "test.de").read_text().count("\n")
    assert lines == [*(expected[number] for number in range(sentences)), ""]


def test_a_skipped_sentence_is_an_empty_line(data: Path, trained: Path, tmp_path: Path) -> None:
    source = (data.parent / "text" / "test.de").read_text().splitlines()
    longest = max(len(line.split()) for line in source)
    words = [data, "--path", trained, *SEARCH, "--skip-invalid-size-inputs-valid-test",
             "--max-source-positions", str(longest)]  # fmt: skip
    expected = best(succeed("generate", *words, "--output-text", tmp_path / "texts"))
    lines = (tmp_path / "texts").read_text().splitlines()
    assert 0 < len(expected) < len(source)
    assert lines == [expected.get(number, "") for number in range(max(expected) + 1)]


@pytest.mark.parametrize("own", [[], ["--native"], ["--buffer-size", "4"]], ids=str)
def test_of_lines(data: Path, trained: Path, tmp_path: Path, own: list[str]) -> None:
    source = data.parent / "text" / "test.de"
    words = [data, "--path", trained, *SEARCH, "--input", source, "-s", "de", "-t", "en", *own]
    said = succeed("interactive", *words, "--output-text", tmp_path / "texts")
    expected = best(said)
    assert (tmp_path / "texts").read_text() == "".join(
        f"{expected[number]}\n" for number in range(len(expected))
    )


def test_a_file_that_cannot_be_written(data: Path, trained: Path, tmp_path: Path) -> None:
    for command in ("generate", "interactive"):
        words = [data, "--path", trained, *SEARCH, "--input", data.parent / "text" / "test.de"]
        words = words if command == "interactive" else words[:-2]
        place = tmp_path / "no" / "such"
        result = run(command, *words, "--output-text", place)
        assert result.exit_code == 2, result.output
        assert f"Cannot write {place} (No such file" in result.stderr
