"""The sentences of a search, or the prompts of a language model, as the host reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


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


@dataclass(frozen=True)
class Source:
    """All sentences of some batches, in their order; without pads.

    Attributes:
        tokens: int64 [T]. cu_seqlens: int64 [B + 1], boundaries of the sentences.
        batches: boundaries of the batches, in sentences.
        max_lens: int64 [B].
        longest: the most tokens of a sentence. largest_batch, most_tokens: the most sentences and
            tokens of a batch.
    """

    tokens: np.ndarray
    cu_seqlens: np.ndarray
    batches: list[int]
    max_lens: np.ndarray
    longest: int
    largest_batch: int
    most_tokens: int

    @classmethod
    def of(cls, batches: Sequence[SearchBatch], pad: int) -> Source:
        """Fetches the tokens. For tokens on a GPU, this is a host sync."""
        fetched = [batch.tokens.to("cpu", non_blocking=True) for batch in batches]
        for batch in batches:
            if batch.tokens.is_cuda:
                torch.cuda.current_stream(batch.tokens.device).synchronize()
        padded = [each.numpy() for each in fetched]
        real = [each != pad for each in padded]
        lengths = np.concatenate([each.sum(1) for each in real])
        tokens = [each[mask] for each, mask in zip(padded, real, strict=True)]
        sizes = [len(each) for each in padded]
        cu_seqlens = np.zeros(len(lengths) + 1, np.int64)
        lengths.cumsum(out=cu_seqlens[1:])
        return cls(
            np.concatenate(tokens), cu_seqlens, [*accumulate(sizes, initial=0)],
            np.array([batch.max_len for batch in batches]).repeat(sizes),
            int(lengths.max()), max(sizes), max(map(len, tokens)),
        )  # fmt: skip

    @property
    def sentences(self) -> int:
        return len(self.max_lens)

    def part(self, first: int, end: int) -> SourcePart:
        """The sentences ``first`` to ``end`` - 1."""
        starts = self.cu_seqlens[first : end + 1]
        return SourcePart(first, self.tokens[starts[0] : starts[-1]], starts - starts[0])


@dataclass(frozen=True)
class SourcePart:
    """Adjacent sentences of a source that a model reads at a time.

    first: the first one. tokens: int64 [T]. boundaries: int64, from 0, of the sentences.
    """

    first: int
    tokens: np.ndarray
    boundaries: np.ndarray

    @cached_property
    def lengths(self) -> np.ndarray:
        return self.boundaries[1:] - self.boundaries[:-1]  # in a third of the time of np.diff

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
