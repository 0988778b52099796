"""The decoder of a sequence-to-sequence model as our search reads it; its encoder has run.

Shapes: B = sentences, N = B * num_beams, S = padded source length, T = packed source tokens, C =
model width, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightseq_fairseq.generation.decoder import bucket
from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.results import LazyHypothesis
from lightseq_fairseq.generation.source import SearchBatch
from lightseq_fairseq.huggingface.asked import Asked
from lightseq_fairseq.huggingface.covered import NotCovered
from lightseq_fairseq.huggingface.searched import Searched, real_tokens
from lightseq_fairseq.memory.packing import Segments


class _Source(nn.Module):
    """Encoder of the search whose features exist already.

    Its tokens int64 [B, S] are 1 at real ones and 0 at pads.
    """

    padding_idx = 0

    def __init__(self) -> None:
        super().__init__()
        self._rows = torch.empty(0, 0)

    def keep(self, features: Tensor) -> None:
        """Copy the packed features [T, C] to where graphs read them."""
        count, width = features.shape
        room, kept = bucket(count, features.device), self._rows
        kind = width, features.dtype, features.device
        if room > len(kept) or (kept.shape[1], kept.dtype, kept.device) != kind:
            self._rows = features.new_zeros(1 << (room - 1).bit_length(), width)
        self._rows[:count] = features

    def features(self, tokens: Tensor, segments: Segments, rng: Tensor) -> Tensor:
        """The features, and after them any rows, which belong to no sentence: [tokens, C]."""
        return self._rows[: len(tokens)]

    def table_rows(self, longest: int) -> int:
        """A number in the key of each graph: graphs read the rows that have this size."""
        return len(self._rows)


class SearchedPairs(Searched):
    """The decoder of a sequence-to-sequence model."""

    reads_source, kind = True, "EncoderDecoder"
    reads = ("attention_mask", "inputs_embeds", "encoder_outputs", "labels")

    def __init__(self, decoder: Any, head: nn.Module) -> None:
        super().__init__(decoder, head)
        self.source: Any = _Source()

    @staticmethod
    def modules_of(model: Any) -> tuple[Any, ...]:
        return model, model.model, model.model.decoder

    @torch.no_grad()
    @torch.inference_mode(False)  # else only calls in inference mode could write the buffers
    def results(
        self, input_ids: Tensor, given: Mapping[str, Any], asked: Asked, options: SearchOptions,
        bias: Tensor | None,
    ) -> list[list[LazyHypothesis]]:  # fmt: skip
        starts = input_ids[:: options.beam].tolist()
        if len(starts[0]) != 1:
            raise NotCovered("generate begins with several decoder_input_ids")
        if any(start != starts[0] for start in starts):
            raise NotCovered("the sentences begin with different tokens")
        features = given["encoder_outputs"][0][:: options.beam]
        real = real_tokens(given.get("attention_mask"), features.shape[:2], options.beam)
        device = self.family.weight(self.decoder).device
        forced = None
        if asked.forced is not None:
            forced = torch.full((len(starts), 1), asked.forced)
        with self._turns.turn(device):
            dtype = self._read(asked.max_len + 1, bias)
            segments = Segments.from_mask(real.bool().to(device), int(real.sum()))
            self.source.keep(segments.pack(features.to(device)).to(dtype))
            return self._found(SearchBatch(real, asked.max_len, forced), options, starts[0][0])

    def _rows_of(self, tokens: Tensor, positions: Tensor) -> Tensor:
        rows = super()._rows_of(tokens, positions)
        if self.family.prefix == "M2M100":  # counts no pads
            rows = rows.masked_fill(tokens == self._first - 1, self._first - 1)
        return rows
