"""Sentences as arrays, and the function that fills the block of a packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightseq_fairseq.memory.packing import (
    Bucket,
    Granularity,
    Layout,
    PackedBatch,
    block_size,
    bucket_len,
)


class Sentences(NamedTuple):
    """The concatenated tokens of some sentences (any integer type), and the sentences' lengths."""

    tokens: np.ndarray
    lengths: np.ndarray

    def boundaries(self) -> np.ndarray:
        return np.concatenate(([0], self.lengths.cumsum()))

    def starts(self) -> np.ndarray:
        """[sentences], the place of each sentence's first token."""
        return self.lengths.cumsum() - self.lengths

    def positions(self) -> np.ndarray:
        """[tokens], the position of each token in its sentence, from 0."""
        return positions(self.lengths)

    def keep(self, kept: np.ndarray) -> Sentences:
        """Copy with only the tokens where ``kept`` (bool [tokens]) is true."""
        return Sentences(self.tokens[kept], self.count_of(kept))

    def prepended(self, token: int) -> Sentences:
        """Copy (int64) with ``token`` before each sentence."""
        return self._with(token, self.starts())

    def appended(self, token: int) -> Sentences:
        """Copy (int64) with ``token`` after each sentence."""
        return self._with(token, self.lengths.cumsum())

    def _with(self, token: int, places: np.ndarray) -> Sentences:
        # Files of small dictionaries have uint16, which may not hold a token that a task adds.
        tokens = self.tokens.astype(np.int64)
        return Sentences(np.insert(tokens, places, token), self.lengths + 1)

    def count_of(self, marked: np.ndarray) -> np.ndarray:
        """[sentences], the number of tokens of each sentence where ``marked`` is true."""
        before = np.concatenate(([0], marked.cumsum()))
        return np.diff(before[self.boundaries()])


def concatenated(parts: Sequence[Sentences]) -> Sentences:
    """The sentences of all parts, one part after the other."""
    tokens, lengths = (np.concatenate(each) for each in zip(*parts))
    return Sentences(tokens, lengths)


def reordered(sentences: Sentences, order: np.ndarray) -> tuple[Sentences, np.ndarray]:
    """Sentences in another order (indices [sentences]); and each token's former place."""
    lengths = sentences.lengths[order]
    places = np.repeat(sentences.starts()[order], lengths) + positions(lengths)
    return Sentences(sentences.tokens[places], lengths), places


def positions(lengths: np.ndarray) -> np.ndarray:
    """0, 1, ... for each length, concatenated."""
    return np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)


class Column(NamedTuple):
    """The values of a column, one per real row; and ``past``, the value of the rows after them."""

    values: np.ndarray
    past: int


class Filled(NamedTuple):
    """The content of one stream of a batch (see ``packing.Stream``).

    Attributes:
        lengths: rows of each sentence.
        columns: in the order of the layout.
        granularity: rounding of the number of rows.
        least: the smallest number of rows of the stream, real or not.
    """

    lengths: np.ndarray
    columns: Sequence[Column]
    granularity: Granularity
    least: int = 0


def packed(layout: Layout, streams: Sequence[Filled], ntokens: int, part: str = "") -> PackedBatch:
    """Write a batch into one block.

    The number of sentences is rounded up to 256, 1024, 4096, ... if the first stream rounds its
    rows.

    Args:
        streams: in the order of the layout.
        ntokens, part: see ``PackedBatch``.
    """
    sentences = room = len(streams[0].lengths)
    if streams[0].granularity.fine > 1:
        # Few sizes, since each needs its own graphs; an unused sentence costs only 4 bytes.
        room = 256
        while room < sentences:
            room *= 4
    counts = [int(filled.lengths.sum()) for filled in streams]
    rows = (
        filled.granularity.rounded(max(count, filled.least))
        for filled, count in zip(streams, counts, strict=True)
    )
    longest = tuple(int(filled.lengths.max(initial=0)) for filled in streams)
    bucket = Bucket(tuple(rows), room, bucket_len(max(longest)))
    # Columns, positions and boundaries are filled to their ends. The alignment gaps between them
    # are never read; with zeros there, equal batches have equal blocks.
    block = torch.zeros(block_size(layout, bucket), dtype=torch.int64)
    batch = PackedBatch(block, layout, bucket, sentences, ntokens, longest, part)
    for into, filled, count in zip(batch.open().values(), streams, counts, strict=True):
        for column, given in zip(into.columns.values(), filled.columns, strict=True):
            _fill(column, given.values, given.past)
        sides = Sentences(np.empty(0), filled.lengths)
        _fill(into.segments.positions, sides.positions(), 0)
        _fill(into.segments.cu_seqlens, sides.boundaries(), count)
    return batch


def _fill(part: Tensor, values: np.ndarray, past: int) -> None:
    """Write ``values`` into a part of a block, and fill the rest of the part with ``past``."""
    part.numpy()[: len(values)] = values
    part.numpy()[len(values) :] = past
