"""BERT, RoBERTa, XLM-R and CamemBERT: their embeddings and layers, as our layers read them.

Shapes: B = sentences, L = longest sentence, T = packed tokens, C = model width, P = positions.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightseq_fairseq.huggingface.calls import Options, check_attention, check_whole, options_of
from lightseq_fairseq.huggingface.covered import (
    ACTIVATIONS,
    LayerNorm,
    Linear,
    NotCovered,
    Reads,
    check,
    check_table,
    rate,
    rate_now,
    tensor,
    unsupported_sizes,
)
from lightseq_fairseq.huggingface.parts import ReadAttention, ReadEncoderLayer
from lightseq_fairseq.huggingface.reader import Call, Reader
from lightseq_fairseq.layers.sites import SITES_PER_LAYER
from lightseq_fairseq.memory.packing import Segments


class Bert(Reader):
    """How to read one ``BertModel``, ``RobertaModel``, ``XLMRobertaModel`` or ``CamembertModel``.

    Args:
        model: the model.
        prefix: of the names of its classes, such as "Bert".
    """

    def __init__(self, model: Any, prefix: str) -> None:
        from transformers.activations import ACT2FN

        super().__init__()
        self.prefix = prefix
        self._classes: dict[str, type[nn.Module]] = {}
        for place in ("Embeddings", "Layer", "Attention", "SelfAttention", "SelfOutput",
                      "Intermediate", "Output", "Encoder"):  # fmt: skip
            self._classes[place] = getattr(modeling(model), prefix + place)
        self._activation = ACTIVATIONS[model.config.hidden_act]
        self._activation_class = type(ACT2FN[model.config.hidden_act])

    @staticmethod
    def unsupported(config: Any) -> dict[str, Any]:
        """What our layers lack -> whether the configuration has it."""
        return {
            "a decoder (is_decoder)": config.is_decoder,
            "cross attention (add_cross_attention)": config.add_cross_attention,
            f"chunk_size_feed_forward {config.chunk_size_feed_forward}": (
                config.chunk_size_feed_forward
            ),
            **unsupported_sizes(
                config.hidden_act, config.hidden_size, config.num_attention_heads,
                config.intermediate_size,
            ),
        }  # fmt: skip

    def forward(
        self, model: Any, reads: Reads, input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None, inputs_embeds: Tensor | None = None,
        *more: Any, **given: Any,
    ) -> Any:  # fmt: skip
        """What the encoder's forward returns, by our layers; raises NotCovered if they do not
        compute it."""
        if more or (input_ids is None) == (inputs_embeds is None):
            raise NotCovered("it is called with other arguments")
        if model.config.is_decoder:
            raise NotCovered("it is a decoder")
        cu_seqlens, longest = given.pop("cu_seq_lens_q", None), given.pop("max_length_q", None)
        unread = ("cu_seq_lens_k", "max_length_k", "use_cache")
        options = options_of(model.config, given, unread)
        check_whole(model.encoder)
        like = input_ids if input_ids is not None else inputs_embeds
        assert like is not None
        tokens = {"input_ids": input_ids, "token_type_ids": token_type_ids,
                  "position_ids": position_ids}  # fmt: skip

        def embedded() -> Tensor:
            """Hugging Face's own embedding, for example with hooks (NEFTune)."""
            padded: Tensor = model.embeddings(**tokens, inputs_embeds=inputs_embeds)
            return padded

        features, states = self.run(model, reads, Call(
            (like.shape[0], like.shape[1]), like.device, options, model.encoder.layer,
            {} if input_ids is None else {n: x for n, x in tokens.items() if x is not None},
            attention_mask, embedded, None if cu_seqlens is None else (cu_seqlens, longest),
        ))  # fmt: skip
        return self._result(model, options, features, states[:-1])

    def _result(self, model: Any, options: Options, features: Tensor, inner: list[Tensor]) -> Any:
        from transformers.modeling_outputs import (
            BaseModelOutputWithPoolingAndCrossAttentions as Output,
        )

        result = Output(last_hidden_state=features)
        if model.pooler is not None:
            result["pooler_output"] = model.pooler(features)
        if options.wants_states:
            result["hidden_states"] = (*inner, features)
        return result if options.returns_dict else result.to_tuple()

    def weight(self, model: Any) -> Tensor:
        weight: Tensor = model.embeddings.word_embeddings.weight
        return weight

    def rate(self, model: Any) -> float:
        return rate_now(model.embeddings.dropout)

    def can_be_graph(self, model: Any, call: Call) -> bool:
        try:
            self._tables(model.embeddings)
        except NotCovered:
            return False
        return call.shape[1] <= self.most(model)

    def _tables(self, module: Any) -> list[Any]:
        """The embeddings of words, positions and types."""
        self._check(module, "Embeddings")
        tables = [module.word_embeddings, module.position_embeddings, module.token_type_embeddings]
        for table in tables:
            check_table(table)
        rate(module.dropout)
        LayerNorm.of(module.LayerNorm)
        return tables

    def groups(self, model: Any) -> list[list[Tensor]]:
        """Parameters that one product reads as one."""
        found = []
        for layer in model.encoder.layer:
            block = layer.attention.self
            read: list[Any] = [getattr(block, name, None) for name in ("query", "key", "value")]
            if all(type(x) is nn.Linear and x.bias is not None for x in read):
                found += [[x.weight for x in read], [x.bias for x in read]]
        return found

    def layers(self, model: Any) -> list[ReadEncoderLayer]:
        self._check(model.encoder, "Encoder")
        check_attention(model.config)
        return [
            self._layer(layer, place * SITES_PER_LAYER)
            for place, layer in enumerate(model.encoder.layer, 1)
        ]

    def _check(self, module: nn.Module, place: str) -> None:
        check(module, self._classes[place])

    def _layer(self, layer: Any, site: int) -> ReadEncoderLayer:
        attention, end = layer.attention, layer.output
        block, behind = attention.self, attention.output
        self._check(layer, "Layer")
        self._check(attention, "Attention")
        self._check(block, "SelfAttention")
        self._check(behind, "SelfOutput")
        self._check(layer.intermediate, "Intermediate")
        self._check(end, "Output")
        check(layer.intermediate.intermediate_act_fn, self._activation_class)
        check(block.dropout, nn.Dropout)
        return ReadEncoderLayer(
            self_attn=ReadAttention(
                q_proj=Linear.of(block.query), k_proj=Linear.of(block.key),
                v_proj=Linear.of(block.value), out_proj=Linear.of(behind.dense),
                num_heads=block.num_attention_heads,
                # Hugging Face asks the block, not the dropout, whether it trains.
                dropout=float(block.dropout.p) if block.training else 0.0,
            ),
            self_attn_layer_norm=LayerNorm.of(behind.LayerNorm),
            fc1=Linear.of(layer.intermediate.dense), fc2=Linear.of(end.dense),
            final_layer_norm=LayerNorm.of(end.LayerNorm), dropout=rate(behind.dropout),
            feed_forward_dropout=rate(end.dropout), activation=self._activation, site=site,
        )  # fmt: skip

    def embedding(
        self, model: Any, segments: Segments, tokens: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        module, ids = model.embeddings, tokens["input_ids"]
        types, positions = tokens.get("token_type_ids"), tokens.get("position_ids")
        tables = self._tables(module)
        words, places, kinds = (tensor(table.weight) for table in tables)
        if positions is not None:
            are_rows = (positions >= 0) & (positions < len(places))
            torch._assert_async(are_rows.all(), "positions in [0, P)")
        elif ids.shape[1] > self.most(model):
            raise NotCovered("a sentence may have more tokens than there are positions")
        else:
            positions = self.positions(module, ids)
        rows = segments.pack(positions.expand(ids.shape))
        # One table has all sums of a position and a type.
        if tables[1].padding_idx is not None:  # its row gets no gradient
            every = torch.arange(len(places), device=places.device)
            places = functional.embedding(every, places, tables[1].padding_idx)
        if types is None:
            sums = places + kinds[0]
        else:
            sums = (kinds[:, None] + places).flatten(0, 1)
            rows = rows + segments.pack(types.expand(ids.shape)) * len(places)
        return {
            "tokens": segments.pack(ids),
            "weight": words,
            "positions": rows,
            "position_weight": sums,
            "scale": 1.0,
            "padding_idx": -1 if tables[0].padding_idx is None else tables[0].padding_idx,
            "norm": LayerNorm.of(module.LayerNorm),
        }

    def most(self, model: Any) -> int:
        """Tokens of a sentence for which there are positions."""
        module = model.embeddings
        first = 0 if self.prefix == "Bert" else module.padding_idx + 1
        return len(module.position_embeddings.weight) - first

    def positions(self, module: Any, ids: Tensor) -> Tensor:
        """Hugging Face's positions of tokens, int64 [B, L] or [1, L]."""
        if self.prefix == "Bert":
            return torch.arange(ids.shape[1], device=ids.device)[None]
        is_real = ids.ne(module.padding_idx).int()
        return (is_real.cumsum(1) * is_real).long() + module.padding_idx


def modeling(model: Any) -> Any:
    """The module of transformers that defines the class of ``model``."""
    return sys.modules[type(model).__module__]
