"""Checks of binarised sentences before fairseq reads them: complete files, tokens in the
dictionary.

fairseq maps these files without a check. A truncated file, or one binarised with a larger
dictionary, would cause a traceback, a device-side assertion on the GPU, or wrong words.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

import numpy as np

from lightseq_fairseq.base.errors import UserError

_AGAIN = "binarise it again with lightseq-preprocess"
# Tokens per block of a check; and the number of blocks sampled from a large file.
_BLOCK = 1 << 17
_SAMPLE = 32
# fairseq's codes of integer types in index files.
_TYPES: dict[int, type[np.integer]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16,
    9: np.uint32, 10: np.uint64,
}  # fmt: skip
_OF_MMAP, _OF_LEGACY = b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00"


class BinarisedSentences(NamedTuple):
    """One side (language) of a split, memory-mapped.

    Attributes:
        path: path of the files without ``.bin`` and ``.idx``.
        lengths: int32 or int64 [N], tokens of each sentence.
        tokens: an integer type [T], all sentences concatenated.
        first_id: the number that stands for the dictionary's first symbol: 0, or 1 in the older
            format.
    """

    path: str
    lengths: np.ndarray
    tokens: np.ndarray
    first_id: int


class _Index(NamedTuple):
    """Contents of a ``.idx`` file; ``starts`` of sentences are in units of ``unit`` bytes."""

    lengths: np.ndarray
    starts: np.ndarray
    unit: int
    dtype: type[np.integer]
    first_id: int


def find(path: str, implementation: str | None) -> BinarisedSentences | None:
    """The sentences in ``path.bin`` and ``path.idx``; None if there are none, or in another format.

    Reads only the index. Source: ``fairseq.data.indexed_dataset``.

    Args:
        implementation: value of --dataset-impl; None: determined from the index.

    Raises:
        UserError: a file is missing, damaged or empty, or the two files do not match.
    """
    if implementation not in (None, "mmap", "lazy", "cached"):
        return None
    there = [os.path.isfile(path + ending) for ending in (".idx", ".bin")]
    if not any(there):
        return None
    if not all(there):
        have, lack = (".idx", ".bin") if there[0] else (".bin", ".idx")
        raise UserError(f"{path}{have} has no {lack} file beside it: {_AGAIN}.")
    with open(f"{path}.idx", "rb") as file:
        magic = file.read(len(_OF_MMAP))
    if magic.startswith(b"HUFFIDX"):
        return None
    is_legacy = magic.startswith(_OF_LEGACY)
    if magic != _OF_MMAP and not is_legacy:
        raise UserError(f"{path}.idx is damaged, or is not a file of fairseq: {_AGAIN}.")
    if implementation is not None and is_legacy == (implementation == "mmap"):
        raise UserError(
            f"{path}.idx was not written for --dataset-impl {implementation}: remove that flag."
        )
    index = (_legacy_index if is_legacy else _mmap_index)(_mapped(f"{path}.idx"))
    end = None if index is None else _end(index)
    if index is None or end is None:
        raise UserError(f"{path}.idx is damaged: {_AGAIN}.")
    size = os.path.getsize(f"{path}.bin")
    if size != end:
        raise UserError(
            f"{path}.bin has {size} bytes, but {path}.idx describes {end}: one of the files is "
            f"truncated, or they belong to different texts; {_AGAIN}."
        )
    if size == 0:
        raise UserError(f"{path}.bin is empty: {_AGAIN}.")
    return BinarisedSentences(
        path, index.lengths, _mapped(f"{path}.bin").view(index.dtype), index.first_id
    )


def _mapped(path: str) -> np.ndarray:
    """The bytes of a file, memory-mapped; numpy cannot map an empty file."""
    if os.path.getsize(path) == 0:
        return np.empty(0, np.uint8)
    return np.memmap(path, mode="r").view(np.ndarray)


def _mmap_index(content: np.ndarray) -> _Index | None:
    """Parses the index of --dataset-impl mmap; None if it is invalid."""
    head = len(_OF_MMAP) + struct.calcsize("<QBQ")
    if len(content) < head:
        return None
    version, code, count = struct.unpack("<QBQ", content[len(_OF_MMAP) : head].tobytes())
    dtype = _TYPES.get(code)
    if version != 1 or dtype is None or len(content) != head + 12 * count:
        return None
    lengths, starts = np.split(content[head:], [4 * count])
    return _Index(lengths.view(np.int32), starts.view(np.int64), 1, dtype, 0)


def _legacy_index(content: np.ndarray) -> _Index | None:
    """Parses the index of --dataset-impl lazy and cached; None if it is invalid."""
    head = len(_OF_LEGACY) + struct.calcsize("<QQQQQ")
    if len(content) < head:
        return None
    version, code, width, count, sizes = struct.unpack(
        "<QQQQQ", content[len(_OF_LEGACY) : head].tobytes()
    )
    dtype = _TYPES.get(code)
    if (
        version != 1
        or dtype is None
        or dtype().itemsize != width
        or len(content) != head + 8 * (2 * (count + 1) + sizes)
    ):
        return None
    dimensions, offsets, lengths = np.split(
        content[head:].view(np.int64), [count + 1, 2 * (count + 1)]
    )
    if sizes != count or (dimensions != np.arange(count + 1)).any() or len(offsets) == 0:
        return None
    return _Index(lengths, offsets[:-1], width, dtype, 1)


def _end(index: _Index) -> int | None:
    """Bytes of all sentences, which fairseq writes contiguously; None if they are not."""
    end, width = 0, index.dtype().itemsize
    for first in range(0, len(index.lengths), _BLOCK):
        sizes = index.lengths[first : first + _BLOCK].astype(np.int64) * width
        ends = end + sizes.cumsum()
        starts = index.starts[first : first + _BLOCK]
        if sizes.min() < 0 or (starts * index.unit != ends - sizes).any():
            return None
        end = int(ends[-1])
    return end


def check_words(sentences: BinarisedSentences, words: int, everywhere: bool) -> None:
    """Checks that all tokens are in a dictionary of ``words`` symbols.

    Args:
        everywhere: check all tokens, which takes a tenth of the time in which fairseq reads the
            file; otherwise check a sample of a large file.

    Raises:
        UserError: a token is not in the dictionary; names the first such sentence that was found.
    """
    tokens, lowest = sentences.tokens, sentences.first_id
    step = _BLOCK if everywhere else max(_BLOCK, len(tokens) // _SAMPLE)
    for first in range(0, len(tokens), step):
        block = tokens[first : first + _BLOCK]
        if block.min() < lowest or block.max() >= lowest + words:
            place = int(np.argmax((block < lowest) | (block >= lowest + words)))
            sentence = sentences.lengths.cumsum(dtype=np.int64).searchsorted(first + place, "right")
            raise UserError(
                f"Sentence {sentence} (counted from 0) of {sentences.path}.bin contains the token "
                f"id {int(block[place]) - lowest}, but the dictionary has {words} words: {_AGAIN} "
                "and this dictionary (--srcdict, --tgtdict)."
            )
