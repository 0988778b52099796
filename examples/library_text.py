"""Write the source of Python's standard library as train.txt, valid.txt and test.txt, with one
source file per line.

A line consists of words, which BPE splits further. The words contain the layout: "▁" is a space and
"⏎" a line break. So `to_text` can restore the source code (with spaces for tabs).
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sysconfig
import tokenize
from pathlib import Path

# Many systems install Python without its tests, and packages are not part of the library. The last
# two folders contain generated tables and texts.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages",
            "encodings", "pydoc_data"}  # fmt: skip
HELD_OUT = {"test": 5, "valid": 2}  # percent of the files

SPACE, BREAK = "▁", "⏎"
# Line breaks with the indentation after them; a name or a number; punctuation; other spaces.
WORD = re.compile(r"\n[\n ]*| ?\w+| ?[^\w\s]+| +")


def to_words(text: str) -> str:
    """Return the words of a text on one line, with a space between them."""
    words = WORD.findall(text.expandtabs())
    return " ".join(word.replace(" ", SPACE).replace("\n", BREAK) for word in words)


def to_text(words: str) -> str:
    """Return the text of these words: the inverse of `to_words`."""
    return words.replace(" ", "").replace(SPACE, " ").replace(BREAK, "\n")


def split_of(name: str) -> str:
    """Return the split of a file. Only its name decides, so that every machine has the same."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100
    for split, percent in HELD_OUT.items():
        if number < percent:
            return split
        number -= percent
    return "train"


def sources(library: Path) -> dict[str, list[Path]]:
    """Return the files of each split in the order of their names.

    Raises:
        SystemExit: a split has no files.
    """
    splits: dict[str, list[Path]] = {"train": [], **{split: [] for split in HELD_OUT}}
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if not LEFT_OUT & set(name.parts):
            splits[split_of(name.as_posix())].append(path)
    if not all(splits.values()):
        raise SystemExit(
            f"{library} has too few .py files: this Python was installed without the source of its "
            "library; use another Python"
        )
    return splits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder for the text files")
    few = "N files for training, N / 10 for each other split  [all]"
    parser.add_argument("--files", type=int, metavar="N", help=few)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for split, paths in sources(Path(sysconfig.get_path("stdlib"))).items():
        if args.files is not None:
            paths = paths[: max(1, args.files if split == "train" else args.files // 10)]
        with (args.folder / f"{split}.txt").open("w", encoding="utf-8") as lines:
            for path in paths:
                with tokenize.open(path) as file:  # in the encoding that the file names
                    words = to_words(file.read())
                if words:
                    lines.write(words + "\n")


if __name__ == "__main__":
    main()
