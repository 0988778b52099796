"""Packed rows: the real tokens of a batch end to end, no padding.

``Segments`` says where the sentences lie. ``PackedBatch`` is a batch in one block of int64, which
travels between processes and devices whole; ``open_block`` gives its parts.

A batch has one stream of rows or several: pairs of sentences have a source and a target.

Letters: T packed rows, B sentences, L longest sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightseq_fairseq.ops.checks import trust_boundaries


@dataclass(frozen=True)
class Segments:
    """Where each sentence lies in the packed rows of a batch.

    Attributes:
        cu_seqlens: int32 [B + 1], sentence b is rows ``cu_seqlens[b]:cu_seqlens[b + 1]``.
        max_len: length of the longest sentence, in tokens (an upper bound is enough).
        positions: int64 [T], place of each row in its sentence, from 0.
        index: int64 [T], place of each row in the padded batch, flattened row by row.
        shape: (B, L) of the padded batch.
    """

    cu_seqlens: Tensor
    max_len: int
    positions: Tensor
    index: Tensor
    shape: tuple[int, int]

    @classmethod
    def from_mask(cls, mask: Tensor) -> Segments:
        """Segments of a padded batch; ``mask`` is bool [B, L], true at real tokens.

        Pads may stand on either side or, as in fairseq, anywhere: what is left of a row is its
        sentence, and positions count real tokens only (``fairseq.utils.make_positions``).
        """
        counts = mask.cumsum(1)
        index = mask.flatten().nonzero().squeeze(1)
        sentences = max(mask.shape[0], 1)  # ops want one, which may be empty
        cu_seqlens = torch.zeros(sentences + 1, dtype=torch.int32, device=mask.device)
        if mask.numel():
            torch.cumsum(counts[:, -1], 0, dtype=torch.int32, out=cu_seqlens[1:])
        positions = counts.flatten().index_select(0, index) - 1
        trust_boundaries(cu_seqlens, len(index), mask.shape[1])
        return cls(cu_seqlens, mask.shape[1], positions, index, (mask.shape[0], mask.shape[1]))

    @classmethod
    def from_lengths(
        cls, lengths: Tensor | Sequence[int], device: torch.device | str | None = None
    ) -> Segments:
        """Segments of sentences of the given lengths (int [B], or a list; in tokens).

        device: of the segments, by default that of ``lengths``, of a list the CPU.

        Raises:
            ValueError: the lengths are no whole numbers from 0 on, one a sentence.
        """
        given = torch.as_tensor(lengths, device=device)
        lengths = given.to(torch.int64)
        if lengths.dim() != 1 or (lengths != given).any() or (lengths < 0).any():
            raise ValueError(
                "lengths must be one whole number from 0 on for each sentence, got "
                f"{given.tolist()}"
            )
        steps = torch.arange(int(lengths.max()) if lengths.numel() else 0, device=lengths.device)
        return cls.from_mask(steps < lengths[:, None])

    def to(self, device: torch.device | str) -> Segments:
        """The same on ``device``."""
        moved = (x.to(device) for x in (self.cu_seqlens, self.positions, self.index))
        cu_seqlens, positions, index = moved
        trust_boundaries(cu_seqlens, len(positions), self.max_len)
        return Segments(cu_seqlens, self.max_len, positions, index, self.shape)

    def pack(self, padded: Tensor) -> Tensor:
        """[B, L, ...] -> [T, ...]; differentiable."""
        return padded.flatten(0, 1).index_select(0, self.index)

    def pad(self, packed: Tensor) -> Tensor:
        """[T, ...] -> [B, L, ...] with zeros at the pads; differentiable."""
        padded = packed.new_zeros((self.shape[0] * self.shape[1], *packed.shape[1:]))
        return padded.index_copy(0, self.index, packed).unflatten(0, self.shape)


class Stream(NamedTuple):
    """A kind of rows that batches have, sentences of which lie end to end.

    Attributes:
        name: how it is called, such as "source".
        columns: names of the int64 numbers that each row has, besides its position.
    """

    name: str
    columns: tuple[str, ...]


Layout = tuple[Stream, ...]  # of a batch: what a model is given

# Pairs of sentences. ``previous`` is the decoder's input, ``labels`` what it is to say.
SENTENCE_PAIRS: Layout = (Stream("source", ("tokens",)), Stream("target", ("previous", "labels")))

# Running text. ``labels`` are the tokens that follow ``previous``.
TEXT: Layout = (Stream("target", ("previous", "labels")),)


class Bucket(NamedTuple):
    """The shapes that a captured graph is made for.

    Attributes:
        rows: of each stream of the layout, in its order.
        sentences: B, how many sentences there is room for.
    """

    rows: tuple[int, ...]
    sentences: int


class Granularity(NamedTuple):
    """Numbers of rows are rounded up, so that shapes repeat.

    fine: to multiples of this; 1 rounds nothing.
    usual: up to so many rows, which is few for a batch, to multiples of four times as many: most
        shapes would else be rare ones.
    """

    fine: int = 1
    usual: int = 0

    def rounded(self, rows: int) -> int:
        step = self.fine if rows > self.usual else 4 * self.fine
        return -(-rows // step) * step


@dataclass(frozen=True)
class Rows:
    """One stream of a batch. Rows past the real ones lie in no sentence, at position 0.

    Attributes:
        columns: int64 [T], by the names of the stream's columns.
        segments: where the sentences lie; those past the real ones are empty.
    """

    columns: dict[str, Tensor]
    segments: Segments

    def __getitem__(self, column: str) -> Tensor:
        return self.columns[column]


class Packed(dict[str, Rows]):
    """A batch's streams by their names, see ``PackedBatch.open``.

    Attributes:
        part: what of the model the batch trains, "" for all of it.
    """

    def __init__(self, streams: dict[str, Rows], part: str = "") -> None:
        super().__init__(streams)
        self.part = part


@dataclass(frozen=True)
class PackedBatch:
    """A batch as one block, which travels between processes and devices whole.

    Attributes:
        block: int64 [block_size(layout, bucket)], on the CPU.
        layout: its streams.
        bucket: the shapes of its parts.
        nsentences: real sentences, or pairs of them.
        ntokens: real tokens that are counted, pads not among them (fairseq's ``ntokens``).
        longest: length of the longest sentence of each stream; references need such an upper bound.
        part: what of the model it trains, such as a pair of languages; "" for all of it.
    """

    block: Tensor
    layout: Layout
    bucket: Bucket
    nsentences: int
    ntokens: int
    longest: tuple[int, ...]
    part: str = ""

    def __len__(self) -> int:
        """Sentences: fairseq takes a sample of length 0 for a dummy."""
        return self.nsentences

    def pin_memory(self) -> PackedBatch:
        """The same with its block in pinned memory; ``DataLoader``'s pin thread calls this."""
        return replace(self, block=self.block.pin_memory())

    def open(self, block: Tensor | None = None) -> Packed:
        """Its streams, as views of its block or of a copy of that; see ``open_block``."""
        block = self.block if block is None else block
        return Packed(open_block(block, self.layout, self.bucket, self.longest), self.part)

    def __reduce__(self) -> tuple[Any, ...]:
        # Through a worker's pipe by value: torch would put the block into shared memory, and
        # fetching its file descriptor takes the main process longer than reading the block does.
        counts = (self.nsentences, self.ntokens, self.longest)
        rest = (self.layout, self.bucket, *counts, self.part)
        return _from_array, (self.block.numpy(), *rest)


def _from_array(block: np.ndarray, *rest: Any) -> PackedBatch:
    return PackedBatch(torch.from_numpy(block), *rest)


def _part_sizes(layout: Layout, bucket: Bucket) -> list[int]:
    # In int64, in the block's order. Even, so that every part starts on a 16-byte boundary;
    # boundaries of sentences are int32, two to an int64.
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
    """Views of a block's parts; nothing is copied or read, so it may be a graph's input.

    Args:
        block: int64 [block_size(layout, bucket)] on any device: of each stream its columns and its
            positions (int64), then the boundaries of its sentences (int32).
        longest: upper bounds of the streams' sentence lengths.

    The segments' ``index`` is empty: there is no padded batch to go back to.
    """
    parts = iter(block.split(_part_sizes(layout, bucket)))
    packed = {}
    for stream, rows, most in zip(layout, bucket.rows, longest, strict=True):
        columns = {name: next(parts)[:rows] for name in stream.columns}
        positions = next(parts)[:rows]
        cu_seqlens = next(parts).view(torch.int32)[: bucket.sentences + 1]
        trust_boundaries(cu_seqlens, rows, most)
        segments = Segments(cu_seqlens, most, positions, block[:0], (bucket.sentences, most))
        packed[stream.name] = Rows(columns, segments)
    return packed
