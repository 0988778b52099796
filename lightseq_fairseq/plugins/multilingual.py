"""``ls_multilingual_transformer``: a fused Transformer for each language pair.

For ``--task multilingual_translation``, where each update has one batch of each language pair.
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from typing import Any

from fairseq.models import register_model
from fairseq.models.multilingual_transformer import MultilingualTransformerModel
from fairseq.models.transformer import TransformerConfig
from torch import Tensor

from lightseq_fairseq.base import families
from lightseq_fairseq.memory.packing import Packed
from lightseq_fairseq.plugins.flat_model import FlatModel
from lightseq_fairseq.plugins.transformer import (
    LSTransformerDecoder,
    LSTransformerEncoder,
    packed_logits,
)


@register_model("ls_multilingual_transformer")
class LSMultilingualTransformerModel(FlatModel, MultilingualTransformerModel):
    """Encoders and decoders on packed tokens, shared among language pairs as the flags say.

    Source: ``fairseq.models.multilingual_transformer.MultilingualTransformerModel``, whose flags,
    parameter names and initial values it keeps.
    """

    family = families.MULTILINGUAL

    @classmethod
    def check_dictionaries(cls, args: Any, task: Any) -> None:
        """Checks nothing: a checkpoint has no digests of the dictionaries of all languages."""

    @classmethod
    def build_model(cls, args: Namespace, task: Any) -> LSMultilingualTransformerModel:
        """As in ``FlatModel``."""
        # super() returns fairseq's class: take its encoders and decoders, by language pair.
        pairs = super().build_model(args, task).models.items()
        return cls(
            OrderedDict((name, model.encoder) for name, model in pairs),
            OrderedDict((name, model.decoder) for name, model in pairs),
        )

    @classmethod
    def _get_module_class(
        cls, is_encoder: bool, args: Any, lang_dict: Any, embed_tokens: Any, langs: Any
    ) -> LSTransformerEncoder | LSTransformerDecoder:
        side = LSTransformerEncoder if is_encoder else LSTransformerDecoder
        return side(TransformerConfig.from_namespace(args), lang_dict, embed_tokens)

    def sides(self) -> list[tuple[LSTransformerEncoder, LSTransformerDecoder]]:
        return [(model.encoder, model.decoder) for model in self.models.values()]

    def stacks_of(self, part: str) -> tuple[LSTransformerEncoder, LSTransformerDecoder]:
        return self.models[part].encoder, self.models[part].decoder

    def packed_logits(self, batch: Packed, rng: Tensor) -> Tensor:
        """Logits [T, V] of a batch of the pair ``batch.part``; ``rng`` int64 [2] from ``draw_rng``.

        T = packed target tokens, V = vocabulary.
        """
        pair = self.models[batch.part]
        return packed_logits(pair.encoder, pair.decoder, batch, rng)
