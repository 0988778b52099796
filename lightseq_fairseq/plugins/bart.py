"""``ls_bart``: fairseq's BART and mBART computed on packed tokens by the fused layers.

Shapes: B = sentences, L = longest sentence, T = packed tokens, C = model width, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from fairseq.models import register_model
from fairseq.models.bart import BARTModel
from torch import Tensor, nn

from lightseq_fairseq.base import families
from lightseq_fairseq.memory.packing import Packed, PackedBatch, Rows
from lightseq_fairseq.plugins.flat_model import berts_initial_values
from lightseq_fairseq.plugins.roberta import classified
from lightseq_fairseq.plugins.transformer import LSTransformerModel, decoded

_TABLES = (
    *("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    "decoder.output_projection.weight",
)
# Of fairseq's bart.base, and words of its dictionary file with those that every dictionary has.
_BASE_ROWS, _BASE_WORDS = 51_201, 50_264


@register_model("ls_bart")
class LSBARTModel(LSTransformerModel, BARTModel):
    """Encoder and decoder, trained to restore noised text, and fine-tuned to write or to classify.

    Source: ``fairseq.models.bart.BARTModel``, whose flags, parameter names, initial values and
    padded interface it keeps; Lewis et al. 2019.
    """

    family = families.BART
    packed_logits = LSTransformerModel.packed_logits  # of its own, see ``objectives.declares``

    @classmethod
    def build_model(cls, args: Any, task: Any) -> LSBARTModel:
        """As in ``FlatModel``."""
        with berts_initial_values():
            model: LSBARTModel = super().build_model(args, task)
        return model

    def forward(
        self, src_tokens: Tensor, src_lengths: Tensor | None, prev_output_tokens: Tensor,
        *arguments: Any, classification_head_name: str | None = None, **options: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """As in ``LSTransformerModel``, or with the name of a head its outputs [B, classes].

        A head reads the decoder's features at the last </s> of the source.
        """
        if classification_head_name is None:
            return super().forward(
                src_tokens, src_lengths, prev_output_tokens, *arguments, **options
            )
        options["features_only"] = True
        x, extra = super().forward(src_tokens, src_lengths, prev_output_tokens, **options)
        columns = torch.arange(src_tokens.shape[1], device=src_tokens.device)
        last = columns.where(src_tokens.eq(self.eos), -1).amax(1)
        rows = torch.arange(len(x), device=x.device)
        return self.classification_heads[classification_head_name](x[rows, last]), extra

    def class_outputs(self, batch: Packed, rng: Tensor, head: str) -> Tensor:
        """See ``step.objectives.ModelWithHeads``; the decoder reads the source, rolled by one."""
        source = batch["source"]
        segments, tokens = source.segments, source["tokens"]
        x = decoded(self.encoder, self.decoder, source, _rolled(source), segments, rng)
        # Sentences that fill up the bucket are empty, and begin after the last real row.
        ends = (segments.cu_seqlens[1:].long() - 1).clamp(min=0)
        rows = torch.arange(len(tokens), device=tokens.device)
        last = rows.where(tokens.eq(self.eos), 0).cummax(0).values
        x = x.index_select(0, last.index_select(0, ends))
        return classified(self.classification_heads[head], x, rng)

    def table_rows(self, batch: PackedBatch) -> tuple[int, ...]:
        """As in ``FlatModel``; of sentences with labels the decoder reads the source, too."""
        rows = super().table_rows(batch)
        return rows if len(rows) > 1 else (*rows, self.decoder.table_rows(batch.longest[0]))

    def unused_by(self, head: str | None) -> list[nn.Parameter]:
        """See ``step.objectives.ModelWithHeads``."""
        others = [other for name, other in self.classification_heads.items() if name != head]
        if head is not None and not self.decoder.share_input_output_embed:
            others.append(self.decoder.output_projection)
        return [p for module in others for p in module.parameters()]

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """As in fairseq, and with the rows of bart.base that its dictionary has.

        fairseq compares sizes alone: it drops the last row, that of <mask>, if the checkpoint has
        one more than the dictionary. But bart.base has 936 dummy words, madeupword0003 to
        madeupword0938, that the dictionary of the other files, made for the same text, lacks.
        """
        words, table = self.encoder.dictionary, state_dict.get(_TABLES[0])
        known = len(words) - ("<mask>" in words)  # before <mask>, which is the last word in both
        if table is not None and (len(table), known) == (_BASE_ROWS, _BASE_WORDS):
            for place in _TABLES:
                if place in state_dict:
                    rows = state_dict[place]
                    state_dict[place] = torch.cat([rows[:known], rows[-1:]])
        super().upgrade_state_dict_named(state_dict, name)


def _rolled(source: Rows) -> Tensor:
    """The decoder's input [T] for packed sentences: their last token, then all but the last."""
    tokens, bounds = source["tokens"], source.segments.cu_seqlens.long()
    first, last = bounds[:-1], bounds[1:] - 1
    # Sentences that fill up the bucket are empty: their token goes to a row after all others.
    first = first.where(first <= last, len(tokens))
    rolled = torch.cat([tokens[-1:], tokens])
    return rolled.index_copy(0, first, tokens.index_select(0, last.clamp(min=0)))[:-1]
