"""Write the quickstart's sentence pairs: German number names and their English translation.

German writes a number below a million as one word, English as several. So the model must find the
parts of the word and reorder them (``siebenundvierzig`` is ``forty-seven``).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

from num2words import num2words

TEST_PAIRS = 1000
VALID_PAIRS = 300
MOST_PAIRS = 200_000

# Zero is three times as likely as any other digit. With uniform digits, nine of ten numbers would
# have six digits, and few would have several zeros: too few to learn "vierzig" or
# "fünfhunderttausend".
DIGITS = "000123456789"


def split_numbers(pairs: int, seed: int) -> dict[str, list[int]]:
    """Draw the numbers of each split: below a million, no number twice.

    Test and valid are the numbers that are drawn first. So they depend only on ``seed``, and not
    on the number of training pairs.
    """
    if not 0 < pairs <= MOST_PAIRS:
        raise SystemExit(f"--pairs must be between 1 and {MOST_PAIRS}, not {pairs}")
    held_out = TEST_PAIRS + VALID_PAIRS
    generator = random.Random(seed)
    drawn: dict[int, None] = {}  # an ordered set
    while len(drawn) < held_out + pairs:
        drawn[int("".join(generator.choices(DIGITS, k=6)))] = None
    numbers = list(drawn)
    return {
        "test": numbers[:TEST_PAIRS],
        "valid": numbers[TEST_PAIRS:held_out],
        "train": numbers[held_out:],
    }


def write_split(folder: Path, split: str, numbers: Sequence[int]) -> None:
    """Write ``<split>.de`` and ``<split>.en``, one number name per line."""
    for lang in ("de", "en"):
        lines = "".join(num2words(number, lang=lang) + "\n" for number in numbers)
        (folder / f"{split}.{lang}").write_text(lines, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder for the text files")
    parser.add_argument("--pairs", type=int, default=30_000, help="training pairs")
    parser.add_argument("--seed", type=int, default=1, help="seed of the split")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for split, numbers in split_numbers(args.pairs, args.seed).items():
        write_split(args.folder, split, numbers)


if __name__ == "__main__":
    main()
