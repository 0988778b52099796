"""GPT-2: its embedding and layers, whose matrices are stored transposed.

Shapes: B = sentences, L = longest sentence, T = packed tokens, C = model width.
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
    tensor,
    unsupported_sizes,
)
from lightseq_fairseq.huggingface.parts import ReadAttention, ReadEncoderLayer
from lightseq_fairseq.huggingface.reader import Call, Reader
from lightseq_fairseq.layers.sites import SITES_PER_LAYER
from lightseq_fairseq.memory.packing import Segments


class Gpt2(Reader):
    """How to read one ``GPT2Model``."""

    causal = True

    def __init__(self, model: Any, prefix: str) -> None:
        from transformers.activations import ACT2FN
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        classes = sys.modules[type(model).__module__]
        names = ("GPT2Block", "GPT2Attention", "GPT2MLP")
        self._classes = {name: getattr(classes, name) for name in names}
        self._conv = Conv1D
        self._activation = ACTIVATIONS[model.config.activation_function]
        self._activation_class = type(ACT2FN[model.config.activation_function])

    @staticmethod
    def unsupported(config: Any) -> dict[str, Any]:
        """What our layers lack -> whether the configuration has it."""
        lacks = (
            "add_cross_attention",
            "scale_attn_by_inverse_layer_idx",
            "reorder_and_upcast_attn",
        )
        return {
            **{name: getattr(config, name) for name in lacks},
            "unscaled attention (scale_attn_weights)": not config.scale_attn_weights,
            **unsupported_sizes(
                config.activation_function, config.n_embd, config.n_head,
                config.n_inner or 4 * config.n_embd,
            ),
        }  # fmt: skip

    def groups(self, model: Any) -> list[list[Tensor]]:
        """Parameters that one product reads as one: none, as layers read transposed copies."""
        return []

    def most(self, model: Any) -> int:
        """Tokens of a sentence for which there are positions."""
        return len(model.wpe.weight)

    def forward(
        self, model: Any, reads: Reads, input_ids: Tensor | None = None, *more: Any, **given: Any
    ) -> Any:
        """What the model's forward returns, by our layers; raises NotCovered if they do not compute
        it."""
        from transformers.modeling_outputs import (
            BaseModelOutputWithPastAndCrossAttentions as Output,
        )

        if more or input_ids is None or input_ids.dim() != 2:
            raise NotCovered("it is called with other arguments than input_ids [B, L]")
        if any(given.get(name) is not None for name in ("cache", "past_key_values")):
            raise NotCovered("it has a cache, as in generation", is_usual=True)
        if given.pop("use_cache", None) and not torch.is_grad_enabled():
            raise NotCovered("it makes a cache, as for generation", is_usual=True)
        mask, positions = given.pop("attention_mask", None), given.pop("position_ids", None)
        cu_seqlens, longest = given.pop("cu_seq_lens_q", None), given.pop("max_length_q", None)
        if positions is not None and cu_seqlens is None:
            raise NotCovered("its position_ids may mark several sentences")
        options = options_of(
            model.config, given, ("cu_seq_lens_k", "max_length_k", "cache_position")
        )
        check_whole(model)
        tokens = {"input_ids": input_ids, "position_ids": positions}
        features, states = self.run(model, reads, Call(
            (input_ids.shape[0], input_ids.shape[1]), input_ids.device, options, model.h,
            {name: x for name, x in tokens.items() if x is not None}, mask,
            packed=None if cu_seqlens is None else (cu_seqlens, longest),
        ))  # fmt: skip
        result = Output(last_hidden_state=features)
        if options.wants_states:
            result["hidden_states"] = (*states[:-1], features)
        return result if options.returns_dict else result.to_tuple()

    def layers(self, model: Any) -> list[ReadEncoderLayer]:
        check_attention(model.config)
        return [self._layer(block, n * SITES_PER_LAYER) for n, block in enumerate(model.h, 1)]

    def last(self, model: Any) -> LayerNorm:
        return LayerNorm.of(model.ln_f)

    def weight(self, model: Any) -> Tensor:
        weight: Tensor = model.wte.weight
        return weight

    def rate(self, model: Any) -> float:
        return rate(model.drop)

    def can_be_graph(self, model: Any, call: Call) -> bool:
        return call.shape[1] <= self.most(model)

    def words(self, model: Any) -> dict[str, Any]:
        """Arguments of ``layers.embed`` that do not depend on the tokens."""
        words = model.wte
        check_table(words)
        return {
            "weight": tensor(words.weight),
            "scale": 1.0,
            "padding_idx": -1 if words.padding_idx is None else words.padding_idx,
        }

    def table(self, model: Any, length: int) -> tuple[Tensor, int]:
        """The table of positions, and its row of a sentence's first token; for ``length`` tokens.

        Raises NotCovered if there are fewer positions, or something changed what they compute.
        """
        check_table(model.wpe)
        if length > self.most(model):
            raise NotCovered("a sentence has more tokens than there are positions")
        return tensor(model.wpe.weight), 0

    def embedding(
        self, model: Any, segments: Segments, tokens: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        ids, positions = tokens["input_ids"], tokens.get("position_ids")
        table, _ = self.table(model, ids.shape[1] if positions is None else 0)
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        return {
            **self.words(model),
            "tokens": segments.pack(ids),
            "positions": segments.pack(positions.expand(ids.shape)),
            "position_weight": table,
        }

    def _check(self, module: nn.Module, name: str) -> None:
        check(module, self._classes[f"GPT2{name}"])

    def _transposed(self, module: Any) -> tuple[Tensor, Tensor]:
        """Weight [out, in], a view, and bias of a ``Conv1D``."""
        check(module, self._conv)
        return tensor(module.weight).t(), tensor(module.bias)

    def _layer(self, layer: Any, site: int) -> ReadEncoderLayer:
        block, inner = layer.attn, layer.mlp
        self._check(layer, "Block")
        self._check(block, "Attention")
        self._check(inner, "MLP")
        check(inner.act, self._activation_class)
        check(block.attn_dropout, nn.Dropout)
        weight, bias = self._transposed(block.c_attn)
        q, k, v = map(Linear, weight.chunk(3), bias.chunk(3))
        return ReadEncoderLayer(
            self_attn=ReadAttention(
                q_proj=q, k_proj=k, v_proj=v, out_proj=Linear(*self._transposed(block.c_proj)),
                num_heads=block.num_heads,
                dropout=float(block.attn_dropout.p) if block.training else 0.0,
            ),
            self_attn_layer_norm=LayerNorm.of(layer.ln_1),
            fc1=Linear(*self._transposed(inner.c_fc)), fc2=Linear(*self._transposed(inner.c_proj)),
            final_layer_norm=LayerNorm.of(layer.ln_2), dropout=rate(block.resid_dropout),
            feed_forward_dropout=rate(inner.dropout), activation=self._activation, site=site,
            normalize_before=True,
        )  # fmt: skip
