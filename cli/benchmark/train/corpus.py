"""The benchmark's corpora, from a seeded random generator: the same on every machine.

Sentence pairs have WMT-like lengths (with ``</s>``): source lengths are lognormal with mean 28 and
sigma 0.55, from 2 to 200; a target length is the source length times a normal number with mean 1.03
and standard deviation 0.15. Verses are such pairs with a mean of 45 and sigma 0.45. Texts to
summarise have from 100 to 1024 tokens, 700 on average, and summaries from 20 to 140, 62 on average.
Running text has lines as long as paragraphs, each with a ``</s>``:
lognormal with mean 57 and sigma 1. In BERT's mix of lengths a line is a sample. With the ``<s>``
that the task adds, it has from 20 to 512 tokens and 250 on average: lognormal, and a sixth of the
samples is cut off at 512. Sentences with classes have from 10 to 128 tokens, 60 on average, and
one of three classes. Words are independent and follow Zipf's law over the dictionary. The code is
vectorised: a million pairs take seconds.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightseq_fairseq.base import files
from lightseq_fairseq.base.errors import UserError

SOURCE, TARGET = "en", "de"
VOCABULARY = 40_000  # including <s>, <pad>, </s> and <unk>, which fairseq puts first
TEXT_VOCABULARY = 50_257  # as many as GPT-2's, no multiple of 8
MASKED_VOCABULARY = 50_264  # RoBERTa's without <mask>, which fairseq's task adds
LABELS = 3  # classes of sentences
MASKED_SHARE = 0.15  # of all tokens; fairseq's default
# Length of a block of 512 tokens after BART's noise (30% in spans of 3.5 words on average, one mask
# for each span), divided by its length before.
NOISED_SHARE = 412 / 512
SPECIALS, EOS = 4, 2
RATIO, RATIO_DEVIATION = 1.03, 0.15
# TOKENS is a power of two, so all batches are full: 1024 batches of 32 blocks of 1024 tokens.
PAIRS, TOKENS = 1_000_000, 1 << 25
VALID_PAIRS, VALID_TOKENS, SEED = 1000, 1 << 16, 1
MANIFEST = "corpus.json"

_QUANTILES = 1 << 22  # even the rarest word of the default vocabularies has one
_TOKENS_AT_ONCE = 1 << 24
_DTYPES = {8: np.uint16, 4: np.int32}  # by their codes in the files


class Lines(NamedTuple):
    """Lengths of lines: lognormal with this mean and sigma, then limited."""

    mean: int
    sigma: float
    shortest: int
    longest: int

    def drawn(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """float64 [count]: lengths, which are whole numbers."""
        sizes = rng.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, count)
        return self.limited(sizes)

    def limited(self, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        return sizes.round().clip(self.shortest, self.longest)


PARAGRAPHS = Lines(57, 1.0, 1, 2000)
# Without the <s> that the tasks add to each line.
MIX = Lines(312, 0.9, 19, 511)
SENTENCES = Lines(65, 0.7, 9, 127)


class Sides(NamedTuple):
    """Lengths of sentence pairs.

    target: None: a target is as long as its source, times a normal number.
    """

    source: Lines
    target: Lines | None = None


SENTENCE_PAIRS = Sides(Lines(28, 0.55, 2, 200))
VERSES = Sides(Lines(45, 0.45, 4, 200))
# 15% of the texts are cut off.
SUMMARIES = Sides(Lines(740, 0.4, 100, 1024), Lines(62, 0.3, 20, 140))
LONGEST = SENTENCE_PAIRS.source.longest


class Corpus(NamedTuple):
    """A corpus on disk: its folder, and the size of its training split (tokens with ``</s>``).

    Running text has no pairs and no source tokens.
    """

    folder: Path
    pairs: int
    vocabulary: int
    source_tokens: int
    target_tokens: int

    @property
    def size(self) -> str:
        size = f"{self.pairs} pairs" if self.pairs else f"{self.target_tokens} tokens of text"
        return f"{size} and {self.vocabulary} words"


def ensure(
    folder: Path, pairs: int = PAIRS, vocabulary: int = VOCABULARY, sides: Sides = SENTENCE_PAIRS,
    option: str = "corpus",
) -> Corpus:  # fmt: skip
    """The corpus of ``pairs`` pairs and ``vocabulary`` words in ``folder``; written if missing.

    It is written beside ``folder``, and moved when complete: .bin and .idx in the format of
    fairseq's ``MMapIndexedDataset``, dictionaries, and a manifest.

    Raises:
        UserError: the folder holds something else, or cannot be written.
    """
    write = partial(_write_pairs, sides=sides)
    return _ensured(Corpus(folder, pairs, vocabulary, 0, 0), write, option, "pairs")


def ensure_text(
    folder: Path, tokens: int = TOKENS, vocabulary: int = TEXT_VOCABULARY,
    lines: Lines = PARAGRAPHS, option: str = "text", has_classes: bool = False,
) -> Corpus:  # fmt: skip
    """The text of so many tokens and words in ``folder``, see `ensure`.

    Args:
        option: the command's option for the folder, without "--", for the error message.
        has_classes: each line is a sentence with a class, in the folders "input0" and "label".
    """
    write = partial(_write_text, lines=lines, has_classes=has_classes)
    return _ensured(Corpus(folder, 0, vocabulary, 0, tokens), write, option, "tokens")


def _ensured(
    wanted: Corpus, write: Callable[[Path, Corpus], Corpus], where: str, how_much: str
) -> Corpus:
    """The corpus of the size of ``wanted``, by ``write`` if its folder is missing.

    Args:
        write: (folder to write to, wanted) -> the corpus with all its sizes.
        where, how_much: options of the command, for the error message.
    """
    folder = wanted.folder
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with files.placed(folder) as part:
            part.mkdir()
            manifest = write(part, wanted)._asdict()
            del manifest["folder"]
            (part / MANIFEST).write_text(json.dumps(manifest) + "\n", encoding="utf-8")
    found = opened(folder)
    if found.size != wanted.size:
        raise UserError(
            f"{folder} contains {found.size}, but this run needs {wanted.size}: choose another "
            f"folder with --{where}, or change --{how_much} and --vocabulary."
        )
    return found


def opened(folder: Path) -> Corpus:
    """The corpus in ``folder``.

    Raises:
        UserError: the folder holds something else.
    """
    try:
        return Corpus(folder, **json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise UserError(
            f"{folder} does not contain a corpus of lightseq-bench: choose another folder with "
            "--corpus (sentence pairs), --text (running text), --masked (text for RoBERTa) or "
            "--seq2seq (for BART, NLLB and Marian), or one that does not exist yet."
        ) from None


def lengths(
    pairs: int, rng: np.random.Generator, sides: Sides = SENTENCE_PAIRS
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Tokens of the sources and of the targets, each int32 [pairs]."""
    source = sides.source.drawn(pairs, rng)
    if sides.target is None:
        target = sides.source.limited(source * rng.normal(RATIO, RATIO_DEVIATION, pairs))
    else:
        target = sides.target.drawn(pairs, rng)
    return source.astype(np.int32), target.astype(np.int32)


def line_lengths(
    tokens: int, rng: np.random.Generator, lines: Lines = PARAGRAPHS
) -> NDArray[np.int32]:
    """Tokens of the lines of a text, int32 [lines]; their sum is ``tokens``."""
    # Twice the expected number of lines, so that they have more than ``tokens`` tokens.
    sizes = lines.drawn(10 + 2 * tokens // lines.mean, rng).astype(np.int32)
    ends = sizes.cumsum(dtype=np.int64)
    last = int(np.searchsorted(ends, tokens))
    sizes[last] -= ends[last] - tokens
    return sizes[: last + 1]


def word_quantiles(vocabulary: int) -> NDArray[np.uint16] | NDArray[np.int32]:
    """Words [2^22], each repeated in proportion to Zipf's law: a uniform random index gives a word
    with the right frequency. uint16 if all words fit into it, else int32, as in fairseq."""
    cumulated = (1 / np.arange(1, vocabulary - SPECIALS + 1)).cumsum()
    places = (np.arange(_QUANTILES) + 0.5) / _QUANTILES * cumulated[-1]
    words = np.searchsorted(cumulated, places) + SPECIALS
    return words.astype(np.uint16 if vocabulary < 65_500 else np.int32)


def _write_pairs(folder: Path, wanted: Corpus, sides: Sides) -> Corpus:
    write_dictionaries(folder, wanted.vocabulary)
    write_split(folder, "valid", VALID_PAIRS, wanted.vocabulary, SEED + 1, sides)
    source, target = write_split(folder, "train", wanted.pairs, wanted.vocabulary, SEED, sides)
    return wanted._replace(source_tokens=source, target_tokens=target)


def _write_text(folder: Path, wanted: Corpus, lines: Lines, has_classes: bool) -> Corpus:
    texts = {"": wanted.vocabulary}
    if has_classes:
        texts = {"label": SPECIALS + LABELS, "input0": wanted.vocabulary}
    splits = ("valid", VALID_TOKENS, SEED + 1), ("train", wanted.target_tokens, SEED)
    for name, vocabulary in texts.items():
        place, quantiles = folder / name, word_quantiles(vocabulary)
        place.mkdir(exist_ok=True)
        write_dictionary(place / "dict.txt", vocabulary)
        for split, tokens, seed in splits:
            rng = np.random.default_rng(seed)
            sizes = line_lengths(tokens, rng, lines)
            if name == "label":
                sizes = np.full_like(sizes, 2)  # class and </s>
            _write_lines(place / split, sizes, quantiles, rng)
    return wanted


def write_dictionaries(folder: Path, vocabulary: int) -> None:
    """Writes the joint dictionary, once for each side."""
    for language in (SOURCE, TARGET):
        write_dictionary(folder / f"dict.{language}.txt", vocabulary)


def write_dictionary(path: Path, vocabulary: int) -> None:
    words = "".join(f"w{number} 1\n" for number in range(vocabulary - SPECIALS))
    path.write_text(words, encoding="utf-8")


def write_split(
    folder: Path, split: str, pairs: int, vocabulary: int, seed: int,
    sides: Sides = SENTENCE_PAIRS,
) -> tuple[int, int]:  # fmt: skip
    """Writes sentence pairs in fairseq's binary format; returns the tokens of both sides."""
    rng, quantiles = np.random.default_rng(seed), word_quantiles(vocabulary)
    source, target = lengths(pairs, rng, sides)
    for language, sizes in ((SOURCE, source), (TARGET, target)):
        _write_lines(folder / f"{split}.{SOURCE}-{TARGET}.{language}", sizes, quantiles, rng)
    return int(source.sum()), int(target.sum())


def _write_lines(
    stem: Path, sizes: NDArray[np.int32], quantiles: NDArray[Any], rng: np.random.Generator
) -> None:
    """Writes lines of these sizes, each of random words and ``</s>``, as ``stem``.bin and .idx."""
    with open(f"{stem}.bin", "wb") as file:
        for piece in np.array_split(sizes, math.ceil(sizes.sum() / _TOKENS_AT_ONCE)):
            ends = piece.cumsum(dtype=np.int64)
            tokens = quantiles[rng.integers(0, _QUANTILES, ends[-1], dtype=np.uint32)]
            tokens[ends - 1] = EOS
            tokens.tofile(file)
    starts = sizes.cumsum(dtype=np.int64) - sizes
    with open(f"{stem}.idx", "wb") as file:
        code = next(code for code, dtype in _DTYPES.items() if dtype == quantiles.dtype)
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 1, code, len(sizes)))  # version 1
        sizes.tofile(file)
        (starts * quantiles.itemsize).tofile(file)
