"""The tensors that the steps of a search share, at fixed addresses that captured graphs can use.

The position is the outermost dimension, so a step writes one contiguous range. Nothing moves when
hypotheses are reordered: the entry of hypothesis n at position p is in row ancestry[p, n].
One allocation serves searches of many short and of few long sentences. It has one cell for each
pair of position and row, and its cells are reassigned for every search. The inputs of a search are
written by the host into one block, which is copied to the device as a whole.

Shapes: P = positions and R = rows of the current search, L = layers, C = model width, T = packed
source tokens of all sentences, B = sentences, H = B * beam results, S = padded source length; a dot
is a size with spare room. A slot is the ``beam`` adjacent rows of one sentence.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightseq_fairseq.ops.beam_advance import Progress

_PER_CELL = {"ancestry": torch.int32, "past_tokens": torch.int32, "past_scores": torch.float32}
OF_SENTENCE = ("tokens", "steps", "last_steps", "places")  # equal in all rows of a new sentence
_PER_ROW = ("scores", "sentences", *OF_SENTENCE)
_OF_RESULTS = {"hypothesis_tokens": torch.int32, "hypothesis_scores": torch.float32}
_PER_RESULT = {"lengths": torch.int32, "totals": torch.float32}
_OF_SOURCE = ("boundaries", "source_tokens", "source_positions", "source_slots")
_IN_BLOCK = ("progress", *_PER_ROW, "cu_seqlens", *_OF_SOURCE)
_REAL = ("scores",)  # float32 parts of the block; the others are int32
_ALIGNED = 64  # 4-byte elements: the alignment of each part of an allocation


class Sizes(NamedTuple):
    """How many there are in a search of: positions of the cache, results, rows, and sentences; in
    the largest part of the source that is read at a time: sentences and packed tokens."""

    # The cells and results depend on the first three, the block on all but the first two.
    positions: int
    results: int
    rows: int
    sentences: int
    read_sentences: int = 0
    read_tokens: int = 0


class SearchBuffers:
    """The tensors of a search; ``ops.beam_advance``, ``ops.decode_attention`` explain their use.

    Args:
        layers, width: L and C of the decoder.
        like: one of the decoder's weights; gives dtype and device.
        reads_source: whether the decoder has cross attention. Without it the packed source is the
            prompts, which the decoder itself reads, and ``source`` is empty.

    Attributes:
        positions, rows: P and R.
        cache: [P, L, 2, R, C], keys and values of self-attention.
        ancestry, past_tokens: int32 [P, R]. past_scores: float32 [P, R].
        tokens, steps, last_steps, places: int32 [R]. scores: float32 [R].
        sentences: int32 [R], the sentence of each slot, -1 for none.
        hypothesis_tokens int32, hypothesis_scores float32 [H, P], lengths int32, totals float32
            [H]: the results.
        source: [., L, 2, C], keys and values of cross attention, in the first T rows.
        cu_seqlens: int32 [.], boundaries of the sentences in ``source``; T after the last one.
        source_tokens, source_positions: int32 [.], the packed part of the source that the encoder
            reads, or the packed prompts that the decoder reads. boundaries: int32 [.], of the
            sentences in it. source_slots: int32 [.], the slot of each prompt.
        columns: int32 [., S], row of ``source`` for each padded source position, -1 at pads.
        progress: int32, see ``ops.beam_advance.Progress``.
        host: name -> numpy array on the host; ``send_source`` copies the parts of the source to the
            tensors of these names, ``send_rows`` the others.
        rng: int64 [2], for sampling.
        blocked: int32 [.], the tokens that no result has.
        moved: whether any tensor was reallocated since the user last set this to False.
    """

    ancestry: Tensor
    past_tokens: Tensor
    past_scores: Tensor
    hypothesis_tokens: Tensor
    hypothesis_scores: Tensor
    boundaries: Tensor
    source_tokens: Tensor
    source_positions: Tensor
    source_slots: Tensor
    tokens: Tensor
    scores: Tensor
    sentences: Tensor
    steps: Tensor
    last_steps: Tensor
    places: Tensor
    lengths: Tensor
    totals: Tensor
    cu_seqlens: Tensor
    progress: Tensor

    def __init__(self, layers: int, width: int, like: Tensor, reads_source: bool = True) -> None:
        self.layers, self.width, self.dtype, self.device = layers, width, like.dtype, like.device
        self._of_token = layers * 2 * width
        self.reads_source = reads_source
        self.moved = True
        self._flat: dict[str, Tensor] = {}
        self._cells = 0
        self._dealt: tuple[int, ...] = ()
        self.rng = self.take("rng", 2, torch.int64)

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token in all layers."""
        return self._of_token * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self._flat.values())

    def open(self, sizes: Sizes, cu_seqlens: np.ndarray, read: int) -> None:
        """Assign the cells for a search, and initialise ``host`` without hypotheses or tokens.

        sizes: of positions the least. cu_seqlens: integers [B + 1]. read: rows of ``source``, at
        least T; 0 for a decoder without a source.
        """
        self._deal(sizes)
        numbers = self._of_token
        # Rounded up, so that a slightly larger search needs no new allocation.
        flat = self.take("source", power(read) * self.reads_source * numbers, self.dtype)
        self.source = flat.view(len(flat) // numbers, self.layers, 2, self.width)
        self._stage()
        self.host["sentences"].fill(-1)
        self.host["cu_seqlens"].fill(cu_seqlens[-1])
        self.host["cu_seqlens"][: len(cu_seqlens)] = cu_seqlens

    def _staged(self, size: int) -> Tensor:
        """Memory of the host for ``size`` numbers, which the device can copy."""
        return torch.empty(size, dtype=torch.int32, pin_memory=self.device.type == "cuda")

    def send_rows(self) -> None:
        """Copy ``host`` without the parts of the source to the device; called once per search."""
        start = self._start_of_source
        self._block[:start].copy_(self._sent[:start], non_blocking=True)
        self.lengths.zero_()

    def send_source(self) -> None:
        """Copy the part of the source to the device; call `next_source` before the next part."""
        start = self._start_of_source
        self._block[start:].copy_(self._sent[start:], non_blocking=True)

    def next_source(self) -> None:
        """Make the host's memory new for the next part of the source; the rest stays."""
        before, start = self._sent, self._start_of_source
        self._stage()
        self._sent[:start] = before[:start]

    def _stage(self) -> None:
        self._sent = self._staged(len(self._block))
        block = self._sent.numpy()
        block.fill(0)  # numpy uses this thread only; waking torch's threads would take longer
        self.host: dict[str, np.ndarray] = self._parts_of(block, np.float32)

    def keep_source(self, keys_and_values: Tensor, first: int = 0) -> None:
        """Write [T, L * 2 * C] into ``source``, from row ``first`` on."""
        to = self.source[first : first + len(keys_and_values)]
        to.view_as(keys_and_values).copy_(keys_and_values)

    def prompt_places(self, count: int, prompts: int) -> tuple[Tensor, Tensor]:
        """Position and number of the prompt, int64 [count], of each token of the packed prompts.

        Tokens after the last prompt get the last position of prompt 0, which nothing reads.
        """
        tokens = torch.arange(count, dtype=torch.int32, device=self.device)
        prompt = torch.searchsorted(self.boundaries[1 : prompts + 1], tokens, right=True)
        missing = prompt == prompts
        positions = self.source_positions[:count].long().masked_fill_(missing, self.positions - 1)
        return positions, prompt.masked_fill_(missing, 0)

    def start(
        self, slots: np.ndarray, sentences: np.ndarray, numbers: np.ndarray, scores: np.ndarray
    ) -> None:
        """Begin sentences in slots; both integers [n].

        numbers: integers [len(OF_SENTENCE), n]. scores: float32 [n, beam].
        """
        beam = scores.shape[1]
        rows = (slots[:, None] * beam + np.arange(beam)).ravel()
        # All are in the block: one copy, and one kernel that writes them.
        parts = [(self._places["sentences"].start + slots, sentences)]
        for name, each in zip(OF_SENTENCE, numbers.repeat(beam, 1), strict=True):
            parts.append((self._places[name].start + rows, each))
        parts.append((self._places["scores"].start + rows, scores.ravel().view(np.int32)))
        numbers = np.concatenate([each for both in zip(*parts, strict=True) for each in both])
        at, new = self.sent(numbers).chunk(2)
        self._block[at.long()] = new

    def sent(self, numbers: np.ndarray) -> Tensor:
        """Integers on the device, as int32."""
        staged = self._staged(len(numbers))
        staged.numpy()[:] = numbers
        return staged.to(self.device, non_blocking=True)

    def keep_blocked(self, tokens: Sequence[int]) -> None:
        """Set ``blocked``."""
        self.blocked = self.take("blocked", max(len(tokens), 1), torch.int32)[: len(tokens)]
        if tokens:
            self.blocked.copy_(self.sent(np.array(tokens)))

    def place_columns(self, index: Tensor, shape: tuple[int, int]) -> None:
        """Fill ``columns``: packed token t is at index[t] of the flattened padded source."""
        places = self.take("columns", max(shape[0] * shape[1], 1), torch.int32).fill_(-1)
        places[index] = torch.arange(len(index), dtype=torch.int32, device=places.device)
        self.columns = places[: len(places) // shape[1] * shape[1]].view(-1, shape[1])

    def resize(self, rows: int, positions: int, used: int) -> None:
        """Reallocate with more rows or positions; the first ``used`` positions are copied."""
        old = {name: getattr(self, name)[:used] for name in ("cache", *_PER_CELL)}
        old |= {name: getattr(self, name)[:, :used] for name in _OF_RESULTS}
        for name in ("cache", "cells", "block", *_OF_RESULTS):
            del self._flat[name]
        old |= self._parts_of(self._block, torch.float32)
        sizes, self._cells, self._dealt = Sizes(*self._dealt), 0, ()
        self._deal(sizes._replace(rows=rows, positions=positions))
        self.sentences.fill_(-1)
        for name, kept in old.items():
            getattr(self, name)[tuple(map(slice, kept.shape))].copy_(kept)

    def _deal(self, sizes: Sizes) -> None:
        """Make the tensors of a search, except those with the same shapes in the previous one."""
        # Few numbers of positions, since each needs graphs.
        sizes = sizes._replace(positions=-(-sizes.positions // _ALIGNED) * _ALIGNED)
        self.positions, self.rows = sizes.positions, sizes.rows
        self.layout = sizes.sentences, sizes.read_sentences, sizes.read_tokens
        self._cells = max(self._cells, self.rows * self.positions)
        before, self._dealt = self._dealt, sizes
        if sizes[:3] != before[:3]:
            self._deal_cells(sizes.results)
        if sizes[2:] != before[2:]:
            self._deal_block(self.rows, *self.layout)

    def _deal_cells(self, results: int) -> None:
        positions, rows = self.positions, self.rows
        shape, numbers = (positions, self.layers, 2, rows, self.width), self._of_token
        flat = self.take("cache", self._cells * numbers, self.dtype)
        self.cache = flat[: positions * rows * numbers].view(shape)
        apart, kinds = _aligned(self._cells), len(_PER_CELL)
        flat = self.take("cells", kinds * apart, torch.int32)
        cells = flat.as_strided((kinds, positions, rows), (apart, rows, 1)).unbind()
        for (name, dtype), cell in zip(_PER_CELL.items(), cells, strict=True):
            setattr(self, name, cell.view(dtype))
        for name, dtype in _OF_RESULTS.items():
            flat = self.take(name, power(results) * positions, dtype)
            setattr(self, name, flat[: results * positions].view(results, positions))
        for name, dtype in _PER_RESULT.items():
            setattr(self, name, self.take(name, power(results), dtype)[:results])

    def _deal_block(self, rows: int, sentences: int, parts: int, tokens: int) -> None:
        # The offset of a part depends only on R, and for those of the source also on their sizes.
        # So a graph captured for these sizes finds it at the same address in every search.
        lengths = (len(Progress), *[rows] * len(_PER_ROW), sentences + 1, parts + 1, tokens, tokens,
                   parts)  # fmt: skip
        *starts, end = itertools.accumulate(map(_aligned, lengths), initial=0)
        self._places = {
            name: slice(start, start + size)
            for name, start, size in zip(_IN_BLOCK, starts, lengths, strict=True)
        }
        self._start_of_source = self._places[_OF_SOURCE[0]].start
        self._block = self.take("block", power(end), torch.int32)[:end]
        for name, part in self._parts_of(self._block, torch.float32).items():
            setattr(self, name, part)

    def _parts_of(self, block: Any, real: Any) -> dict[str, Any]:
        """Name -> part of ``block``, a tensor or a numpy array; ``real``: its float32 dtype."""
        parts = {name: block[place] for name, place in self._places.items()}
        return parts | {name: parts[name].view(real) for name in _REAL}

    def take(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of at least ``size`` elements: the existing one, or new zeros."""
        flat = self._flat.get(name)
        if flat is None or len(flat) < size:
            flat = self._flat[name] = torch.zeros(size, dtype=dtype, device=self.device)
            self.moved = True
        return flat


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def power(size: int) -> int:
    """The smallest power of two that is at least ``size``."""
    return 1 << max(size - 1, 0).bit_length()
