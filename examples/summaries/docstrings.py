"""Write the docstrings of Python's standard library as pairs of a text and its summary.

    python -m examples.summaries.docstrings FOLDER [--files N]

The summary of a docstring is its first sentence. The text is the name of the function or class, its
arguments, and the other sentences. FOLDER gets a text and a summary on each line of {train, valid,
test}.{text, summary}. For pre-training, train.all and valid.all have all docstrings of the training
and validation files, also those of one sentence. No summary is in two splits.
"""

from __future__ import annotations

import argparse
import ast
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from examples.library_text import sources

SENTENCE = re.compile(r"(.+?[.!])\s+(?=[A-Z])(.+)", re.DOTALL)
SUMMARY = range(3, 31)  # words
TEXT = 100  # words at most: the others are cut


class Docstring(NamedTuple):
    """A docstring: what it belongs to, its first sentence, and its other sentences."""

    name: str
    summary: str
    rest: str

    @property
    def text(self) -> str:
        """The text of a pair."""
        return _words(f"{self.name}: {self.rest}")

    @property
    def all(self) -> str:
        """The text of pre-training."""
        return _words(f"{self.name}: {self.summary} {self.rest}")

    def is_pair(self) -> bool:
        """Whether there is something to summarise, and a summary of the usual length."""
        return len(self.rest.split()) > 3 and len(self.summary.split()) in SUMMARY


def _words(text: str) -> str:
    return " ".join(text.split()[:TEXT])


def docstrings(code: str) -> Iterator[Docstring]:
    """The docstrings of the functions and classes of a file."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        found = " ".join((ast.get_docstring(node) or "").split())
        if not found:
            continue
        parts = SENTENCE.match(found)
        name = f"class {node.name}"
        if not isinstance(node, ast.ClassDef):
            name = f"{node.name}({', '.join(x.arg for x in node.args.args if x.arg != 'self')})"
        yield Docstring(name, *(parts.groups() if parts else (found, "")))


def splits(library: Path, files: int | None = None) -> dict[str, list[Docstring]]:
    """The docstrings of each split, without those whose summary a split before has.

    Args:
        files: the number of training files; N / 10 for each other split. None takes all.
    """
    paths, seen, found = sources(library), set[str](), {}
    for split in ("test", "valid", "train"):
        few = None if files is None else max(1, files if split == "train" else files // 10)
        of_split: list[Docstring] = []
        for path in paths[split][:few]:
            with tokenize.open(path) as file:  # in the encoding that the file names
                of_split += docstrings(file.read())
        found[split] = [each for each in of_split if each.summary.lower() not in seen]
        seen |= {each.summary.lower() for each in of_split}
    return found


def main() -> None:
    """Write the text; see the top of the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder for the text files")
    few = "N files for training, N / 10 for each other split  [all]"
    parser.add_argument("--files", type=int, metavar="N", help=few)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for split, found in splits(Path(sysconfig.get_path("stdlib")), args.files).items():
        pairs = [each for each in found if each.is_pair()]
        lines = {"text": [x.text for x in pairs], "summary": [x.summary for x in pairs]}
        if split != "test":
            lines["all"] = [each.all for each in found]
        for ending, each in lines.items():
            text = "".join(f"{line}\n" for line in each)
            (args.folder / f"{split}.{ending}").write_text(text, encoding="utf-8")
        print(f"{split}: {len(found)} docstrings, {len(pairs)} pairs")


if __name__ == "__main__":
    main()
