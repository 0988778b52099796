"""A decoder of Hugging Face as our search reads it.

Shapes: B = sentences, N = B * num_beams, L = longest prompt, R = rows of a step, C = model width,
V = vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightseq_fairseq.base.errors import GPUHangs, UserError
from lightseq_fairseq.generation.decoder import StepDecoder
from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.results import LazyHypothesis
from lightseq_fairseq.generation.search import search
from lightseq_fairseq.generation.source import SearchBatch
from lightseq_fairseq.generation.turns import Turns
from lightseq_fairseq.huggingface.asked import Asked
from lightseq_fairseq.huggingface.calls import check_attention, check_whole, rates_of, read_copies
from lightseq_fairseq.huggingface.copies import KeptCopies
from lightseq_fairseq.huggingface.covered import NotCovered, check
from lightseq_fairseq.layers import vocabulary_logits
from lightseq_fairseq.layers.embedding import embed
from lightseq_fairseq.layers.node import Input

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Searched(nn.Module):
    """What ``generation.search`` reads of a decoder; the parameters stay the model's own.

    Graphs read the parameters' memory, or copies which each search makes anew: of those that one
    product reads as one, of transposed ones, under autocast of all matrices, and of the vocabulary
    projection, whose rows are made a multiple of 8.

    Args:
        decoder: an accelerated ``BartDecoder`` or ``GPT2Model``, for example.
        head: the projection to the vocabulary.

    Attributes:
        reads: arguments of the loop that change nothing, or that are read here or by the encoder.
        kind: of the classes of transformers for results.
    """

    embeds_on_host = False
    reads_source: bool
    reads: tuple[str, ...]
    kind: str
    _words: dict[str, Any]
    _bias: Tensor
    _positions: Tensor
    _first: int

    def __init__(self, decoder: Any, head: nn.Module) -> None:
        super().__init__()
        self.family, self.decoder, self.head = decoder._lightseq.family, decoder, head
        self.steps, self.source = StepDecoder(), None
        self._copies, self._tables = KeptCopies(), KeptCopies()
        self._matrix = torch.empty(0, 0)
        self._turns = Turns()

    @staticmethod
    @abstractmethod
    def modules_of(model: Any) -> tuple[Any, ...]:
        """The modules that the loop of Hugging Face calls: the model, and in it the decoder."""

    def is_of(self, decoder: nn.Module, head: nn.Module) -> bool:
        return self.decoder is decoder and self.head is head

    @abstractmethod
    def results(
        self, input_ids: Tensor, given: Mapping[str, Any], asked: Asked, options: SearchOptions,
        bias: Tensor | None,
    ) -> list[list[LazyHypothesis]]:  # fmt: skip
        """See ``generation.search``. Raises NotCovered if it does not cover this.

        input_ids: int64 [N, L]. given: the other arguments of the loop. bias: [1, V], of the
        logits.
        """

    def _found(
        self, batch: SearchBatch, options: SearchOptions, first: int
    ) -> list[list[LazyHypothesis]]:
        """What the search finds; its arguments are those of ``generation.search``."""
        device, rng = self._matrix.device, None
        if options.sampled:  # from the device's generator, as there
            rng = torch.zeros(2, dtype=torch.int64, device=device)
            rng[:1].random_()
        try:
            with torch.autocast(device.type, enabled=False):
                return search(self.steps, self.source, self, [batch], options, first, rng)[0]
        except GPUHangs:
            raise
        except UserError:
            raise NotCovered("a sentence has no result with a finite score") from None

    def _read(self, length: int, bias: Tensor | None) -> torch.dtype:
        """Read the layers, and copy what is to be copied; the dtype of both.

        length: positions of a hypothesis. bias: [1, V], of the logits.
        """
        decoder, family = self.decoder, self.family
        check_whole(decoder)
        check_attention(decoder.config)
        check(self.head, nn.Linear)
        words = family.weight(decoder)
        if self.head.bias is not None or self.head.weight.device != words.device:
            raise NotCovered("the vocabulary projection has a bias or is elsewhere")
        self.layers, self.layer_norm = family.layers(decoder), family.last(decoder)
        if not self.layers:
            raise NotCovered("it has no layers")
        rates = rates_of(self.layers, family.rate(decoder))
        if any(rates) or (decoder.training and getattr(decoder, "layerdrop", 0.0)):
            raise NotCovered("dropout is on: call model.eval() before generate")
        self._words = family.words(decoder)
        dtype = read_copies(self.layers, self._words["weight"], self.layer_norm, self._copies)
        if dtype not in _DTYPES:
            raise NotCovered(f"its parameters are {str(dtype).removeprefix('torch.')}")
        table, self._first = family.table(decoder, length)
        self._positions = self._tables([[table]], self._words["weight"].dtype)[id(table)]
        if self._copies.moved or self._tables.moved:
            self.steps.forget()
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

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """One tensor, which has the dtype and the device of the search."""
        yield self._matrix

    def table_rows(self, longest: int) -> int:
        return len(self._positions)

    def embed_packed(
        self, tokens: Tensor, positions: Tensor, longest: int, rng: Tensor, site: int
    ) -> Input:
        """Embeddings [R, C] of tokens [R] at ``positions`` [R], from 0."""
        # Of a hypothesis that has no possible token, the token may be behind the vocabulary.
        tokens = tokens.clamp_max(len(self._words["weight"]) - 1)
        x = embed(
            tokens, positions=self._rows_of(tokens, positions), position_weight=self._positions,
            p=0.0, rng=rng, site=site, **self._words,
        )  # fmt: skip
        return Input(x.to(self._matrix.dtype))

    def _rows_of(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The rows of the table of positions."""
        return positions + self._first

    def project_out(self, x: Tensor) -> Tensor:
        return x

    def output_layer(self, features: Tensor) -> Tensor:
        """Logits [R, V + spare rows] of features [R, C]."""
        return vocabulary_logits(features, self._matrix, added=self._bias)


def real_tokens(mask: Tensor | None, shape: Sequence[int], beam: int) -> Tensor:
    """1 at the real tokens, 0 at pads: int64 [B, length], on the CPU.

    mask: [N, length], or None. shape: (B, length).

    Raises NotCovered if a sentence has no real token.
    """
    if mask is None:
        return torch.ones(*shape, dtype=torch.int64)
    if mask.shape[1:] != shape[1:]:
        raise NotCovered("the attention mask is not of the shape [sentences, tokens]")
    real = mask[::beam].ne(0).to("cpu", torch.int64)
    if not bool(real.any(1).all()):
        raise NotCovered("a sentence has only pads")
    return real
