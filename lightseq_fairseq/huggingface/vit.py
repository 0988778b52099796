"""ViT: the layers between its patches and its last LayerNorm.

Shapes: B = images, L = patches of an image and the class token, C = model width.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from lightseq_fairseq.huggingface.calls import check_attention, check_whole, options_of
from lightseq_fairseq.huggingface.covered import (
    ACTIVATIONS,
    LayerNorm,
    Linear,
    NotCovered,
    Reads,
    check,
    rate,
    unsupported_sizes,
)
from lightseq_fairseq.huggingface.parts import ReadAttention, ReadEncoderLayer
from lightseq_fairseq.huggingface.reader import Call, Reader
from lightseq_fairseq.layers.sites import SITES_PER_LAYER


class Vit(Reader):
    """How to read one ``ViTModel``, of transformers 5.0 or later."""

    def __init__(self, model: Any, prefix: str) -> None:
        from transformers.activations import ACT2FN

        super().__init__()
        # Not the module itself, which cannot be copied with the model.
        classes = vars(sys.modules[type(model).__module__])
        self._classes = {name: x for name, x in classes.items() if isinstance(x, type)}
        self._activation = ACTIVATIONS[model.config.hidden_act]
        self._activation_class = type(ACT2FN[model.config.hidden_act])

    @staticmethod
    def unsupported(config: Any) -> dict[str, Any]:
        """What our layers lack -> whether the configuration has it."""
        return unsupported_sizes(
            config.hidden_act, config.hidden_size, config.num_attention_heads,
            config.intermediate_size,
        )  # fmt: skip

    def layers(self, model: Any) -> list[ReadEncoderLayer]:
        check_attention(model.config)
        return [
            self._layer(model.config, layer, place * SITES_PER_LAYER)
            for place, layer in enumerate(_stack(model), 1)
        ]

    def forward(
        self, model: Any, reads: Reads, pixel_values: Tensor | None = None,
        bool_masked_pos: Tensor | None = None, interpolate_pos_encoding: bool | None = None,
        attention_mask: Tensor | None = None, *more: Any, **given: Any,
    ) -> Any:  # fmt: skip
        """What the model's forward returns, by our layers; raises NotCovered if they do not compute
        it."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        if more or pixel_values is None or attention_mask is not None:
            raise NotCovered("it is called with other arguments than images")
        options = options_of(model.config, given)
        check_whole(model)
        weight = self.weight(model)
        # The convolution and its position table stay Hugging Face's.
        padded = model.embeddings(
            pixel_values.to(weight.dtype), bool_masked_pos=bool_masked_pos,
            interpolate_pos_encoding=interpolate_pos_encoding,
        )  # fmt: skip
        features, states = self.run(model, reads, Call(
            (padded.shape[0], padded.shape[1]), padded.device, options, _stack(model),
            embedded=lambda: padded,
        ))  # fmt: skip
        result = BaseModelOutputWithPooling(last_hidden_state=features)
        if model.pooler is not None:
            result["pooler_output"] = model.pooler(features)
        if options.wants_states:  # the last one is that before the LayerNorm
            result["hidden_states"] = tuple(states)
        return result if options.returns_dict else result.to_tuple()

    def last(self, model: Any) -> LayerNorm:
        return LayerNorm.of(model.layernorm)

    def weight(self, model: Any) -> Tensor:
        weight: Tensor = model.embeddings.patch_embeddings.projection.weight
        return weight

    def rate(self, model: Any) -> float:
        return 0.0  # of ours; Hugging Face's embedding has its own dropout

    def _check(self, module: nn.Module, name: str) -> None:
        check(module, self._classes[f"ViT{name}"])

    def _layer(self, config: Any, layer: Any, site: int) -> ReadEncoderLayer:
        self._check(layer, "Layer")
        block = layer.attention
        self._check(block, "Attention")
        if hasattr(layer, "mlp"):
            inner, activation = layer.mlp, layer.mlp.activation_fn
            self._check(inner, "MLP")
            read = [block.q_proj, block.k_proj, block.v_proj, block.o_proj, inner.fc1, inner.fc2]
            drops = rate(layer.dropout), rate(layer.dropout)
            attention_rate = block.attention_dropout
        else:  # as in transformers 5.0
            behind, end = block.output, layer.output
            block, activation = block.attention, layer.intermediate.intermediate_act_fn
            for module, name in (
                (block, "SelfAttention"), (behind, "SelfOutput"), (end, "Output"),
                (layer.intermediate, "Intermediate"),
            ):  # fmt: skip
                self._check(module, name)
            read = [block.query, block.key, block.value, behind.dense,
                    layer.intermediate.dense, end.dense]  # fmt: skip
            drops = rate(behind.dropout), rate(end.dropout)
            attention_rate = block.dropout_prob
        check(activation, self._activation_class)
        q, k, v = (Linear.of(x, needs_bias=config.qkv_bias) for x in read[:3])
        out, fc1, fc2 = map(Linear.of, read[3:])
        return ReadEncoderLayer(
            self_attn=ReadAttention(
                q_proj=q, k_proj=k, v_proj=v, out_proj=out,
                num_heads=block.num_attention_heads,
                dropout=float(attention_rate) if block.training else 0.0,
            ),
            self_attn_layer_norm=LayerNorm.of(layer.layernorm_before), fc1=fc1, fc2=fc2,
            final_layer_norm=LayerNorm.of(layer.layernorm_after), dropout=drops[0],
            feed_forward_dropout=drops[1], activation=self._activation, site=site,
            normalize_before=True,
        )  # fmt: skip


def _stack(model: Any) -> Any:
    """The layers, which transformers 5.0 has in an encoder."""
    return model.layers if hasattr(model, "layers") else model.encoder.layer
