"""What the steps of a search leave to later ones, at addresses that captured graphs may keep.

Everything lies position by position, so that a step writes one stretch, and nothing moves when
hypotheses are reordered: what stands at position p of hypothesis n lies in row ancestry[p, n].
One allocation serves batches of many short and of few long sentences: its cells, one for each
position and row, are dealt out anew for every batch.

P positions and R rows of the batch at hand; L layers, C model width; T packed source tokens, B
sentences, S padded source length.
"""

from __future__ import annotations

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
_PER_ROW = {
    "tokens": torch.int32,
    "scores": torch.float32,
    "sentences": torch.int32,
    "lengths": torch.int32,
    "totals": torch.float32,
}


class Memory:
    """The tensors of a search; ``ops.beam_advance`` and ``ops.decode_attention`` say what for.

    Args:
        layers, width: L and C of the decoder.
        like: one of its weights, for dtype and device.

    Attributes:
        cache: [P, L, 2, R, C], keys and values of self-attention.
        ancestry, past_tokens, hypothesis_tokens: int32 [P, R].
        past_scores, hypothesis_scores: float32 [P, R].
        tokens, lengths: int32 [R]. scores, totals: float32 [R].
        sentences: int32 [R], the sentence of each slot, -1 for none.
        source: [., L, 2, C], keys and values of cross attention, in the first T rows.
        cu_seqlens: int32 [.], where the sentences lie in ``source``; behind the last one all T.
        source_tokens, source_positions: int64 [.], the packed source, where the encoder reads it.
        columns: int32 [., S], row of ``source`` at each place of the padded source, -1 at pads.
        progress: int32 [4], see ``ops.beam_search.Progress``. step: its STEP, a view.
        rng: int64 [2], of sampling.
        moved: whether something lies elsewhere than when somebody last set this to False.
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
    sentences: Tensor
    lengths: Tensor
    totals: Tensor

    def __init__(self, layers: int, width: int, like: Tensor) -> None:
        self.layers, self.width, self.dtype, self.device = layers, width, like.dtype, like.device
        self.moved = True
        self._flat: dict[str, Tensor] = {}
        self._cells = 0
        self.progress = self._take("progress", len(Progress), torch.int32)
        self.step = self.progress[Progress.STEP]
        self.rng = self._take("rng", 2, torch.int64)

    @property
    def positions(self) -> int:
        return len(self.ancestry)

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self._flat.values())

    def open(self, rows: int, positions: int, tokens: int, cu_seqlens: Tensor) -> None:
        """Deal out room for a batch, without hypotheses and without a source yet.

        rows, positions: R, and P at least. tokens: T. cu_seqlens: int32 [B + 1].
        """
        self._deal(rows, positions)
        self.ancestry.zero_()  # rows without a hypothesis look there, too
        self.tokens.zero_()
        self.lengths.zero_()
        self.sentences.fill_(-1)
        self.progress.zero_()
        # Rounded up, as batches differ a little in size.
        room = 1 << max(tokens - 1, 0).bit_length()
        flat = self._take("source", room * self.layers * 2 * self.width, self.dtype)
        self.source = flat.view(-1, self.layers, 2, self.width)
        self.cu_seqlens = self._take("cu_seqlens", max(rows, len(cu_seqlens)) + 1, torch.int32)
        self.cu_seqlens.fill_(tokens)
        self.cu_seqlens[: len(cu_seqlens)].copy_(cu_seqlens)

    def keep_source(self, keys_and_values: Tensor) -> None:
        """[T, L * 2 * C] into ``source``."""
        self.source[: len(keys_and_values)].view_as(keys_and_values).copy_(keys_and_values)

    def open_source(self, tokens: Tensor, positions: Tensor, count: int, sentences: int) -> None:
        """What the encoder reads, with room for so many tokens and sentences.

        tokens, positions: int64 [T]; behind them are zeros, which lie in no sentence.
        """
        room = len(self.source)
        for name, values in (("source_tokens", tokens), ("source_positions", positions)):
            place = self._take(name, room, torch.int64)
            place[: len(values)].copy_(values)
            place[len(values) : count].zero_()
            setattr(self, name, place)

    def place_columns(self, index: Tensor, shape: tuple[int, int]) -> None:
        """Fill ``columns``: packed token t stands at index[t] of the padded source, flattened."""
        places = self._take("columns", max(shape[0] * shape[1], 1), torch.int32).fill_(-1)
        places[index] = torch.arange(len(index), dtype=torch.int32, device=places.device)
        self.columns = places[: len(places) // shape[1] * shape[1]].view(-1, shape[1])

    def resize(self, rows: int, positions: int, used: int) -> None:
        """Go on with more rows or positions: the first ``used`` positions move along."""
        old = {name: getattr(self, name) for name in ("cache", *_PER_CELL, *_PER_ROW)}
        for name in ("cache", *_PER_CELL):
            del self._flat[name]
        self._cells = 0
        self._deal(rows, positions)
        for name, tensor in old.items():
            kept = tensor if name in _PER_ROW else tensor[:used]
            getattr(self, name)[tuple(map(slice, kept.shape))].copy_(kept)
        self.sentences[len(old["sentences"]) :] = -1

    def _deal(self, rows: int, positions: int) -> None:
        self._cells = max(self._cells, rows * positions)
        positions = self._cells // rows
        shape = (positions, self.layers, 2, rows, self.width)
        numbers = self.layers * 2 * self.width
        flat = self._take("cache", self._cells * numbers, self.dtype)
        self.cache = flat[: positions * rows * numbers].view(shape)
        for name, dtype in _PER_CELL.items():
            flat = self._take(name, self._cells, dtype)
            setattr(self, name, flat[: positions * rows].view(positions, rows))
        for name, dtype in _PER_ROW.items():
            setattr(self, name, self._take(name, rows, dtype)[:rows])

    def _take(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of at least that size: the one of before, or a new one of zeros."""
        flat = self._flat.get(name)
        if flat is None or len(flat) < size:
            flat = self._flat[name] = torch.zeros(size, dtype=dtype, device=self.device)
            self.moved = True
        return flat
