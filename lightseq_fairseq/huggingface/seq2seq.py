"""BART, mBART, M2M-100 and NLLB, Pegasus and Marian: their encoders and decoders.

Shapes: B = sentences, L = longest sentence, T = packed tokens, C = model width, P = positions.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightseq_fairseq.huggingface.batch import filled_length
from lightseq_fairseq.huggingface.calls import check_attention, check_whole, options_of
from lightseq_fairseq.huggingface.covered import (
    ACTIVATIONS,
    LayerNorm,
    Linear,
    NotCovered,
    Reads,
    check,
    check_table,
    tensor,
    unsupported_sizes,
)
from lightseq_fairseq.huggingface.parts import (
    ReadAttention,
    ReadDecoderLayer,
    ReadEncoderLayer,
)
from lightseq_fairseq.huggingface.reader import ANY, Call, Reader
from lightseq_fairseq.layers.decoder import run_decoder
from lightseq_fairseq.layers.sites import SITES_PER_LAYER
from lightseq_fairseq.memory.packing import Segments

_PRE_NORM = ("MBart", "M2M100", "Pegasus")
_DECODERS = 1 << 10  # more than the layers of an encoder


class Seq2Seq(Reader):
    """How to read one encoder or decoder.

    Args:
        model: such as a ``BartEncoder``.
        prefix: of the names of its classes, such as "Bart".
    """

    def __init__(self, model: Any, prefix: str) -> None:
        from transformers.activations import ACT2FN

        super().__init__()
        self.prefix, self.is_decoder = prefix, type(model).__name__.endswith("Decoder")
        self.site = int(self.is_decoder)  # a step has one rng for both
        classes = sys.modules[type(model).__module__]
        side = "Decoder" if self.is_decoder else "Encoder"
        self._layer_class = getattr(classes, f"{prefix}{side}Layer")
        self._attention_class = getattr(classes, f"{prefix}Attention")
        self._words_class = getattr(classes, f"{prefix}ScaledWordEmbedding", nn.Embedding)
        kind = "Learned" if prefix in ("Bart", "MBart") else "Sinusoidal"
        self._places_class = getattr(classes, f"{prefix}{kind}PositionalEmbedding")
        self._activation = ACTIVATIONS[model.config.activation_function]
        self._activation_class = type(ACT2FN[model.config.activation_function])

    @staticmethod
    def unsupported(config: Any) -> dict[str, Any]:
        """What our layers lack -> whether the configuration has it."""
        return {
            what: is_so
            for side in ("encoder", "decoder")
            for what, is_so in unsupported_sizes(
                config.activation_function, config.d_model,
                getattr(config, f"{side}_attention_heads"), getattr(config, f"{side}_ffn_dim"),
            ).items()
        }  # fmt: skip

    def forward(
        self, model: Any, reads: Reads, input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None, *more: Any, **given: Any,
    ) -> Any:  # fmt: skip
        """What the module's forward returns, by our layers; raises NotCovered if they do not
        compute it."""
        if more or input_ids is None:
            raise NotCovered("it is called with other arguments than input_ids")
        check_whole(model)
        call = self._call_of_decoder if self.is_decoder else self._call_of_encoder
        return call(model, reads, input_ids, attention_mask, given)

    def _call_of_encoder(
        self, model: Any, reads: Reads, ids: Tensor, mask: Tensor | None, given: dict[str, Any]
    ) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        # Seq2SeqTrainer gives generate the labels, which reach the encoder.
        options = options_of(model.config, given, ("use_cache", "labels"))
        features, states = self.run(model, ANY, Call(
            (ids.shape[0], ids.shape[1]), ids.device, options, model.layers, {"input_ids": ids},
            mask,
        ))  # fmt: skip
        result = BaseModelOutput(last_hidden_state=features)
        if options.wants_states:
            result["hidden_states"] = (*states[:-1], features)
        return result if options.returns_dict else result.to_tuple()

    def _call_of_decoder(
        self, model: Any, reads: Reads, ids: Tensor, mask: Tensor | None, given: dict[str, Any]
    ) -> Any:
        from transformers.modeling_outputs import (
            BaseModelOutputWithPastAndCrossAttentions as Output,
        )

        memory, of_memory = (
            given.pop(name, None) for name in ("encoder_hidden_states", "encoder_attention_mask")
        )
        if memory is None:
            raise NotCovered("it has no encoder")
        if any(given.get(name) is not None for name in ("cache", "past_key_values")):
            raise NotCovered("it has a cache, as in generation", is_usual=True)
        if given.pop("use_cache", None) and not torch.is_grad_enabled():
            raise NotCovered("it makes a cache, as for generation", is_usual=True)
        options = options_of(model.config, given, ("cache_position",))
        if options.wants_states:
            raise NotCovered("it returns hidden states of the decoder")
        features, _ = self.run(model, reads, Call(
            (ids.shape[0], ids.shape[1]), ids.device, options, model.layers, {"input_ids": ids},
            mask, memory=memory, memory_mask=of_memory,
        ))  # fmt: skip
        result = Output(last_hidden_state=features)
        return result if options.returns_dict else result.to_tuple()

    def run_layers(
        self, layers: list[Any], last: LayerNorm | None, x: Tensor, memory: Tensor | None,
        sides: Mapping[str, Segments], rng: Tensor, again: bool, states: list[Tensor] | None,
    ) -> Tensor:  # fmt: skip
        if memory is None:
            return super().run_layers(layers, last, x, memory, sides, rng, again, states)
        read = sides["memory"].pack(memory).to(x.dtype)
        return run_decoder(
            layers, last, x, read, sides["own"], sides["memory"], rng,
            checkpoint_activations=again,
        )  # fmt: skip

    def last(self, model: Any) -> LayerNorm | None:
        norm = getattr(model, "layer_norm", None)
        return None if norm is None else LayerNorm.of(norm)

    def weight(self, model: Any) -> Tensor:
        weight: Tensor = model.embed_tokens.weight
        return weight

    def rate(self, model: Any) -> float:
        return float(model.dropout) if model.training else 0.0

    def can_be_graph(self, model: Any, call: Call) -> bool:
        drops = model.training and model.layerdrop > 0.0
        # A longer table of sines is made here, not within a graph.
        self.table(model, filled_length(call.shape[1], self.most(model)))
        return not drops

    def graph_key(self, model: Any) -> Any:
        places = model.embed_positions
        return places.weights.data_ptr() if self.prefix == "M2M100" else None

    def most(self, model: Any) -> int:
        """Tokens of a sentence for which there are positions."""
        places = model.embed_positions
        if self.prefix == "M2M100":
            return len(places.weights) - places.padding_idx - 1
        return len(places.weight) - getattr(places, "offset", 0)

    def kept(self, model: Any, layers: list[Any]) -> list[Any]:
        """The layers that layer drop keeps; it draws what Hugging Face draws."""
        if not model.training or not model.layerdrop > 0.0:
            return layers
        return [layer for layer in layers if not torch.rand([]) < model.layerdrop]

    def layers(self, model: Any) -> list[Any]:
        check_attention(model.config)
        return [self._layer(layer, n) for n, layer in enumerate(model.layers, 1)]

    def _layer(self, layer: Any, place: int) -> ReadEncoderLayer | ReadDecoderLayer:
        check(layer, self._layer_class)
        check(layer.activation_fn, self._activation_class)

        def attention(block: Any) -> ReadAttention:
            check(block, self._attention_class)
            return ReadAttention(
                q_proj=Linear.of(block.q_proj), k_proj=Linear.of(block.k_proj),
                v_proj=Linear.of(block.v_proj), out_proj=Linear.of(block.out_proj),
                num_heads=block.num_heads,
                dropout=float(block.dropout) if block.training else 0.0,
            )  # fmt: skip

        common: dict[str, Any] = {
            "self_attn": attention(layer.self_attn),
            "self_attn_layer_norm": LayerNorm.of(layer.self_attn_layer_norm),
            "fc1": Linear.of(layer.fc1),
            "fc2": Linear.of(layer.fc2),
            "final_layer_norm": LayerNorm.of(layer.final_layer_norm),
            "dropout": float(layer.dropout) if layer.training else 0.0,
            "activation_dropout": float(layer.activation_dropout) if layer.training else 0.0,
            "activation": self._activation,
            # A step has one rng for both.
            "site": (place + (_DECODERS if self.is_decoder else 0)) * SITES_PER_LAYER,
            "normalize_before": self.prefix in _PRE_NORM,
        }
        if not self.is_decoder:
            return ReadEncoderLayer(**common)
        return ReadDecoderLayer(
            **common, encoder_attn=attention(layer.encoder_attn),
            encoder_attn_layer_norm=LayerNorm.of(layer.encoder_attn_layer_norm),
        )  # fmt: skip

    def table(self, model: Any, length: int) -> tuple[Tensor, int]:
        """The table of positions, and its row of a sentence's first token; for ``length`` tokens.

        Raises NotCovered if there are fewer positions, or something changed what they compute.
        """
        places = model.embed_positions
        check(places, self._places_class)
        if self.prefix != "M2M100":
            if length > self.most(model):
                raise NotCovered("a sentence has more tokens than there are positions")
            return tensor(places.weight), getattr(places, "offset", 0)
        first = places.padding_idx + 1
        if first + length > len(places.weights):
            places.make_weights(first + length + places.offset, places.embedding_dim,
                                places.padding_idx)  # fmt: skip
        return places.weights, first

    def words(self, model: Any) -> dict[str, Any]:
        """Arguments of ``layers.embed`` that do not depend on the tokens."""
        words = model.embed_tokens
        check_table(words, self._words_class)
        own = getattr(words, "embed_scale", None)
        norm = getattr(model, "layernorm_embedding", None)
        return {
            "weight": tensor(words.weight),
            "scale": float(model.embed_scale if own is None else own),
            "padding_idx": -1 if words.padding_idx is None else words.padding_idx,
            "norm": None if norm is None else LayerNorm.of(norm),
        }

    def embedding(
        self, model: Any, segments: Segments, tokens: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        ids = tokens["input_ids"]
        words, length = self.words(model), ids.shape[1]
        table, first = self.table(model, length)
        if self.prefix == "M2M100":  # positions of real tokens, as in fairseq
            is_real = ids.ne(first - 1).int()
            rows = (is_real.cumsum(1) * is_real).long() + first - 1
        else:  # columns
            rows = (torch.arange(length, device=ids.device) + first).expand(ids.shape)
        return {
            **words,
            "tokens": segments.pack(ids),
            "positions": segments.pack(rows),
            "position_weight": table.to(words["weight"].dtype),
        }
