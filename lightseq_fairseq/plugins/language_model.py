"""``ls_transformer_lm``: fairseq's Transformer language models, a decoder-only model on packed
tokens.

Shapes: B = blocks of text, L = longest block, T = packed tokens, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from torch import Tensor

from lightseq_fairseq.base import families
from lightseq_fairseq.fairseq_compat import patching
from lightseq_fairseq.memory.packing import Packed
from lightseq_fairseq.plugins.dropout import dropout_rng
from lightseq_fairseq.plugins.flat_model import FlatModel
from lightseq_fairseq.plugins.transformer import LSTransformerDecoder


@register_model("ls_transformer_lm", dataclass=TransformerLanguageModelConfig)
class LSTransformerLanguageModel(FlatModel, TransformerLanguageModel):
    """Decoder-only language model: predicts each token of a text from the tokens before it.

    Source: ``fairseq.models.transformer_lm.TransformerLanguageModel``, whose flags, parameter names
    and initial values it keeps.
    """

    packs_tokens = True
    family = families.LANGUAGE_MODEL

    @classmethod
    def build_model(cls, args: Any, task: Any) -> LSTransformerLanguageModel:
        """As in ``FlatModel``."""
        with patching.within("fairseq.models.transformer_lm:TransformerDecoder", _decoder):
            model: LSTransformerLanguageModel = super().build_model(args, task)
        return model

    def sides(self) -> list[tuple[LSTransformerDecoder]]:
        return [(self.decoder,)]

    def spared(self) -> list[Tensor]:
        projection = self.decoder.output_projection
        return [] if projection is None else [projection.weight]

    def forward(
        self, src_tokens: Tensor, src_lengths: Tensor | None = None, packed: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Logits of a batch.

        Args:
            src_tokens: int64 [B, L], padded on the right.
            src_lengths: not used; the lengths follow from the pads.
            packed: return only the rows of real tokens, and no extras.
            options: passed to fairseq's decoder.

        Returns:
            (logits [B, L, V], fairseq's dict of extras), or with ``packed`` (logits [T, V],
            segments).
        """
        if not packed:
            return super().forward(src_tokens, **options)
        rng = dropout_rng(self, src_tokens.device)
        x, segments, _ = self.decoder.packed(src_tokens, None, None, rng)
        return self.decoder.output_layer(x), segments

    def packed_logits(self, batch: Packed, rng: Tensor) -> Tensor:
        """Logits [T, V] of a batch of running text; ``rng`` int64 [2] from ``draw_rng``."""
        text = batch["target"]
        x, _ = self.decoder.features(text["previous"], text.segments, None, None, rng)
        return self.decoder.output_layer(x)


def _decoder(original: Any, args: Any, *arguments: Any, **options: Any) -> LSTransformerDecoder:
    return LSTransformerDecoder(TransformerConfig.from_namespace(args), *arguments, **options)
