"""Write the quickstart's sentence pairs: German number names and their English translation.

German writes a number below a million as one word, English as many, so the model has to find the
words inside the word and to reorder them (``siebenundvierzig`` is ``forty-seven``).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

from num2words import num2words

LIMIT = 1_000_000
TEST_PAIRS = 1000
VALID_PAIRS = 300


def split_numbers(pairs: int, seed: int) -> dict[str, list[int]]:
    """Draw the numbers of each split; no number is in two splits.

    Test and valid are the first numbers of one shuffle, so they depend on ``seed`` alone and stay
    the same however many training pairs are asked for.
    """
    room = LIMIT - TEST_PAIRS - VALID_PAIRS
    if not 0 < pairs <= room:
        raise SystemExit(f"--pairs must be between 1 and {room}, not {pairs}")
    numbers = list(range(LIMIT))
    random.Random(seed).shuffle(numbers)
    held_out = TEST_PAIRS + VALID_PAIRS
    return {
        "test": numbers[:TEST_PAIRS],
        "valid": numbers[TEST_PAIRS:held_out],
        "train": numbers[held_out : held_out + pairs],
    }


def write_split(folder: Path, split: str, numbers: Sequence[int]) -> None:
    """Write ``<split>.de`` and ``<split>.en``, one number name a line."""
    for lang in ("de", "en"):
        lines = "".join(num2words(number, lang=lang) + "\n" for number in numbers)
        (folder / f"{split}.{lang}").write_text(lines, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the text files go")
    parser.add_argument("--pairs", type=int, default=30_000, help="training pairs")
    parser.add_argument("--seed", type=int, default=1, help="seed of the split")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for split, numbers in split_numbers(args.pairs, args.seed).items():
        write_split(args.folder, split, numbers)


if __name__ == "__main__":
    main()
