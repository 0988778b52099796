"""BERT, RoBERTa, XLM-R and CamemBERT: their embeddings and layers, as our layers read them.

Shapes: B = sentences, L = longest sentence, T = packed tokens, C = model width, P = positions.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightseq_fairseq.huggingface.covered import (
    ACTIVATIONS,
    LayerNorm,
    Linear,
    NotCovered,
    check,
    rate,
    tensor,
)
from lightseq_fairseq.layers.attention import AttentionParts
from lightseq_fairseq.layers.embedding import embed
from lightseq_fairseq.layers.encoder import EncoderParts
from lightseq_fairseq.layers.sites import SITES_PER_LAYER
from lightseq_fairseq.memory.packing import Segments


@dataclass
class _Attention(AttentionParts):
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    out_proj: Linear
    num_heads: int
    dropout: float
    training: bool = True  # the rate is 0 in evaluation


@dataclass
class Layer(EncoderParts):
    self_attn: _Attention
    self_attn_layer_norm: LayerNorm
    fc1: Linear
    fc2: Linear
    final_layer_norm: LayerNorm
    dropout: float
    activation: str
    site: int
    activation_dropout: float = 0.0
    normalize_before: bool = False
    training: bool = True

    @property
    def parts(self) -> list[Linear | LayerNorm]:
        """What has its tensors; one product reads the first three as one."""
        block = self.self_attn
        return [
            block.q_proj, block.k_proj, block.v_proj, block.out_proj, self.self_attn_layer_norm,
            self.fc1, self.fc2, self.final_layer_norm,
        ]  # fmt: skip


class Bert:
    """How to read one ``BertModel``, ``RobertaModel``, ``XLMRobertaModel`` or ``CamembertModel``.

    Args:
        model: the model.
        prefix: of the names of its classes, such as "Bert".
    """

    def __init__(self, model: Any, prefix: str) -> None:
        from transformers.activations import ACT2FN

        self.prefix = prefix
        self._classes: dict[str, type[nn.Module]] = {}
        for place in ("Embeddings", "Layer", "Attention", "SelfAttention", "SelfOutput",
                      "Intermediate", "Output", "Encoder"):  # fmt: skip
            self._classes[place] = getattr(modeling(model), prefix + place)
        self._activation = ACTIVATIONS[model.config.hidden_act]
        self._activation_class = type(ACT2FN[model.config.hidden_act])

    def groups(self, model: Any) -> list[list[Tensor]]:
        """Parameters that one product reads as one."""
        found = []
        for layer in model.encoder.layer:
            block = layer.attention.self
            read: list[Any] = [getattr(block, name, None) for name in ("query", "key", "value")]
            if all(type(x) is nn.Linear and x.bias is not None for x in read):
                found += [[x.weight for x in read], [x.bias for x in read]]
        return found

    def layers(self, model: Any) -> list[Layer]:
        self._check(model.encoder, "Encoder")
        if not len(model.encoder.layer):
            raise NotCovered("it has no layers")
        attention = model.config._attn_implementation or "eager"
        if attention not in ("eager", "sdpa", "flex_attention") and "flash" not in attention:
            raise NotCovered(f"its attention is {attention}")
        return [
            self._layer(layer, place * SITES_PER_LAYER)
            for place, layer in enumerate(model.encoder.layer, 1)
        ]

    def _check(self, module: nn.Module, place: str) -> None:
        check(module, self._classes[place])

    def _layer(self, layer: Any, site: int) -> Layer:
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
        dropout = rate(end.dropout)
        if dropout != rate(behind.dropout):
            raise NotCovered("a layer has two dropout rates")
        return Layer(
            self_attn=_Attention(
                q_proj=Linear.of(block.query), k_proj=Linear.of(block.key),
                v_proj=Linear.of(block.value), out_proj=Linear.of(behind.dense),
                num_heads=block.num_attention_heads,
                # Hugging Face asks the block, not the dropout, whether it trains.
                dropout=float(block.dropout.p) if block.training else 0.0,
            ),
            self_attn_layer_norm=LayerNorm.of(behind.LayerNorm),
            fc1=Linear.of(layer.intermediate.dense), fc2=Linear.of(end.dense),
            final_layer_norm=LayerNorm.of(end.LayerNorm), dropout=dropout,
            activation=self._activation, site=site,
        )  # fmt: skip

    def embedded(
        self, model: Any, segments: Segments, rng: Tensor, ids: Tensor,
        types: Tensor | None, positions: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The embeddings of the real tokens, [T, C].

        ids: int64 [B, L], tokens. types, positions: the same of their types and positions, or None
            for Hugging Face's own.
        """
        module = model.embeddings
        self._check(module, "Embeddings")
        tables = module.word_embeddings, module.position_embeddings, module.token_type_embeddings
        for table in tables:
            check(table, nn.Embedding)
            if table.max_norm is not None or table.scale_grad_by_freq or table.sparse:
                raise NotCovered("an embedding has max_norm, scale_grad_by_freq or sparse")
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
        pad = -1 if tables[0].padding_idx is None else tables[0].padding_idx
        return embed(
            segments.pack(ids), words, rows, sums, scale=1.0, padding_idx=pad,
            p=rate(module.dropout), rng=rng, site=0, norm=LayerNorm.of(module.LayerNorm),
        )  # fmt: skip

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
