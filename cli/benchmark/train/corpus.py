"""The benchmark's sentence pairs, from a seeded random generator: the same on every machine.

Lengths (with ``</s>``) are WMT-like: source lengths are lognormal with mean 28 and sigma 0.55, from
2 to 200; a target length is the source length times a normal number with mean 1.03 and standard
deviation 0.15. Words are independent and follow Zipf's law over a joint dictionary. The code is
vectorised: a million pairs take seconds.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightseq_fairseq.checkpoints import files
from lightseq_fairseq.errors import UserError

SOURCE, TARGET = "en", "de"
VOCABULARY = 40_000  # including <s>, <pad>, </s> and <unk>, which fairseq puts first
SPECIALS, EOS = 4, 2
MEAN, SIGMA, SHORTEST, LONGEST = 28, 0.55, 2, 200
RATIO, RATIO_DEVIATION = 1.03, 0.15
PAIRS, VALID_PAIRS, SEED = 1_000_000, 1000, 1
MANIFEST = "corpus.json"

_QUANTILES = 1 << 22  # even the rarest word has ten of them
_TOKENS_AT_ONCE = 1 << 24
_INDEX_HEADER = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, 8)  # version 1, uint16


class Corpus(NamedTuple):
    """A corpus on disk: its folder, and the size of its training split (tokens with ``</s>``)."""

    folder: Path
    pairs: int
    vocabulary: int
    source_tokens: int
    target_tokens: int


def ensure(folder: Path, pairs: int = PAIRS, vocabulary: int = VOCABULARY) -> Corpus:
    """The corpus of ``pairs`` pairs and ``vocabulary`` words in ``folder``; written if missing.

    It is written beside ``folder``, and moved when complete: .bin and .idx in the format of
    fairseq's ``MMapIndexedDataset``, dictionaries, and a manifest.

    Raises:
        UserError: the folder holds something else, or cannot be written.
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with files.placed(folder) as part:
            part.mkdir()
            manifest = {"pairs": pairs, "vocabulary": vocabulary, **_write(part, pairs, vocabulary)}
            (part / MANIFEST).write_text(json.dumps(manifest) + "\n", encoding="utf-8")
    found = opened(folder)
    if (found.pairs, found.vocabulary) != (pairs, vocabulary):
        raise UserError(
            f"{folder} holds a corpus of {found.pairs} pairs and {found.vocabulary} words, not the "
            f"{pairs} and {vocabulary} of this run: name another folder with --corpus, or change "
            "--pairs and --vocabulary."
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
            f"{folder} holds something else than a corpus of lightseq-bench: name another folder "
            "with --corpus, or one that does not exist yet."
        ) from None


def lengths(pairs: int, rng: np.random.Generator) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Tokens of the sources and of the targets, each int32 [pairs]."""
    source = rng.lognormal(math.log(MEAN) - SIGMA**2 / 2, SIGMA, pairs)
    source = source.round().clip(SHORTEST, LONGEST)
    target = source * rng.normal(RATIO, RATIO_DEVIATION, pairs)
    target = target.round().clip(SHORTEST, LONGEST)
    return source.astype(np.int32), target.astype(np.int32)


def word_quantiles(vocabulary: int) -> NDArray[np.uint16]:
    """Words uint16 [2^22], each repeated in proportion to Zipf's law: a uniform random index gives
    a word with the right frequency."""
    cumulated = (1 / np.arange(1, vocabulary - SPECIALS + 1)).cumsum()
    places = (np.arange(_QUANTILES) + 0.5) / _QUANTILES * cumulated[-1]
    return (np.searchsorted(cumulated, places) + SPECIALS).astype(np.uint16)


def _write(folder: Path, pairs: int, vocabulary: int) -> dict[str, int]:
    write_dictionaries(folder, vocabulary)
    write_split(folder, "valid", VALID_PAIRS, vocabulary, SEED + 1)
    source_tokens, target_tokens = write_split(folder, "train", pairs, vocabulary, SEED)
    return {"source_tokens": source_tokens, "target_tokens": target_tokens}


def write_dictionaries(folder: Path, vocabulary: int) -> None:
    """Writes the joint dictionary, once for each side."""
    words = "".join(f"w{number} 1\n" for number in range(vocabulary - SPECIALS))
    for language in (SOURCE, TARGET):
        (folder / f"dict.{language}.txt").write_text(words, encoding="utf-8")


def write_split(
    folder: Path, split: str, pairs: int, vocabulary: int, seed: int
) -> tuple[int, int]:
    """Writes sentence pairs in fairseq's binary format; returns the tokens of both sides."""
    rng, quantiles = np.random.default_rng(seed), word_quantiles(vocabulary)
    source, target = lengths(pairs, rng)
    for language, sizes in ((SOURCE, source), (TARGET, target)):
        stem = folder / f"{split}.{SOURCE}-{TARGET}.{language}"
        with open(f"{stem}.bin", "wb") as file:
            for piece in np.array_split(sizes, math.ceil(sizes.sum() / _TOKENS_AT_ONCE)):
                ends = piece.cumsum(dtype=np.int64)
                tokens = quantiles[rng.integers(0, _QUANTILES, ends[-1], dtype=np.uint32)]
                tokens[ends - 1] = EOS
                tokens.tofile(file)
        starts = sizes.cumsum(dtype=np.int64) - sizes
        with open(f"{stem}.idx", "wb") as file:
            file.write(_INDEX_HEADER + struct.pack("<Q", pairs))
            sizes.tofile(file)
            (starts * quantiles.itemsize).tofile(file)
    return int(source.sum()), int(target.sum())
