"""What all accelerated modules do in a call, whatever their family: find the real tokens, embed
them, run the layers, and pad the result. In training and in evaluation a call is replayed as a CUDA
graph where it can be.

Shapes: B = sentences, L = longest sentence, S = longest sentence of the encoder, T = packed tokens,
C = model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightseq_fairseq.huggingface.batch import Batch, filled_length, packed_call
from lightseq_fairseq.huggingface.calls import (
    GIVEN,
    Options,
    check_dtypes,
    given_segments,
    rates_of,
    read_copies,
    recomputes,
    rng_of,
    rows_of_head,
    segments_of,
    step_segments,
)
from lightseq_fairseq.huggingface.covered import LayerNorm, NotCovered, Reads
from lightseq_fairseq.huggingface.graphed import FeatureGraphs, GradientGraphs, captures
from lightseq_fairseq.layers.decoder import fused_groups, product_weights
from lightseq_fairseq.layers.embedding import embed
from lightseq_fairseq.layers.encoder import run_encoder
from lightseq_fairseq.memory.packing import Segments

ANY = Reads(pads=False, first=False)  # nobody reads the rows of pads in an encoder's result


@dataclass
class Call:
    """A call of a module.

    Attributes:
        shape: (B, L).
        device: of the result.
        options: see `Options`.
        layers: Hugging Face's.
        tokens: int64 [B, L] each, by their names; empty if Hugging Face's modules embed.
        mask: [B, L], not 0 at real tokens; None: all are.
        embedded: embeddings [B, L, C] by Hugging Face's modules, for what ours do not cover.
        packed: ``cu_seq_lens_q`` and ``max_length_q``, if the caller has packed the sentences.
        memory: the encoder's result [B, S, C], which a decoder reads.
        memory_mask: [B, S], as ``mask``.
    """

    shape: tuple[int, int]
    device: torch.device
    options: Options
    layers: Any
    tokens: dict[str, Tensor] = field(default_factory=dict)
    mask: Tensor | None = None
    embedded: Callable[[], Tensor] | None = None
    packed: tuple[Tensor, int | None] | None = None
    memory: Tensor | None = None
    memory_mask: Tensor | None = None


class Reader(ABC):
    """How to read one module; a family is a subclass.

    Attributes:
        causal: a token attends only to itself and to earlier ones.
        site: the dropout site of the embedding.
    """

    causal = False
    site = 0

    def __init__(self) -> None:
        self._features = FeatureGraphs("passes of the encoder")
        self._passes = GradientGraphs("passes of the encoder with their backward")

    @abstractmethod
    def layers(self, model: Any) -> list[Any]:
        """The layers as ours read them. Raises NotCovered if one computes something else."""

    def last(self, model: Any) -> LayerNorm | None:
        """The LayerNorm behind the layers."""
        return None

    @abstractmethod
    def weight(self, model: Any) -> Tensor:
        """A parameter of the embedding, whose dtype the result has."""

    @abstractmethod
    def rate(self, model: Any) -> float:
        """The dropout rate behind the embedding, 0 in evaluation."""

    def embedding(
        self, model: Any, segments: Segments, tokens: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Arguments of ``layers.embed`` for the real tokens. Raises NotCovered if something has
        changed what the embeddings compute, or if there are too few positions."""
        raise NotCovered("its embedding is Hugging Face's")

    def most(self, model: Any) -> int:
        """Tokens of a sentence for which there are positions; 0: it has none."""
        return 0

    def kept(self, model: Any, layers: list[Any]) -> list[Any]:
        """The layers that layer drop keeps."""
        return layers

    def place(  # noqa: B027  (most families have positions in their embedding)
        self, model: Any, layers: list[Any], segments: Segments, tokens: Mapping[str, Tensor]
    ) -> None:
        """Let the layers know the positions of the tokens, if they and not the embedding do."""

    def groups(self, model: Any) -> list[list[Tensor]]:
        """Parameters that one product reads as one."""
        return fused_groups(self.layers(model))

    def products(self, model: Any) -> list[list[Tensor]]:
        """The weights that each product of the layers reads as one."""
        return product_weights(self.layers(model))

    def can_be_graph(self, model: Any, call: Call) -> bool:
        """Whether the embedding covers such a call, and nothing is drawn on the host."""
        return False

    def graph_key(self, model: Any) -> Any:
        """On what else than parameters a captured call depends."""
        return None

    def run(self, model: Any, reads: Reads, call: Call) -> tuple[Tensor, list[Tensor]]:
        """The result [B, L, C]; and if they are asked for, what each layer and the last LayerNorm
        compute, [B, L, C] each. Raises NotCovered if our layers do not compute it."""
        layers, last = self.layers(model), self.last(model)
        if not layers:
            raise NotCovered("it has no layers")
        weight, again = self.weight(model), recomputes(call.layers)
        rates, rng = rates_of(layers, self.rate(model)), None
        if self._can_be_graph(model, call, rates, again):
            check_dtypes(layers, weight, last)
            batch = self.on_host(model, reads, call)
            rng = rng_of(rates, call.device) if torch.is_grad_enabled() else None
            result = self.by_graph(model, call, batch, rng, rates)
            if result is not None:
                return result, []
        sides = self._sides(reads, call)
        try:
            arguments = self.embedding(model, sides["own"], call.tokens) if call.tokens else None
        except NotCovered:
            if call.embedded is None:
                raise
            arguments = None
        read_copies(layers, weight, last)
        self.place(model, layers, sides["own"], call.tokens)
        # From here on nothing raises NotCovered: Hugging Face's forward would draw other masks.
        rng = rng_of(rates, call.device) if rng is None else rng
        if arguments is not None:
            x = embed(**arguments, p=rates[0], rng=rng, site=self.site)
        else:
            assert call.embedded is not None
            x = sides["own"].pack(call.embedded())
        states: list[Tensor] | None = [] if call.options.wants_states else None
        result = self._computed(
            model, self.kept(model, layers), last, x, call.memory, sides, rng, again, states
        )
        return result, [sides["own"].pad(rows.to(weight.dtype)) for rows in states or ()]

    def _computed(
        self, model: Any, layers: list[Any], last: LayerNorm | None, x: Tensor,
        memory: Tensor | None, sides: Mapping[str, Segments], rng: Tensor, again: bool = False,
        states: list[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """The result [B, L, C] for embeddings x [T, C]; in a captured step perhaps what its head
        gets, see `rows_of_head`."""
        dtype = self.weight(model).dtype
        if layers:
            x = x.to(layers[0].fc1.weight.dtype)
        with torch.autocast(x.device.type, enabled=False):
            y = self.run_layers(layers, last, x, memory, sides, rng, again, states).to(dtype)
        rows = rows_of_head("source" if memory is None else "target", y)
        return sides["own"].pad(y) if rows is None else rows

    def run_layers(
        self, layers: list[Any], last: LayerNorm | None, x: Tensor, memory: Tensor | None,
        sides: Mapping[str, Segments], rng: Tensor, again: bool, states: list[Tensor] | None,
    ) -> Tensor:  # fmt: skip
        """What the layers make of x [T, C]."""
        return run_encoder(
            layers, last, x, sides["own"], rng, causal=self.causal, checkpoint_activations=again,
            states=states,
        )  # fmt: skip

    def _sides(self, reads: Reads, call: Call) -> dict[str, Segments]:
        """The real tokens: "own", and of a decoder those of the "memory"."""
        own = "source" if call.memory is None else "target"
        segments = step_segments(own, call.shape)
        if segments is None and call.packed is not None:
            segments = given_segments(*call.packed, call.mask, call.shape)
        elif segments is None:
            segments = segments_of(call.mask, call.shape, call.device, reads)
        sides = {"own": segments}
        if call.memory is not None:
            shape = call.memory.shape[0], call.memory.shape[1]
            found = step_segments("source", shape)
            if found is None:
                found = segments_of(call.memory_mask, shape, call.device, ANY)
            sides["memory"] = found
        return sides

    def _can_be_graph(
        self, model: nn.Module, call: Call, rates: tuple[float, ...], again: bool
    ) -> bool:
        return (
            captures(call.device) and bool(call.tokens) and call.packed is None
            and not call.options.wants_states and not again and GIVEN.get() is None
            # A replica of DataParallel has no parameters.
            and not getattr(model, "_is_replica", False)
            and (torch.is_grad_enabled() or not any(rates))
            and self.can_be_graph(model, call)
        )  # fmt: skip

    def on_host(self, model: Any, reads: Reads, call: Call) -> Batch:
        """The call, packed on the host, which waits for its masks. Raises NotCovered if the head
        reads rows of pads."""
        length = filled_length(call.shape[1], self.most(model))
        pad = getattr(model.config, "pad_token_id", None) or 0
        tokens = {
            name: nn.functional.pad(x.expand(call.shape), (0, length - call.shape[1]),
                                    value=pad if name == "input_ids" else 0)
            for name, x in call.tokens.items()
        }  # fmt: skip
        sides = {"own": (call.mask, call.shape, length)}
        if call.memory is not None:
            shape = call.memory.shape[0], call.memory.shape[1]
            longest = filled_length(shape[1], 0)
            tokens["memory"] = nn.functional.pad(call.memory, (0, 0, 0, longest - shape[1]))
            sides["memory"] = call.memory_mask, shape, longest
        return packed_call(tokens, sides, reads)

    def by_graph(
        self, model: Any, call: Call, batch: Batch, rng: Tensor | None, rates: tuple[float, ...]
    ) -> Tensor | None:
        """The result [B, L, C], by CUDA graphs if there is a GPU; None if another pass waits for
        its backward.

        rng: int64 [2] on the device; None: there are no gradients. rates: of the dropout.
        """

        def compute(
            tensors: Mapping[str, Tensor], sides: Mapping[str, Segments], rng: Tensor
        ) -> Tensor:
            layers, last = self.layers(model), self.last(model)
            arguments = self.embedding(model, sides["own"], tensors)
            read_copies(layers, self.weight(model), last)
            self.place(model, layers, sides["own"], tensors)
            x = embed(**arguments, p=rates[0], rng=rng, site=self.site)
            return self._computed(model, layers, last, x, tensors.get("memory"), sides, rng)

        kind = call.device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        key = autocast, rates, self.graph_key(model)
        result: Tensor | None
        if rng is None:
            result = self._features.features(model, call.device, batch, key, compute)
        else:
            memory = batch.given("memory")
            given = {} if memory is None or not memory.requires_grad else {"memory": memory}
            batch = batch.with_tensor("/rng", rng)
            result = self._passes.features(model, call.device, batch, key, compute, given)
        return None if result is None else result[:, : call.shape[1]]
