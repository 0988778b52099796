"""Packed tokens: the real tokens of a batch end to end, no padding.

Letters: T packed tokens, B sentences, L longest sentence, C width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
        cu_seqlens = torch.zeros(mask.shape[0] + 1, dtype=torch.int32, device=mask.device)
        if mask.shape[1]:
            torch.cumsum(counts[:, -1], 0, dtype=torch.int32, out=cu_seqlens[1:])
        positions = counts.flatten().index_select(0, index) - 1
        return cls(cu_seqlens, mask.shape[1], positions, index, (mask.shape[0], mask.shape[1]))

    @classmethod
    def from_lengths(cls, lengths: Tensor) -> Segments:
        """Segments of sentences of the given lengths (int [B], in tokens)."""
        steps = torch.arange(int(lengths.max()) if lengths.numel() else 0, device=lengths.device)
        return cls.from_mask(steps < lengths[:, None])

    def pack(self, padded: Tensor) -> Tensor:
        """[B, L, ...] -> [T, ...]; differentiable."""
        return padded.flatten(0, 1).index_select(0, self.index)

    def pad(self, packed: Tensor) -> Tensor:
        """[T, ...] -> [B, L, ...] with zeros at the pads; differentiable."""
        padded = packed.new_zeros((self.shape[0] * self.shape[1], *packed.shape[1:]))
        return padded.index_copy(0, self.index, packed).unflatten(0, self.shape)
