"""A decoder of Hugging Face as our search reads it.

Shapes: B = sentences, S = padded source length, T = packed source tokens, N = rows of a step, C =
model width, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightseq_fairseq.base.errors import GPUHangs, UserError
from lightseq_fairseq.generation.decoder import StepDecoder, bucket
from lightseq_fairseq.generation.incremental import expected_length
from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.results import LazyHypothesis
from lightseq_fairseq.generation.search import search
from lightseq_fairseq.generation.turns import Turns
from lightseq_fairseq.huggingface.calls import check_attention, check_whole, read_copies
from lightseq_fairseq.huggingface.copies import KeptCopies
from lightseq_fairseq.huggingface.covered import LayerNorm, NotCovered, check
from lightseq_fairseq.layers import vocabulary_logits
from lightseq_fairseq.layers.embedding import embed
from lightseq_fairseq.layers.node import Input
from lightseq_fairseq.memory.packing import Segments

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


class SearchedDecoder(nn.Module):
    """What ``generation.search`` reads of a decoder; the parameters stay the model's own.

    Graphs read the parameters' memory, or copies which each search makes anew: of those that one
    product reads as one, under autocast of all matrices, and of the vocabulary projection, whose
    rows are made a multiple of 8.

    Args:
        family: how our layers read the decoder.
        decoder: such as a ``BartDecoder``.
        head: the projection to the vocabulary.
    """

    reads_source, embeds_on_host = True, False
    _words: dict[str, Any]
    _bias: Tensor
    _positions: Tensor

    def __init__(self, family: Any, decoder: Any, head: nn.Module) -> None:
        super().__init__()
        self._family, self.decoder, self.head = family, decoder, head
        self.steps, self.source = StepDecoder(), _Source()
        self._copies, self._tables = KeptCopies(), KeptCopies()
        self._matrix = torch.empty(0, 0)
        self._turns = Turns()

    def is_of(self, decoder: nn.Module, head: nn.Module) -> bool:
        return self.decoder is decoder and self.head is head

    @torch.no_grad()
    @torch.inference_mode(False)  # else only calls in inference mode could write the buffers
    def results(
        self, features: Tensor, mask: Tensor | None, bias: Tensor | None, options: SearchOptions,
        first: int, max_len: int, forced: int | None,
    ) -> list[list[LazyHypothesis]]:  # fmt: skip
        """See ``generation.search``.

        features: [B, S, C], the encoder's result. mask: [B, S], 0 at pads, or None. bias: [1, V],
        of the logits. forced: the token that results begin with.
        """
        device = self.decoder.embed_tokens.weight.device
        if mask is None:
            mask = torch.ones(features.shape[:2], dtype=torch.int64)
        real = mask.ne(0)
        on_host = real.to("cpu", torch.int64)
        if not bool(on_host.any(1).all()):
            raise NotCovered("a sentence has only pads")
        with self._turns.turn(device):
            dtype = self._read(bias)
            self._table(max_len + 1)
            segments = Segments.from_mask(real.to(device), int(on_host.sum()))
            self.source.keep(segments.pack(features.to(device)).to(dtype))
            begin = None if forced is None else torch.full((len(mask), 1), forced)
            try:
                with torch.autocast(device.type, enabled=False):
                    return search(
                        self.steps, self.source, self, on_host, options, first, max_len,
                        expected_length(mask.shape[1]), None, begin,
                    )  # fmt: skip
            except GPUHangs:
                raise
            except UserError:
                raise NotCovered("a sentence has no result with a finite score") from None

    def _read(self, bias: Tensor | None) -> torch.dtype:
        """Read the layers, and copy what is to be copied; the dtype of both."""
        decoder, family = self.decoder, self._family
        check_whole(decoder)
        check_attention(decoder.config)
        check(self.head, nn.Linear)
        if (
            self.head.bias is not None
            or self.head.weight.device != decoder.embed_tokens.weight.device
        ):
            raise NotCovered("the vocabulary projection has a bias or is elsewhere")
        self.layers = family.layers(decoder)
        if not self.layers:
            raise NotCovered("it has no layers")
        norm = getattr(decoder, "layer_norm", None)
        self.layer_norm = None if norm is None else LayerNorm.of(norm)
        self._words: dict[str, Any] = family.words(decoder)
        dtype = read_copies(self.layers, self._words["weight"], self.layer_norm, self._copies)
        if self._copies.moved:
            self.steps.forget()
        if dtype not in _DTYPES:
            raise NotCovered(f"its parameters are {str(dtype).removeprefix('torch.')}")
        self._read_head(bias, dtype)
        return dtype

    def _read_head(self, bias: Tensor | None, dtype: torch.dtype) -> None:
        """Copy the vocabulary projection. Below it is at least one row whose logit is -inf."""
        weight: Any = self.head.weight
        size, width = weight.shape
        shape = size + 8 - size % 8, width
        made = self._matrix
        if (made.shape, made.dtype, made.device) != (shape, dtype, weight.device):
            self.steps.forget()
            self._matrix = torch.zeros(shape, dtype=dtype, device=weight.device)
            self._bias = self._matrix.new_full(shape[:1], -torch.inf)
        self._matrix[:size] = weight
        self._bias[:size] = 0.0 if bias is None else bias.view(-1)

    def _table(self, length: int) -> Tensor:
        """Copies the table of positions."""
        table, self._first = self._family.table(self.decoder, length)
        made = self._tables([[table]], self._words["weight"].dtype)
        if self._tables.moved:
            self.steps.forget()
        self._positions = made[id(table)]
        return self._positions

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """One tensor, which has the dtype and the device of the search."""
        yield self._matrix

    def table_rows(self, longest: int) -> int:
        return len(self._positions)

    def embed_packed(
        self, tokens: Tensor, positions: Tensor, longest: int, rng: Tensor, site: int
    ) -> Input:
        """Embeddings [N, C] of tokens [N] at ``positions`` [N], from 0."""
        # Of a hypothesis that has no possible token, the token may be behind the vocabulary.
        tokens = tokens.clamp_max(len(self._words["weight"]) - 1)
        rows = positions + self._first
        if self._family.prefix == "M2M100":  # counts no pads
            rows = rows.masked_fill(tokens == self._first - 1, self._first - 1)
        x = embed(
            tokens, positions=rows, position_weight=self._positions, p=0.0, rng=rng, site=site,
            **self._words,
        )  # fmt: skip
        return Input(x.to(self._matrix.dtype))

    def project_out(self, x: Tensor) -> Tensor:
        return x

    def output_layer(self, features: Tensor) -> Tensor:
        """Logits [N, V + spare rows] of features [N, C]."""
        return vocabulary_logits(features, self._matrix, added=self._bias)
