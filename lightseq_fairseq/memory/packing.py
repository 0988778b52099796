"""Packed rows: the real tokens of a batch, concatenated without padding.

``Segments`` holds the boundaries of the sentences. ``PackedBatch`` stores a batch in one int64
block, which is transferred between processes and devices as a whole; ``open_block`` returns views
of its parts.

A batch has one or more streams of rows. For example, sentence pairs have a source and a target
stream.

Shapes: T = packed rows, B = sentences, L = longest sentence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightseq_fairseq.ops.checks import trust_boundaries


@dataclass(frozen=True)
class Segments:
    """The boundaries of the sentences in the packed rows of a batch.

    Attributes:
        cu_seqlens: int32 [B + 1], sentence b is rows ``cu_seqlens[b]:cu_seqlens[b + 1]``.
        max_len: length of the longest sentence, in tokens (an upper bound is enough).
        positions: int64 [T], position of each row in its sentence, from 0.
        index: int64 [T], index of each row in the padded batch, flattened row by row.
        shape: (B, L) of the padded batch.
        graph_len: an upper bound as ``max_len``, but of all batches for which a CUDA graph with
            these segments is replayed. Attention on a GPU uses it, or ``max_len`` if it is 0.
        has_more: there may be rows that belong to no sentence, after the others; their ``index`` is
            B * L.
    """

    cu_seqlens: Tensor
    max_len: int
    positions: Tensor
    index: Tensor
    shape: tuple[int, int]
    graph_len: int = 0
    has_more: bool = False

    @classmethod
    def from_mask(cls, mask: Tensor, rows: int | None = None) -> Segments:
        """Segments of a padded batch; ``mask`` is bool [B, L], true at real tokens.

        rows: their number T, if it is known; else the host waits for the device to count them.

        Pads may be on either side or, as in fairseq, anywhere: the sentence is the remaining tokens
        of its row. Positions count real tokens only (``fairseq.utils.make_positions``).
        """
        counts = mask.cumsum(1)
        flat = mask.flatten()
        found = flat.nonzero() if rows is None else torch.nonzero_static(flat, size=rows)
        index = found.squeeze(1)
        sentences = max(mask.shape[0], 1)  # ops need at least one sentence, which may be empty
        cu_seqlens = torch.zeros(sentences + 1, dtype=torch.int32, device=mask.device)
        if mask.numel():
            torch.cumsum(counts[:, -1], 0, dtype=torch.int32, out=cu_seqlens[1:])
        positions = counts.flatten().index_select(0, index) - 1
        trust_boundaries(cu_seqlens, len(index), mask.shape[1])
        return cls(cu_seqlens, mask.shape[1], positions, index, (mask.shape[0], mask.shape[1]))

    @classmethod
    def full(cls, shape: tuple[int, int], device: torch.device | str) -> Segments:
        """Segments of a batch [B, L] without pads."""
        sentences, length = shape
        places = torch.arange(sentences * length, device=device)
        ends = torch.arange(max(sentences, 1) + 1, dtype=torch.int32, device=device) * length
        trust_boundaries(ends, len(places), length)
        return cls(ends, length, places % max(length, 1), places, shape)

    @classmethod
    def from_lengths(
        cls, lengths: Tensor | Sequence[int], device: torch.device | str | None = None
    ) -> Segments:
        """Segments of sentences of the given lengths (int [B], or a list; in tokens).

        device: of the segments; default: that of ``lengths``, or the CPU for a list.

        Raises:
            ValueError: the lengths are not one whole number, 0 or greater, per sentence.
        """
        given = torch.as_tensor(lengths, device=device)
        lengths = given.to(torch.int64)
        if lengths.dim() != 1 or (lengths != given).any() or (lengths < 0).any():
            raise ValueError(
                "lengths must be whole numbers from 0 on, one for each sentence, got "
                f"{given.tolist()}"
            )
        steps = torch.arange(int(lengths.max()) if lengths.numel() else 0, device=lengths.device)
        return cls.from_mask(steps < lengths[:, None])

    def to(self, device: torch.device | str) -> Segments:
        """A copy on ``device``."""
        cu_seqlens = self.cu_seqlens.to(device)
        trust_boundaries(cu_seqlens, len(self.positions), self.max_len)
        positions, index = self.positions.to(device), self.index.to(device)
        return replace(self, cu_seqlens=cu_seqlens, positions=positions, index=index)

    @property
    def _is_full(self) -> bool:
        """Whether the batch has no pads."""
        return not self.has_more and len(self.index) == self.shape[0] * self.shape[1] > 0

    def pack(self, padded: Tensor) -> Tensor:
        """[B, L, ...] -> [T, ...]; differentiable. Rows that belong to no sentence are zero.

        A view if there are no pads.
        """
        rows = padded.flatten(0, 1)
        if self.has_more:
            rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        return rows if self._is_full else rows.index_select(0, self.index)

    def pad(self, packed: Tensor) -> Tensor:
        """[T, ...] -> [B, L, ...] with zeros at the pads, or a view if there are no pads;
        differentiable."""
        if self._is_full:
            return packed.unflatten(0, self.shape)
        count = self.shape[0] * self.shape[1]
        padded = packed.new_zeros((count + self.has_more, *packed.shape[1:]))
        return padded.index_copy(0, self.index, packed)[:count].unflatten(0, self.shape)


class Stream(NamedTuple):
    """One kind of rows in a batch, such as the source rows; sentences are concatenated.

    Attributes:
        name: such as "source".
        columns: names of the int64 values that each row has besides its position.
    """

    name: str
    columns: tuple[str, ...]


Layout = tuple[Stream, ...]  # the streams of a batch, which are a model's inputs

# Sentence pairs. ``previous`` is the decoder's input, ``labels`` its expected output.
SENTENCE_PAIRS: Layout = (Stream("source", ("tokens",)), Stream("target", ("previous", "labels")))

# Text of a language model. ``labels`` are the tokens that follow ``previous``.
TEXT: Layout = (Stream("target", ("previous", "labels")),)

# Text with masked tokens. ``rows`` are rows of "source"; ``labels`` are the tokens there before
# masking. After the real rows of "masked", ``rows`` is 0 and ``labels`` is the pad token. "masked"
# has at least one row, even if no token is masked.
MASKED: Layout = (Stream("source", ("tokens",)), Stream("masked", ("rows", "labels")))

# Sentences with labels. Classification: "target" has one row for each sentence; rows after the real
# ones have the label -100. Regression: one row for each number of a sentence. The number is rounded
# to float32 and stored as the bits of a float64: ``labels.view(torch.float64)`` reads it.
CLASSES: Layout = (Stream("source", ("tokens",)), Stream("target", ("labels",)))


# Tokens. If a sentence of a batch has more, attention launches the kernels for long sentences, too.
LONG = 128


def bucket_len(longest: int) -> int:
    """The upper bound of a graph's sentence lengths: ``LONG`` or a power of 2, so few differ."""
    return LONG if longest <= LONG else 1 << (longest - 1).bit_length()


class Bucket(NamedTuple):
    """The shapes of a batch, and of the graph that is captured for it.

    Attributes:
        rows: number of rows of each stream, in the order of the layout.
        sentences: B, the number of sentences that fit.
        longest: upper bound of the sentence lengths, see ``bucket_len``.
    """

    rows: tuple[int, ...]
    sentences: int
    longest: int = LONG


LEAST_GRANULARITY = 64  # rows; GEMMs search cuBLASLt algorithms for multiples of this row count


class Granularity(NamedTuple):
    """How row counts are rounded up, so that few buckets suffice.

    fine: round up to multiples of this; 1 means no rounding.
    usual: batches with at most this many rows are rare, so they are rounded up to multiples of
        ``4 * fine``. Otherwise most shapes would occur only rarely.
    """

    fine: int = 1
    usual: int = 0

    def rounded(self, rows: int) -> int:
        step = self.fine if rows > self.usual else 4 * self.fine
        return -(-rows // step) * step

    def of_part(self, share: float) -> Granularity:
        """The granularity of a stream that has about this share of the rows."""
        least = min(self.fine, LEAST_GRANULARITY)
        steps = max(1, math.ceil(self.fine * share / least))
        return Granularity(least * steps, int(self.usual * share))


@dataclass(frozen=True)
class Rows:
    """One stream of a batch. Rows after the real ones belong to no sentence; their position is 0.

    Attributes:
        columns: column name -> int64 [T].
        segments: boundaries of the sentences; sentences after the real ones are empty.
    """

    columns: dict[str, Tensor]
    segments: Segments

    def __getitem__(self, column: str) -> Tensor:
        return self.columns[column]


class Packed(dict[str, Rows]):
    """Stream name -> rows of a batch, see ``PackedBatch.open``.

    Attributes:
        part: the part of the model that the batch trains; "" for the whole model.
    """

    def __init__(self, streams: dict[str, Rows], part: str = "") -> None:
        super().__init__(streams)
        self.part = part


@dataclass(frozen=True)
class PackedBatch:
    """A batch in one block, which is transferred between processes and devices as a whole.

    Attributes:
        block: int64 [block_size(layout, bucket)], on the CPU.
        layout: its streams.
        bucket: the shapes of its parts.
        nsentences: number of real sentences, or of sentence pairs.
        ntokens: number of counted tokens, without pads (fairseq's ``ntokens``).
        longest: length of the longest sentence of each stream; reference ops need this bound.
        part: the part of the model that it trains, such as a language pair; "" for the whole model.
    """

    block: Tensor
    layout: Layout
    bucket: Bucket
    nsentences: int
    ntokens: int
    longest: tuple[int, ...]
    part: str = ""

    def __len__(self) -> int:
        """Number of sentences; fairseq treats a sample of length 0 as a dummy batch."""
        return self.nsentences

    def count(self, stream: str) -> int:
        """Number of real rows of a stream."""
        return int(self.open()[stream].segments.cu_seqlens[-1])

    def pin_memory(self) -> PackedBatch:
        """A copy with its block in pinned memory; ``DataLoader``'s pin thread calls this."""
        return replace(self, block=self.block.pin_memory())

    def open(self, block: Tensor | None = None) -> Packed:
        """Its streams, as views of ``block``: its own block or a copy of it; see ``open_block``."""
        block = self.block if block is None else block
        return Packed(open_block(block, self.layout, self.bucket, self.longest), self.part)

    def __reduce__(self) -> tuple[Any, ...]:
        # Send the block through the worker's pipe by value. torch would put it into shared memory,
        # but fetching the file descriptor takes the main process longer than reading the block.
        _, *others = vars(self).values()
        return _from_array, (self.block.numpy(), *others)


def _from_array(block: np.ndarray, *others: Any) -> PackedBatch:
    return PackedBatch(torch.from_numpy(block), *others)


def _part_sizes(layout: Layout, bucket: Bucket) -> list[int]:
    # Sizes in int64 elements, in the block's order, rounded to even numbers so that every part
    # starts on a 16-byte boundary. Sentence boundaries are int32, two per int64.
    boundaries = (bucket.sentences + 2) // 2
    sizes = []
    for stream, rows in zip(layout, bucket.rows, strict=True):
        sizes += [rows] * (len(stream.columns) + 1) + [boundaries]
    return [size + size % 2 for size in sizes]


def block_size(layout: Layout, bucket: Bucket) -> int:
    """Elements (int64) of a block of these shapes."""
    return sum(_part_sizes(layout, bucket))


def open_block(
    block: Tensor, layout: Layout, bucket: Bucket, longest: Sequence[int]
) -> dict[str, Rows]:
    """Views of a block's parts. Nothing is copied or read, so the block may be a graph's input.

    Args:
        block: int64 [block_size(layout, bucket)] on any device. For each stream: its columns and
            its positions (int64), then the boundaries of its sentences (int32).
        longest: upper bound of the sentence lengths of each stream in this batch;
            ``bucket.longest`` is the bound for all batches of the bucket.

    The segments' ``index`` is empty, since there is no corresponding padded batch.
    """
    parts = iter(block.split(_part_sizes(layout, bucket)))
    packed = {}
    for stream, rows, most in zip(layout, bucket.rows, longest, strict=True):
        columns = {name: next(parts)[:rows] for name in stream.columns}
        positions = next(parts)[:rows]
        cu_seqlens = next(parts).view(torch.int32)[: bucket.sentences + 1]
        trust_boundaries(cu_seqlens, rows, most)
        shape = bucket.sentences, most
        segments = Segments(cu_seqlens, most, positions, block[:0], shape, bucket.longest)
        packed[stream.name] = Rows(columns, segments)
    return packed
