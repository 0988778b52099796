"""Incremental decoding for fairseq's own generators, which call the decoder token by token.

These generators select, reorder and drop hypotheses themselves (constraints, ensembles, --lm-path,
prefixes with </s>). Keys and values are in the same static buffers as in our own
search. The decoder's part of a step is replayed as a graph when its shapes repeat.

Shapes: N = hypotheses, C = model width, T = packed source tokens, B = sentences, S = padded source
length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.generation.decoder import AttentionRequest, StepDecoder, bucket
from lightseq_fairseq.memory.packing import Segments


class Incremental:
    """fairseq's incremental state: the hypotheses of one batch so far.

    Args:
        steps: the decoder's ``StepDecoder``, which also describes ``decoder``.
        features: [T, C_enc], the encoder's packed output; None for a decoder without a source.
        source: the segments of the B sentences; without a source, of one empty sentence for each
            hypothesis.
        rows: int64 [N], the sentence of each hypothesis; None for one hypothesis per sentence.
    """

    def __init__(
        self, steps: StepDecoder, decoder: Any, features: Tensor | None, source: Segments,
        rows: Tensor | None = None,
    ) -> None:  # fmt: skip
        device = source.cu_seqlens.device
        if rows is None:
            rows = torch.arange(source.shape[0], device=device)
        self._steps = steps.lent_to(self)
        self._rows = len(rows)
        self._length = 0  # tokens of each hypothesis so far
        longest = expected_length(source.shape[1])
        room = bucket(len(rows), device)
        memory = self._steps.begin(decoder, features, source.cu_seqlens, room, longest)
        if features is not None:
            memory.place_columns(source.index, source.shape)
        memory.sentences[: self._rows] = rows.int()

    @torch.no_grad()
    def decode_next(
        self, decoder: Any, tokens: Tensor, attention: AttentionRequest | None
    ) -> tuple[Tensor, Tensor | None]:
        """Features [N, C] of the newest tokens, and the attention weights, float32 [N, S].

        attention: None for a decoder without a source; then the weights are None, too.

        tokens: int [N, length], the hypotheses so far, newest token last. The next call overwrites
        the results.
        """
        if tokens.shape != (self._rows, self._length + 1):
            raise UserError(
                "The ls_ decoder continues hypotheses from their first token, one token per call: "
                f"expected {self._length + 1} tokens of {self._rows} hypotheses, got "
                f"{tokens.shape[1]} of {tokens.shape[0]}."
            )
        rows = bucket(self._rows, tokens.device)
        self._steps.make_room(rows, self._length + 1, self._length)
        memory = self._steps.memory
        memory.tokens[: self._rows] = tokens[:, -1]
        memory.places.fill_(self._length)

        def advance() -> tuple[Tensor, Tensor | None]:
            return self._steps.features(decoder, rows, 1, attention)

        table = decoder.table_rows(self._length + 1)
        key = (rows, None if attention is None else memory.columns.shape, attention, table)
        x, weights = self._steps.launch(key, advance)
        own = torch.arange(self._rows, dtype=torch.int32, device=x.device)
        memory.ancestry[self._length, : self._rows] = own
        self._length += 1
        return x[: self._rows], None if weights is None else weights[: self._rows]

    def reorder(self, order: Tensor) -> None:
        """Replace the hypotheses by those at the indices ``order`` (int64 [N'])."""
        self._steps.make_room(bucket(len(order), order.device), self._length, self._length)
        memory, before = self._steps.memory, self._rows
        self._rows = len(order)
        past = memory.ancestry[: self._length]
        past[:, : self._rows] = past[:, order]
        memory.sentences[: self._rows] = memory.sentences[order]
        memory.sentences[self._rows : before] = -1


def expected_length(source: int) -> int:
    """A length in positions that hypotheses rarely exceed; ``source``: longest source, tokens."""
    return source * 5 // 4 + 8
