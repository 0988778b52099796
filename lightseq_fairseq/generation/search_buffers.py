"""The tensors that the steps of a search share, at fixed addresses that captured graphs can use.

The position is the outermost dimension, so a step writes one contiguous range. Nothing moves when
hypotheses are reordered: the entry of hypothesis n at position p is in row ancestry[p, n].
One allocation serves batches of many short and of few long sentences. It has one cell for each pair
of position and row, and its cells are reassigned for every batch. The inputs of a batch are written
by the host into one block, which is copied to the device as a whole.

Shapes: P = positions and R = rows of the current batch, L = layers, C = model width, T = packed
source tokens, B = sentences, S = padded source length; a dot is a size with spare room. A slot is
the ``beam`` adjacent rows of one sentence.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightseq_fairseq.ops.beam_search import Progress

_PER_CELL = {
    "ancestry": torch.int32,
    "past_tokens": torch.int32,
    "past_scores": torch.float32,
    "hypothesis_tokens": torch.int32,
    "hypothesis_scores": torch.float32,
}
_PER_ROW = ("tokens", "scores", "starts", "sentences", "lengths", "totals")
_IN_BLOCK = ("progress", *_PER_ROW, "cu_seqlens", "source_tokens", "source_positions")
_REAL = ("scores", "totals")  # float32 parts of the block; the others are int32
_ALIGNED = 64  # 4-byte elements: the alignment of each part of an allocation


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
        ancestry, past_tokens, hypothesis_tokens: int32 [P, R].
        past_scores, hypothesis_scores: float32 [P, R].
        tokens, lengths: int32 [R]. scores, totals: float32 [R].
        starts: int32 [R], the position of the first token of each row.
        sentences: int32 [R], the sentence of each slot, -1 for none.
        source: [., L, 2, C], keys and values of cross attention, in the first T rows.
        cu_seqlens: int32 [.], boundaries of the sentences in ``source``; T after the last one.
        source_tokens, source_positions: int32 [.], the packed source, which the encoder reads, or
            the packed prompts.
        columns: int32 [., S], row of ``source`` for each padded source position, -1 at pads.
        progress: int32 [5], see ``ops.beam_search.Progress``. step: its STEP, a view.
        host: name -> numpy array on the host; ``send`` copies each to the tensor of that name.
        rng: int64 [2], for sampling.
        moved: whether any tensor was reallocated since the user last set this to False.
    """

    ancestry: Tensor
    past_tokens: Tensor
    past_scores: Tensor
    hypothesis_tokens: Tensor
    hypothesis_scores: Tensor
    source_tokens: Tensor
    source_positions: Tensor
    tokens: Tensor
    scores: Tensor
    starts: Tensor
    sentences: Tensor
    lengths: Tensor
    totals: Tensor
    cu_seqlens: Tensor
    progress: Tensor

    def __init__(self, layers: int, width: int, like: Tensor, reads_source: bool = True) -> None:
        self.layers, self.width, self.dtype, self.device = layers, width, like.dtype, like.device
        self.reads_source = reads_source
        self.moved = True
        self._flat: dict[str, Tensor] = {}
        self._cells = 0
        self._dealt: tuple[int, ...] | None = None
        self.rng = self._take("rng", 2, torch.int64)

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self._flat.values())

    def open(self, rows: int, positions: int, cu_seqlens: np.ndarray, room: int) -> None:
        """Assign the cells for a batch, and initialise ``host`` without hypotheses or tokens.

        rows, positions: R, and the least P. cu_seqlens: integers [B + 1]. room: rows of
        ``source_tokens``, T or more; 0 if the encoder has run already.
        """
        self._deal(rows, positions, max(rows, len(cu_seqlens)) + 1, room)
        tokens = int(cu_seqlens[-1])
        # Rounded up, so that a slightly larger batch needs no new allocation.
        read, numbers = _power(tokens) * self.reads_source, self.layers * 2 * self.width
        flat = self._take("source", read * numbers, self.dtype)
        self.source = flat.view(len(flat) // numbers, self.layers, 2, self.width)
        pinned = self.device.type == "cuda"
        self._sent = torch.empty(len(self._block), dtype=torch.int32, pin_memory=pinned)
        block = self._sent.numpy()
        block.fill(0)  # numpy uses this thread only; waking torch's threads would take longer
        self.host: dict[str, np.ndarray] = self._parts_of(block, np.float32)
        self.host["sentences"].fill(-1)
        self.host["cu_seqlens"].fill(tokens)
        self.host["cu_seqlens"][: len(cu_seqlens)] = cu_seqlens

    def send(self) -> None:
        """Copy ``host`` to the device; called once per batch."""
        self._block.copy_(self._sent, non_blocking=True)

    def keep_source(self, keys_and_values: Tensor) -> None:
        """Write [T, L * 2 * C] into ``source``; this completes the inputs of a batch."""
        self.source[: len(keys_and_values)].view_as(keys_and_values).copy_(keys_and_values)

    def prompt_places(self, slots: int, beam: int) -> tuple[Tensor, Tensor]:
        """Position in the cache and slot, int64 [T], of each token of the packed prompts.

        Rows after the last prompt get the last position of slot 0, which a later step overwrites
        before any step reads it.
        """
        tokens = torch.arange(len(self.source_tokens), dtype=torch.int32, device=self.device)
        slot = torch.searchsorted(self.cu_seqlens[1 : slots + 1], tokens, right=True)
        missing = slot == slots
        slot = slot.masked_fill_(missing, 0)
        places = self.source_positions.long() + self.starts[slot * beam]
        return places.masked_fill_(missing, self.positions - 1), slot

    def place_columns(self, index: Tensor, shape: tuple[int, int]) -> None:
        """Fill ``columns``: packed token t is at index[t] of the flattened padded source."""
        places = self._take("columns", max(shape[0] * shape[1], 1), torch.int32).fill_(-1)
        places[index] = torch.arange(len(index), dtype=torch.int32, device=places.device)
        self.columns = places[: len(places) // shape[1] * shape[1]].view(-1, shape[1])

    def resize(self, rows: int, positions: int, used: int) -> None:
        """Reallocate with more rows or positions; the first ``used`` positions are copied."""
        old = {name: getattr(self, name)[:used] for name in ("cache", *_PER_CELL)}
        for name in ("cache", "cells", "block"):
            del self._flat[name]
        old |= self._parts_of(self._block, torch.float32)
        self._cells, self._dealt = 0, None
        self._deal(rows, positions, len(self.cu_seqlens), len(self.source_tokens))
        self.sentences.fill_(-1)
        for name, kept in old.items():
            getattr(self, name)[tuple(map(slice, kept.shape))].copy_(kept)

    def _deal(self, rows: int, positions: int, boundaries: int, room: int) -> None:
        """Make the tensors of a batch, unless those of the previous batch have the same shapes."""
        self._cells = max(self._cells, rows * positions)
        shapes = rows, self._cells, boundaries, room
        if shapes == self._dealt:
            return
        self._dealt = shapes
        self.rows, self.positions = rows, self._cells // rows
        shape = (self.positions, self.layers, 2, rows, self.width)
        numbers = self.layers * 2 * self.width
        flat = self._take("cache", self._cells * numbers, self.dtype)
        self.cache = flat[: self.positions * rows * numbers].view(shape)
        apart, kinds = _aligned(self._cells), len(_PER_CELL)
        flat = self._take("cells", kinds * apart, torch.int32)
        parts = flat.as_strided((kinds, self.positions, rows), (apart, rows, 1)).unbind()
        for (name, dtype), part in zip(_PER_CELL.items(), parts, strict=True):
            setattr(self, name, part.view(dtype))
        # The offset of a part depends only on R (for source_positions also on the room), so a graph
        # captured for these sizes finds it at the same address in every batch.
        sizes = (len(Progress), *[rows] * len(_PER_ROW), boundaries, room, room)
        *starts, end = itertools.accumulate(map(_aligned, sizes), initial=0)
        self._places = {
            name: slice(start, start + size)
            for name, start, size in zip(_IN_BLOCK, starts, sizes, strict=True)
        }
        self._block = self._take("block", _power(end), torch.int32)[:end]
        for name, part in self._parts_of(self._block, torch.float32).items():
            setattr(self, name, part)
        self.step = self.progress[Progress.STEP]

    def _parts_of(self, block: Any, real: Any) -> dict[str, Any]:
        """Name -> part of ``block``, a tensor or a numpy array; ``real``: its float32 dtype."""
        parts = {name: block[place] for name, place in self._places.items()}
        return parts | {name: parts[name].view(real) for name in _REAL}

    def _take(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of at least ``size`` elements: the existing one, or new zeros."""
        flat = self._flat.get(name)
        if flat is None or len(flat) < size:
            flat = self._flat[name] = torch.zeros(size, dtype=dtype, device=self.device)
            self.moved = True
        return flat


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _power(size: int) -> int:
    """The smallest power of two that is at least ``size``."""
    return 1 << max(size - 1, 0).bit_length()
