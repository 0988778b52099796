"""The batches of the baseline in plain PyTorch, and of Hugging Face's models.

Shapes: T = packed rows, B = sentences, L = longest sentence, M = masked rows, S = longest source.
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


class Blocks(NamedTuple):
    """Running text or samples with masked tokens, each int64 [B, L].

    Of running text ``target`` has the tokens that follow ``tokens``, of samples, which are padded,
    the masked tokens, and PAD elsewhere.
    """

    tokens: Tensor
    target: Tensor


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


class PaddedPairs(NamedTuple):
    """Pairs, padded on the right: int64 source [B, S], decoder's input and target [B, L]."""

    source: Tensor
    previous: Tensor
    target: Tensor


Batch = PaddedPairs | Pairs | Blocks | MaskedRows
