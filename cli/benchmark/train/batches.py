"""The batches of the baseline in plain PyTorch, and of Hugging Face's model.

Shapes: T = packed rows, B = sentences, L = longest sentence, M = masked rows.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Pairs(NamedTuple):
    """Packed sentence pairs: int64 [T] tokens and positions, int32 [B + 1] sentence boundaries."""

    source: Tensor
    source_positions: Tensor
    cu_source: Tensor
    previous: Tensor
    target_positions: Tensor
    cu_target: Tensor
    target: Tensor

    @property
    def counted(self) -> Tensor:
        """The tokens that fairseq counts, with pads."""
        return self.target


class Blocks(NamedTuple):
    """Blocks of running text: int64 [B, L] tokens, and the tokens that follow them."""

    previous: Tensor
    target: Tensor

    @property
    def counted(self) -> Tensor:
        return self.target


class Masked(NamedTuple):
    """Samples with masked tokens: int64 [B, L], padded; target [B, L], PAD if not masked."""

    tokens: Tensor
    target: Tensor

    @property
    def counted(self) -> Tensor:
        return self.tokens


class MaskedRows(NamedTuple):
    """Samples with masked tokens, and int64 [M] rows that are masked and their targets.

    Packed samples have tokens int64 [T], their positions, and int32 [B + 1] boundaries. Padded
    samples have tokens [B, L], and positions and boundaries are empty.
    """

    tokens: Tensor
    positions: Tensor
    cu: Tensor
    rows: Tensor
    target: Tensor

    @property
    def counted(self) -> Tensor:
        return self.tokens


Batch = Pairs | Blocks | Masked | MaskedRows
