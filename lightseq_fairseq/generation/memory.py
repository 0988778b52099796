"""What the steps of a search leave to later ones, at addresses that captured graphs may keep.

Everything lies position by position, so that a step writes one stretch, and nothing moves when
hypotheses are reordered: what stands at position p of hypothesis n lies in row ancestry[p, n].
One allocation serves batches of many short and of few long sentences: its cells, one for each
position and row, are dealt out anew for every batch. What is known when a batch begins, the host
writes into one block, which travels to the device whole.

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
_PER_ROW = ("tokens", "scores", "sentences", "lengths", "totals")
_REAL = ("scores", "totals")  # float32 in the block, which is int32 otherwise
_ALIGNED = 64  # numbers of the block: each part begins at a multiple


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
        source_tokens, source_positions: int32 [.], the packed source, where the encoder reads it.
        columns: int32 [., S], row of ``source`` at each place of the padded source, -1 at pads.
        progress: int32 [4], see ``ops.beam_search.Progress``. step: its STEP, a view.
        host: what ``send`` brings into tensors of these names, from ``tokens`` to ``progress``.
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
    cu_seqlens: Tensor
    progress: Tensor

    def __init__(self, layers: int, width: int, like: Tensor) -> None:
        self.layers, self.width, self.dtype, self.device = layers, width, like.dtype, like.device
        self.moved = True
        self._flat: dict[str, Tensor] = {}
        self._cells = 0
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

    def open(self, rows: int, positions: int, cu_seqlens: Tensor, tokens: int, room: int) -> None:
        """Deal out room for a batch, and begin ``host``: no hypotheses, no source tokens yet.

        rows, positions: R, and P at least. cu_seqlens: int32 [B + 1], on the CPU. tokens: T.
        room: tokens that the encoder is to read, T or more; 0 where it has read them.
        """
        self._deal(rows, positions, max(rows, len(cu_seqlens)) + 1, room)
        self.ancestry.zero_()  # rows without a hypothesis look there, too
        # Rounded up, as batches differ a little in size.
        flat = self._take("source", _power(tokens) * self.layers * 2 * self.width, self.dtype)
        self.source = flat.view(-1, self.layers, 2, self.width)
        pinned = self.device.type == "cuda"
        self._sent = torch.zeros(len(self._block), dtype=torch.int32, pin_memory=pinned)
        self.host = {name: part.numpy() for name, part in self._parts_of(self._sent).items()}
        self.host["sentences"].fill(-1)
        self.host["cu_seqlens"].fill(tokens)
        self.host["cu_seqlens"][: len(cu_seqlens)] = cu_seqlens.numpy()

    def send(self) -> None:
        """Bring ``host`` to the device, once a batch."""
        self._block.copy_(self._sent, non_blocking=True)

    def keep_source(self, keys_and_values: Tensor) -> None:
        """[T, L * 2 * C] into ``source``."""
        self.source[: len(keys_and_values)].view_as(keys_and_values).copy_(keys_and_values)

    def place_columns(self, index: Tensor, shape: tuple[int, int]) -> None:
        """Fill ``columns``: packed token t stands at index[t] of the padded source, flattened."""
        places = self._take("columns", max(shape[0] * shape[1], 1), torch.int32).fill_(-1)
        places[index] = torch.arange(len(index), dtype=torch.int32, device=places.device)
        self.columns = places[: len(places) // shape[1] * shape[1]].view(-1, shape[1])

    def resize(self, rows: int, positions: int, used: int) -> None:
        """Go on with more rows or positions: the first ``used`` positions move along."""
        old = {name: getattr(self, name)[:used] for name in ("cache", *_PER_CELL)}
        for name in (*old, "block"):
            del self._flat[name]
        old |= self._parts_of(self._block)
        self._cells = 0
        self._deal(rows, positions, len(self.cu_seqlens), len(self.source_tokens))
        self.sentences.fill_(-1)
        for name, kept in old.items():
            getattr(self, name)[tuple(map(slice, kept.shape))].copy_(kept)

    def _deal(self, rows: int, positions: int, boundaries: int, room: int) -> None:
        self._cells = max(self._cells, rows * positions)
        positions = self._cells // rows
        shape = (positions, self.layers, 2, rows, self.width)
        numbers = self.layers * 2 * self.width
        flat = self._take("cache", self._cells * numbers, self.dtype)
        self.cache = flat[: positions * rows * numbers].view(shape)
        for name, dtype in _PER_CELL.items():
            flat = self._take(name, self._cells, dtype)
            setattr(self, name, flat[: positions * rows].view(positions, rows))
        # A part's place follows from R, and that of source_positions from the room as well: a
        # graph that is made for these finds it there in every batch.
        self._sizes = {
            "progress": len(Progress),
            **dict.fromkeys(_PER_ROW, rows),
            "cu_seqlens": boundaries,
            "source_tokens": room,
            "source_positions": room,
        }
        size = sum(map(_aligned, self._sizes.values()))
        self._block = self._take("block", _power(size), torch.int32)[:size]
        for name, part in self._parts_of(self._block).items():
            setattr(self, name, part)
        self.step = self.progress[Progress.STEP]

    def _parts_of(self, block: Tensor) -> dict[str, Tensor]:
        parts = block.split([_aligned(size) for size in self._sizes.values()])
        named = {n: p[:size] for (n, size), p in zip(self._sizes.items(), parts, strict=True)}
        return named | {name: named[name].view(torch.float32) for name in _REAL}

    def _take(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of at least that size: the one of before, or a new one of zeros."""
        flat = self._flat.get(name)
        if flat is None or len(flat) < size:
            flat = self._flat[name] = torch.zeros(size, dtype=dtype, device=self.device)
            self.moved = True
        return flat


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _power(size: int) -> int:
    """The power of two that is at least so large."""
    return 1 << max(size - 1, 0).bit_length()
