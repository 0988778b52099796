"""``ls_marian``: the Transformer of Marian and of Pegasus on packed tokens.

It differs from ``ls_transformer`` in three things, which no model of fairseq has:

* The table of positions: a sentence begins at its row 0, and the frequencies are 10000^(-2k/C).
* The decoder begins with <pad>. The data are fairseq's, whose decoder input begins with </s>; the
  decoder reads the row of <pad> for it. So no data, batch or search knows of this, and a target
  must not contain </s>. As in Marian, look-ups give the row of <pad> no gradient.
* A bias of the logits, which training does not change. Marian's files have one; a new model's is
  zero.

Shapes: T = packed tokens, C = model width, V = vocabulary, P = positions.
"""

from __future__ import annotations

from typing import Any

import torch
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer.transformer_legacy import base_architecture
from torch import Tensor

from lightseq_fairseq.base import families
from lightseq_fairseq.layers import vocabulary_logits
from lightseq_fairseq.layers.node import Input
from lightseq_fairseq.plugins.sizes import of_both, register
from lightseq_fairseq.plugins.transformer import (
    LSTransformerDecoder,
    LSTransformerEncoder,
    LSTransformerModel,
)


def sinusoids(count: int, width: int) -> Tensor:
    """Marian's table of positions, float32 [P, C]: the sines of all frequencies, then the cosines.

    Source: ``MarianSinusoidalPositionalEmbedding`` of transformers.
    """
    rates = 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(count, dtype=torch.float64).unsqueeze(1) / rates
    return torch.cat([angles.sin(), angles.cos()[:, : width // 2]], dim=1).float()


class LSMarianEncoder(LSTransformerEncoder):
    """Encoder with Marian's positions."""

    def sinusoids(self, count: int) -> Tensor:
        return _behind_pads(self, count)


class LSMarianDecoder(LSTransformerDecoder):
    """Decoder with Marian's positions, first token and bias.

    Attributes:
        logits_bias: [V], a buffer.
    """

    def __init__(self, cfg: TransformerConfig, dictionary: Any, *others: Any) -> None:
        super().__init__(cfg, dictionary, *others)
        self._eos = dictionary.eos()
        self.register_buffer("logits_bias", torch.zeros(len(dictionary)))

    def sinusoids(self, count: int) -> Tensor:
        return _behind_pads(self, count)

    def embed_packed(self, tokens: Tensor, *others: Any) -> Input:
        tokens = tokens.masked_fill(tokens == self._eos, self.padding_idx)
        embedded: Input = super().embed_packed(tokens, *others)
        return embedded

    def output_layer(self, features: Tensor) -> Tensor:
        rows = features.flatten(0, -2)
        logits = vocabulary_logits(rows, self.output_projection.weight, added=self.logits_bias)
        return logits.unflatten(0, features.shape[:-1])


def _behind_pads(side: Any, count: int) -> Tensor:
    """As ``_Side.sinusoids``: position 0 is in the row behind the pad's, as in fairseq's tables."""
    first = side.padding_idx + 1
    table = sinusoids(count - first, side.embed_positions.embedding_dim)
    return torch.nn.functional.pad(table, (0, 0, first, 0))


@register_model("ls_marian")
class LSMarianModel(LSTransformerModel):
    """Encoder and decoder of Marian and Pegasus.

    Sources: Junczys-Dowmunt et al. 2018, Zhang et al. 2020; ``MarianMTModel`` and
    ``PegasusForConditionalGeneration`` of transformers. Flags, parameter names and initial values
    are those of ``fairseq.models.transformer.TransformerModel``.
    """

    family = families.MARIAN
    packed_logits = LSTransformerModel.packed_logits  # of its own, see ``objectives.declares``
    of_encoder, of_decoder = LSMarianEncoder, LSMarianDecoder


# Arch -> layers of each side, C, inner width of the feed-forward layers, heads, activation, and
# whether it is pre-norm. Sources: config.json of Helsinki-NLP/opus-mt-en-de and
# opus-mt-tc-big-en-ro, and of google/pegasus-large.
SIZES = {
    "ls_marian_base": (6, 512, 2048, 8, "silu", False),
    "ls_marian_big": (6, 1024, 4096, 16, "relu", False),
    "ls_pegasus_large": (16, 1024, 4096, 16, "relu", True),
}


register_model_architecture("ls_marian", "ls_marian")(base_architecture)
for _name, (_layers, _width, _inner, _heads, _activation, _is_pre_norm) in SIZES.items():
    register("ls_marian", _name, {
        **of_both(layers=_layers, attention_heads=_heads, normalize_before=_is_pre_norm),
        "encoder_embed_dim": _width, "encoder_ffn_embed_dim": _inner, "share_all_embeddings": True,
        "activation_fn": _activation, "dropout": 0.1,
    })  # fmt: skip
