"""ModernBERT: its embedding and layers, with rotary positions, windows and gated feed-forwards.

Shapes: B = sentences, L = longest sentence, T = packed tokens, C = model width, D = head width.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightseq_fairseq.huggingface.calls import check_attention, check_whole, options_of
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


class ModernBert(Reader):
    """How to read one ``ModernBertModel``."""

    def __init__(self, model: Any, prefix: str) -> None:
        from transformers.activations import ACT2FN

        super().__init__()
        classes = sys.modules[type(model).__module__]
        names = ("Embeddings", "EncoderLayer", "Attention", "MLP", "RotaryEmbedding")
        self._classes = {name: getattr(classes, f"ModernBert{name}") for name in names}
        self._activation = ACTIVATIONS[model.config.hidden_activation]
        self._activation_class = type(ACT2FN[model.config.hidden_activation])

    @staticmethod
    def unsupported(config: Any) -> dict[str, Any]:
        """What our layers lack -> whether the configuration has it."""
        rotations = {config.rope_parameters[kind]["rope_type"] for kind in config.layer_types}
        changing = {kind for kind in rotations if "dynamic" in kind or kind == "longrope"}
        return {
            f"rotary positions of type {', '.join(changing)}": changing,
            f"a window of {config.local_attention} tokens": config.local_attention < 2,
            **unsupported_sizes(
                config.hidden_activation, config.hidden_size, config.num_attention_heads,
                config.intermediate_size,
            ),
        }  # fmt: skip

    def forward(
        self, model: Any, reads: Reads, input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None, *more: Any, position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None, **given: Any,
    ) -> Any:  # fmt: skip
        """What the model's forward returns, by our layers; raises NotCovered if they do not compute
        it."""
        from transformers.modeling_outputs import BaseModelOutput

        like = input_ids if input_ids is not None else inputs_embeds
        if more or like is None or None not in (input_ids, inputs_embeds):
            raise NotCovered("it is called with other arguments")
        if isinstance(attention_mask, dict):
            raise NotCovered("it is called with a mask for each kind of layer")
        if input_ids is None and position_ids is not None:
            raise NotCovered("it is called with inputs_embeds and position_ids")
        cu_seqlens, longest = given.pop("cu_seq_lens_q", None), given.pop("max_length_q", None)
        # The last two are those of input_ids, in transformers 5.0.
        unread = ("cu_seq_lens_k", "max_length_k", "batch_size", "seq_len")
        options = options_of(model.config, given, unread)
        check_whole(model)
        tokens = {"input_ids": input_ids, "position_ids": position_ids}

        def embedded() -> Tensor:
            """Hugging Face's own embedding, for example with hooks (NEFTune)."""
            padded: Tensor = model.embeddings(input_ids=input_ids, inputs_embeds=inputs_embeds)
            return padded

        features, states = self.run(model, reads, Call(
            (like.shape[0], like.shape[1]), like.device, options, model.layers,
            {name: x for name, x in tokens.items() if x is not None}, attention_mask, embedded,
            None if cu_seqlens is None else (cu_seqlens, longest),
        ))  # fmt: skip
        result = BaseModelOutput(last_hidden_state=features)
        if options.wants_states:
            # In transformers 5.0 the last one is that before the LayerNorm.
            is_last = bool(getattr(model, "_can_record_outputs", None))
            result["hidden_states"] = (*states[:-1], features if is_last else states[-1])
        return result if options.returns_dict else result.to_tuple()

    def last(self, model: Any) -> LayerNorm:
        return _norm(model.final_norm)

    def weight(self, model: Any) -> Tensor:
        weight: Tensor = model.embeddings.tok_embeddings.weight
        return weight

    def rate(self, model: Any) -> float:
        return rate_now(model.embeddings.drop)

    def can_be_graph(self, model: Any, call: Call) -> bool:
        try:
            self._check_embedding(model.embeddings)
        except NotCovered:
            return False
        return True

    def groups(self, model: Any) -> list[list[Tensor]]:
        """Parameters that one product reads as one: none, as one has queries, keys and values."""
        return []

    def products(self, model: Any) -> list[list[Tensor]]:
        return [
            [module.weight]
            for layer in model.layers
            for module in (layer.attn.Wqkv, layer.attn.Wo, layer.mlp.Wi, layer.mlp.Wo)
        ]

    def embedding(
        self, model: Any, segments: Segments, tokens: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        module = model.embeddings
        self._check_embedding(module)
        table = module.tok_embeddings
        return {
            "tokens": segments.pack(tokens["input_ids"]),
            "weight": tensor(table.weight),
            "positions": None,
            "position_weight": None,
            "scale": 1.0,
            "padding_idx": -1 if table.padding_idx is None else table.padding_idx,
            "norm": _norm(module.norm),
        }

    def _check_embedding(self, module: Any) -> None:
        self._check(module, "Embeddings")
        check_table(module.tok_embeddings)
        rate(module.drop)
        _norm(module.norm)

    def place(
        self, model: Any, layers: list[Any], segments: Segments, tokens: Mapping[str, Tensor]
    ) -> None:
        """Give the layers the rotations [T, D / 2] of the tokens, in float32 as Hugging Face's."""
        positions = tokens.get("position_ids")
        if positions is None:
            positions = torch.arange(segments.shape[1], device=segments.index.device)[None]
        rows = segments.pack(positions.expand(segments.shape)).float()[:, None]
        known: dict[str, tuple[Tensor, Tensor]] = {}
        for layer, theirs in zip(layers, model.layers, strict=True):
            kind = theirs.attention_type
            if kind not in known:
                angles = rows * getattr(model.rotary_emb, f"{kind}_inv_freq").float()
                factor = getattr(model.rotary_emb, f"{kind}_attention_scaling")
                known[kind] = angles.cos() * factor, angles.sin() * factor
            layer.self_attn.rotation = known[kind]

    def layers(self, model: Any) -> list[ReadEncoderLayer]:
        check_attention(model.config)
        self._check(model.rotary_emb, "RotaryEmbedding")
        return [
            self._layer(model.config, layer, place * SITES_PER_LAYER)
            for place, layer in enumerate(model.layers, 1)
        ]

    def _check(self, module: nn.Module, name: str) -> None:
        check(module, self._classes[name])

    def _layer(self, config: Any, layer: Any, site: int) -> ReadEncoderLayer:
        block, inner, norm = layer.attn, layer.mlp, layer.attn_norm
        self._check(layer, "EncoderLayer")
        self._check(block, "Attention")
        self._check(inner, "MLP")
        check(inner.act, self._activation_class)
        qkv = _linear(block.Wqkv)
        biases = (None,) * 3 if qkv.bias is None else qkv.bias.chunk(3)
        q, k, v = map(Linear, qkv.weight.chunk(3), biases)
        # transformers 5.0 counts layers: -1 are all tokens of a side.
        by_count = getattr(block, "local_attention", None)
        is_local = layer.attention_type == "sliding_attention"
        if by_count is not None:
            is_local = by_count[0] >= 0
        return ReadEncoderLayer(
            self_attn=ReadAttention(
                q_proj=q, k_proj=k, v_proj=v, out_proj=_linear(block.Wo),
                num_heads=config.num_attention_heads,
                dropout=float(block.attention_dropout) if block.training else 0.0,
                window=config.local_attention // 2 if is_local else 0,
            ),
            # The first layer reads the embedding, which has a LayerNorm of its own.
            self_attn_layer_norm=None if type(norm) is nn.Identity else _norm(norm),
            fc1=_linear(inner.Wi), fc2=_linear(inner.Wo), final_layer_norm=_norm(layer.mlp_norm),
            dropout=0.0 if type(block.out_drop) is nn.Identity else rate(block.out_drop),
            activation_dropout=rate(inner.drop), feed_forward_dropout=0.0,
            activation=self._activation, is_gated=True, site=site, normalize_before=True,
        )  # fmt: skip


def _linear(module: Any) -> Linear:
    return Linear.of(module, needs_bias=False)


def _norm(module: Any) -> LayerNorm:
    return LayerNorm.of(module, needs_bias=False)
