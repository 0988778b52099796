"""GPT-2: its embedding and layers, whose matrices are stored transposed.

Shapes: B = sentences, L = longest sentence, T = packed tokens, C = model width.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from lightseq_fairseq.huggingface.calls import (
    check_attention,
    check_whole,
    given_segments,
    options_of,
    rates_of,
    read_copies,
    recomputes,
    rng_of,
    segments_of,
    step_segments,
)
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
from lightseq_fairseq.layers.embedding import embed
from lightseq_fairseq.layers.encoder import run_encoder
from lightseq_fairseq.layers.sites import SITES_PER_LAYER
from lightseq_fairseq.memory.packing import Segments


class Gpt2:
    """How to read one ``GPT2Model``."""

    def __init__(self, model: Any, prefix: str) -> None:
        from transformers.activations import ACT2FN
        from transformers.pytorch_utils import Conv1D

        self._classes = vars(sys.modules[type(model).__module__])
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
        check_attention(model.config)
        if not len(model.h):
            raise NotCovered("it has no layers")
        layers = [self._layer(block, n * SITES_PER_LAYER) for n, block in enumerate(model.h, 1)]
        last, again = LayerNorm.of(model.ln_f), recomputes(model.h)
        shape = input_ids.shape[0], input_ids.shape[1]
        segments = step_segments("source", shape)
        if segments is None and cu_seqlens is not None:
            segments = given_segments(cu_seqlens, longest, mask, shape)
        elif segments is None:
            segments = segments_of(mask, shape, input_ids.device, reads)
        words = self._embedding(model, segments, input_ids, positions)
        read_copies(layers, model.wte.weight, last)
        dropout = rate(model.drop)
        rng = rng_of(rates_of(layers, dropout), input_ids.device)
        x = embed(**words, scale=1.0, p=dropout, rng=rng, site=0).to(layers[0].fc1.weight.dtype)
        states: list[Tensor] | None = [] if options.wants_states else None
        with torch.autocast(input_ids.device.type, enabled=False):
            y = run_encoder(
                layers, last, x, segments, rng, causal=True, checkpoint_activations=again,
                states=states,
            )  # fmt: skip
        wide = model.wte.weight.dtype
        result = Output(last_hidden_state=segments.pad(y.to(wide)))
        if states is not None:
            inner = [segments.pad(rows.to(wide)) for rows in states[:-1]]
            result["hidden_states"] = (*inner, result.last_hidden_state)
        return result if options.returns_dict else result.to_tuple()

    def _embedding(
        self, model: Any, segments: Segments, ids: Tensor, positions: Tensor | None
    ) -> dict[str, Any]:
        """Arguments of ``layers.embed`` for the real tokens of ids int64 [B, L]."""
        for table in (model.wte, model.wpe):
            check_table(table)
        if positions is None:
            if ids.shape[1] > self.most(model):
                raise NotCovered("a sentence has more tokens than there are positions")
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        pad = model.wte.padding_idx
        return {
            "tokens": segments.pack(ids),
            "weight": tensor(model.wte.weight),
            "positions": segments.pack(positions.expand(ids.shape)),
            "position_weight": tensor(model.wpe.weight),
            "padding_idx": -1 if pad is None else pad,
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
        dropout = rate(block.resid_dropout)
        if dropout != rate(inner.dropout):
            raise NotCovered("a layer has two dropout rates")
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
            final_layer_norm=LayerNorm.of(layer.ln_2), dropout=dropout,
            activation=self._activation, site=site, normalize_before=True,
        )  # fmt: skip
