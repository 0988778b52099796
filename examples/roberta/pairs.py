"""Write the lines of pre-training and the pairs of the task from text that BPE has split.

    python -m examples.roberta.pairs FOLDER

FOLDER has the captions as SPLIT.en and SPLIT.de, and the standard library as SPLIT.py. Written are
masked.SPLIT, the lines of pre-training, and SPLIT.input0, SPLIT.input1 and SPLIT.label, the pairs.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

SPLITS = "train", "valid", "test"
# fairseq's task sentence_prediction puts these tokens between the two sentences of a pair.
BETWEEN = "</s> </s>"
CODE_TOKENS = 64  # of a line of source code; a pair of captions has about 30

Pair = tuple[str, str, int]  # English, German, 1 if they belong together


def blocks(file: str) -> Iterator[str]:
    """Yield the tokens of a file in lines of `CODE_TOKENS`."""
    tokens = file.split()
    for start in range(0, len(tokens), CODE_TOKENS):
        yield " ".join(tokens[start : start + CODE_TOKENS])


def others(german: list[str], seed: int) -> list[str]:
    """Return for each picture the German caption of another one.

    The other picture is the next one in a circle of all pictures. If it has the same caption, the
    picture after it is taken. So nearly every caption is used once.

    Raises:
        SystemExit: all captions are the same.
    """
    if len(set(german)) < 2:
        raise SystemExit("all German captions are the same: use captions of different pictures")
    circle = list(range(len(german)))
    random.Random(seed).shuffle(circle)
    found = {}
    for place, picture in enumerate(circle):
        later = (german[circle[(place + n) % len(circle)]] for n in range(1, len(circle)))
        found[picture] = next(caption for caption in later if caption != german[picture])
    return [found[picture] for picture in range(len(german))]


def pairs(english: list[str], german: list[str], seed: int) -> list[Pair]:
    """Return two pairs of each English caption: with its translation, and with another caption."""
    wrong = others(german, seed)
    return [
        pair
        for source, right, other in zip(english, german, wrong)
        for pair in ((source, right, 1), (source, other, 0))
    ]


def write(path: Path, lines: Iterator[str] | list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the text")
    folder = parser.parse_args().folder

    def lines(split: str, kind: str) -> list[str]:
        return (folder / f"{split}.{kind}").read_text(encoding="utf-8").splitlines()

    for seed, split in enumerate(SPLITS, 1):
        english, german = lines(split, "en"), lines(split, "de")
        captions = [f"{a} {BETWEEN} {b}" for a, b in zip(english, german)]
        code = [block for file in lines(split, "py") for block in blocks(file)]
        write(folder / f"masked.{split}", [*captions, *code])
        columns = zip(*pairs(english, german, seed))
        for kind, column in zip(("input0", "input1", "label"), columns):
            write(folder / f"{split}.{kind}", map(str, column))


if __name__ == "__main__":
    main()
