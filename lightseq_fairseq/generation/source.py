"""The sentences of a search, or the prompts of a language model, as the host reads them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightseq_fairseq.generation.results import Results


class SearchBatch(NamedTuple):
    """Sentences that a caller wants to be searched.

    tokens: int64 [B, S], padded, at least one sentence, on any device. Without an encoder, the
        prompts, which results begin with.
    max_len: the most tokens of a result, without eos.
    forced: int64 [B, P], with an encoder the tokens that results begin with; pads, which may only
        follow them, force nothing. It has no eos.
    end_together: the tokens are the prompts of transformers, of which each ends with a real token.
        The pads are the decoder's ``padding_idx``, and count for ``max_len``.
    """

    tokens: Tensor
    max_len: int
    forced: Tensor | None = None
    end_together: bool = False


def on_cpu(batches: Sequence[SearchBatch]) -> list[SearchBatch]:
    """The batches with their tokens on the CPU. For tokens on a GPU, this is a host sync."""
    fetched = [batch.tokens.to("cpu", non_blocking=True) for batch in batches]
    for batch in batches:
        if batch.tokens.is_cuda:
            torch.cuda.current_stream(batch.tokens.device).synchronize()
    return [batch._replace(tokens=each) for batch, each in zip(batches, fetched, strict=True)]


@dataclass(eq=False)
class Group:
    """The sentences of a `SearchBatch` in a search.

    Attributes:
        size: B. first: the number of the first one. left: how many have not ended.
        longest: upper bound of the lengths of their results. reported: whether the host knows that
            the last steps of those that have ended have run.
    """

    chunk: Chunk
    size: int
    first: int
    results: Results
    longest: int = 1
    reported: bool = True

    def __post_init__(self) -> None:
        self.left = self.size


@dataclass(eq=False)
class Chunk:
    """Sentences that the encoder reads at a time, without pads.

    Attributes:
        tokens: int64 [T]. boundaries: int64 [B + 1], of the sentences, from 0. max_lens: int64 [B].
        sizes, forced: the number of sentences, and the forced tokens, of each batch of which it
            consists. groups: of these batches.
        first, start: the number of the first sentence, and the row of its first token, in the
            buffers of the search.
        begun: how many sentences have begun. left: how many have not ended.
    """

    tokens: np.ndarray
    boundaries: np.ndarray
    max_lens: np.ndarray
    sizes: list[int]
    forced: list[Tensor | None]
    first: int = 0
    start: int = 0
    begun: int = 0

    def __post_init__(self) -> None:
        self.left = self.sentences
        self.groups: list[Group] = []

    @classmethod
    def of(cls, batches: Sequence[SearchBatch], pad: int) -> Chunk:
        """batches: at least one; their tokens are on the CPU."""
        padded = [batch.tokens.numpy() for batch in batches]
        real = [each != pad for each in padded]
        lengths = np.concatenate([each.sum(1) for each in real])
        boundaries = np.zeros(len(lengths) + 1, np.int64)
        lengths.cumsum(out=boundaries[1:])
        tokens = [each[mask] for each, mask in zip(padded, real, strict=True)]
        sizes = [len(each) for each in padded]
        max_lens = np.array([batch.max_len for batch in batches]).repeat(sizes)
        forced = [batch.forced for batch in batches]
        return cls(np.concatenate(tokens), boundaries, max_lens, sizes, forced)

    @property
    def sentences(self) -> int:
        return len(self.max_lens)

    @property
    def end(self) -> int:
        """The number after that of the last sentence."""
        return self.first + self.sentences

    @cached_property
    def lengths(self) -> np.ndarray:
        return self.boundaries[1:] - self.boundaries[:-1]  # in a third of the time of np.diff

    def open(self, beam: int) -> list[Group]:
        """Make its groups, whose sentences have numbers from ``first`` on."""
        starts = accumulate(self.sizes, initial=self.first)
        self.groups = [
            Group(self, size, start, Results(size, beam))
            for size, start in zip(self.sizes, starts, strict=False)
        ]
        return self.groups

    def part(self, begin: int = 0, end: int | None = None) -> SourcePart:
        """Its sentences ``begin`` to ``end`` - 1."""
        end = self.sentences if end is None else end
        starts = self.boundaries[begin : end + 1]
        return SourcePart(
            np.arange(self.first + begin, self.first + end),
            self.tokens[starts[0] : starts[-1]],
            starts - starts[0],
            self.max_lens[begin:end],
        )


@dataclass(frozen=True)
class SourcePart:
    """Sentences that a model reads at a time.

    numbers: int64 [B], of the sentences. tokens: int64 [T]. boundaries: int64 [B + 1], from 0.
    max_lens: int64 [B].
    """

    numbers: np.ndarray
    tokens: np.ndarray
    boundaries: np.ndarray
    max_lens: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[SourcePart]) -> SourcePart:
        """One part of several, at least one."""
        if len(parts) == 1:
            return parts[0]
        lengths = np.concatenate([each.lengths for each in parts])
        boundaries = np.zeros(len(lengths) + 1, np.int64)
        lengths.cumsum(out=boundaries[1:])
        numbers, tokens, max_lens = (
            np.concatenate([getattr(each, name) for each in parts])
            for name in ("numbers", "tokens", "max_lens")
        )
        return cls(numbers, tokens, boundaries, max_lens)

    @cached_property
    def lengths(self) -> np.ndarray:
        return self.boundaries[1:] - self.boundaries[:-1]

    @cached_property
    def longest(self) -> int:
        return int(self.lengths.max(initial=1))

    def write(self, host: dict[str, np.ndarray]) -> None:
        """Write the part into the host's memory of ``SearchBuffers``."""
        count, lengths = len(self.tokens), self.lengths
        host["boundaries"].fill(count)
        host["boundaries"][: len(self.boundaries)] = self.boundaries
        # The rows after ``count`` are zero and belong to no sentence.
        host["source_tokens"][:count] = self.tokens
        positions = np.arange(count) - self.boundaries[:-1].repeat(lengths)
        host["source_positions"][:count] = positions


class ChunkPlaces:
    """Where the chunks of a search are in its buffers: numbers of sentences, rows of their tokens.

    Args:
        sentences, tokens: of all chunks that have room together. chunks: how many these are.

    Attributes:
        size: how many numbers there are.
        group_of: the group of each number.
    """

    def __init__(self, sentences: int, tokens: int, chunks: int) -> None:
        self.size = sentences + chunks  # each chunk has one boundary more than sentences
        self.group_of: list[Group] = []
        self._numbers, self._rows = Ring(self.size), Ring(tokens)
        self._living: deque[Chunk] = deque()

    def give(self, chunk: Chunk, beam: int) -> bool:
        """Give a chunk its place, and make its groups; whether there is room."""
        count, tokens = chunk.sentences + 1, len(chunk.tokens)
        first, start = self._numbers.find(count), self._rows.find(tokens)
        if first is None or start is None:
            return False
        self._numbers.take(first, count)
        self._rows.take(start, tokens)
        chunk.first, chunk.start = first, start
        groups = chunk.open(beam)
        self.group_of += [groups[0]] * (first + count - len(self.group_of))
        for group in groups:
            self.group_of[group.first : group.first + group.size] = [group] * group.size
        self._living.append(chunk)
        return True

    def take_back(self) -> None:
        """Take back the places of the oldest chunks, if their sentences have ended."""
        while self._living and not self._living[0].left:
            self._living.popleft()
            self._numbers.give()
            self._rows.give()


class Ring:
    """Adjacent places in a buffer of ``size``, which are given back in the order in which they were
    taken."""

    def __init__(self, size: int) -> None:
        self._size, self._end = size, 0
        self._starts: deque[int] = deque()

    def find(self, count: int) -> int | None:
        """The first of ``count`` > 0 free places, or None while there is no room."""
        start, oldest = self._end, self._starts[0] if self._starts else None
        if oldest is None:
            return 0 if count <= self._size else None
        if start > oldest:
            if start + count <= self._size:
                return start
            start = 0  # the places before the oldest ones
        return start if start + count < oldest else None

    def take(self, start: int, count: int) -> None:
        """Take places that `find` has found."""
        self._starts.append(start)
        self._end = start + count

    def give(self) -> None:
        """Give back what was taken first."""
        self._starts.popleft()
