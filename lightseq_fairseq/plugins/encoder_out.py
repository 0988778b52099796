"""The encoder's output in fairseq's generators.

Shapes: B = sentences, N = hypotheses, L = padded source length, T = packed source tokens,
C = model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightseq_fairseq.memory.packing import Segments


class EncoderOut(dict[str, list[Tensor]]):
    """fairseq's dict of an encoder's output, which reorders its padded tensors only on access.

    fairseq's generators reorder the output after each step. Our decoder needs only ``rows``; the
    padded tensors are gathered when another decoder reads them.

    Attributes:
        features, segments: the packed output [T, C] of B sentences.
        rows: int64 [N], the sentence of each hypothesis; None before the first reordering.
    """

    def __init__(
        self, padded: dict[str, list[Tensor]], features: Tensor, segments: Segments,
        rows: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(padded)
        self.features, self.segments, self.rows = features, segments, rows

    def reordered(self, order: Tensor) -> EncoderOut:
        rows = order if self.rows is None else self.rows.index_select(0, order)
        padded = {key: super(EncoderOut, self).__getitem__(key) for key in self}
        return EncoderOut(padded, self.features, self.segments, rows)

    def __getitem__(self, key: str) -> list[Tensor]:
        found = super().__getitem__(key)
        if self.rows is None:
            return found
        return [x.index_select(1 if key == "encoder_out" else 0, self.rows) for x in found]


def repack(encoder_out: dict[str, list[Tensor]]) -> tuple[Tensor, Segments]:
    """The packed rows [T, C] of any encoder's padded output."""
    rows, pads = encoder_out["encoder_out"][0].transpose(0, 1), encoder_out["encoder_padding_mask"]
    is_real = ~pads[0] if pads else rows.new_ones(rows.shape[:2], dtype=torch.bool)
    source = Segments.from_mask(is_real)
    return source.pack(rows), source
