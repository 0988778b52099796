"""Packed rows: the real tokens of a batch end to end, no padding.

``Segments`` says where the sentences lie. ``PackedBatch`` is a batch in one block of int64, which
travels between processes and devices whole; ``open_block`` gives its parts.

Letters: S, T packed tokens, B sentences, L longest sentence, C width.
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


class Bucket(NamedTuple):
    """The shapes that a captured graph is made for.

    Attributes:
        source: S, rows of the packed source.
        target: T, rows of the packed target.
        sentences: B, how many sentences there is room for.
    """

    source: int
    target: int
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
class Packed:
    """The parts of a batch's block, see ``open_block``.

    Rows past the real tokens hold pads at position 0 and lie in no sentence; sentences past the
    real ones are empty.

    Attributes:
        source_tokens: int64 [S].
        source: segments of the source.
        previous_tokens: int64 [T], the decoder's input.
        target: segments of the target.
        labels: int64 [T], what the decoder is to say.
    """

    source_tokens: Tensor
    source: Segments
    previous_tokens: Tensor
    target: Segments
    labels: Tensor


@dataclass(frozen=True)
class PackedBatch:
    """A batch of sentence pairs as one block, which travels between processes and devices whole.

    Attributes:
        block: int64 [block_size(bucket)], on the CPU.
        bucket: the shapes of its parts.
        nsentences: real sentence pairs.
        ntokens: real target tokens, pads not counted (fairseq's ``ntokens``).
        longest_source: length of the longest sentence; references need such an upper bound.
        longest_target: the same of the target.
    """

    block: Tensor
    bucket: Bucket
    nsentences: int
    ntokens: int
    longest_source: int
    longest_target: int

    def __len__(self) -> int:
        """Sentence pairs: fairseq takes a sample of length 0 for a dummy."""
        return self.nsentences

    def pin_memory(self) -> PackedBatch:
        """The same with its block in pinned memory; ``DataLoader``'s pin thread calls this."""
        return replace(self, block=self.block.pin_memory())

    def __reduce__(self) -> tuple[Any, ...]:
        # Through a worker's pipe by value: torch would put the block into shared memory, and
        # fetching its file descriptor takes the main process longer than reading the block does.
        rest = (self.bucket, self.nsentences, self.ntokens, self.longest_source)
        return _from_array, (self.block.numpy(), *rest, self.longest_target)


def _from_array(block: np.ndarray, *rest: Any) -> PackedBatch:
    return PackedBatch(torch.from_numpy(block), *rest)


def _part_sizes(bucket: Bucket) -> list[int]:
    # In int64, in the block's order. Even, so that every part starts on a 16-byte boundary;
    # boundaries of sentences are int32, two to an int64.
    boundaries = (bucket.sentences + 2) // 2
    sizes = [bucket.source] * 2 + [bucket.target] * 3 + [boundaries] * 2
    return [size + size % 2 for size in sizes]


def block_size(bucket: Bucket) -> int:
    """Elements (int64) of a block of these shapes."""
    return sum(_part_sizes(bucket))


def open_block(block: Tensor, bucket: Bucket, longest_source: int, longest_target: int) -> Packed:
    """Views of a block's parts; nothing is copied or read, so it may be a graph's input.

    Args:
        block: int64 [block_size(bucket)] on any device: source tokens and positions, previous
            tokens, target positions and labels (int64), boundaries of the source's and of the
            target's sentences (int32).
        longest_source: upper bound of the source's sentence lengths.
        longest_target: the same of the target.

    The segments' ``index`` is empty: there is no padded batch to go back to.
    """
    source_tokens, source_positions, previous, target_positions, labels, *boundaries = block.split(
        _part_sizes(bucket)
    )
    cu_source, cu_target = (part.view(torch.int32)[: bucket.sentences + 1] for part in boundaries)

    def segments(cu_seqlens: Tensor, longest: int, positions: Tensor) -> Segments:
        trust_boundaries(cu_seqlens, len(positions), longest)
        return Segments(cu_seqlens, longest, positions, block[:0], (bucket.sentences, longest))

    return Packed(
        source_tokens[: bucket.source],
        segments(cu_source, longest_source, source_positions[: bucket.source]),
        previous[: bucket.target],
        segments(cu_target, longest_target, target_positions[: bucket.target]),
        labels[: bucket.target],
    )
