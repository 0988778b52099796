"""``ls_roberta``: fairseq's RoBERTa computed on packed tokens by the fused layers.

Shapes: B = sentences, L = longest sentence, T = packed tokens, C = model width, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from fairseq.models import register_model
from fairseq.models.roberta import RobertaEncoder, RobertaLMHead, RobertaModel
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import Tensor, nn

from lightseq_fairseq.base import families
from lightseq_fairseq.fairseq_compat import patching
from lightseq_fairseq.layers import dropout, linear, masked_lm_logits
from lightseq_fairseq.memory.packing import Packed
from lightseq_fairseq.plugins.encoder_graphs import EncoderGraphs
from lightseq_fairseq.plugins.flat_model import FlatModel, berts_initial_values
from lightseq_fairseq.plugins.transformer import LSTransformerEncoder

_HEAD_SITES = (2, 3)  # dropout before the two products of a classification head


class LSRobertaLMHead(RobertaLMHead):
    """The head of a masked language model. Source: ``fairseq.models.roberta.RobertaLMHead``."""

    def __init__(
        self, embed_dim: int, output_dim: int, activation_fn: str, weight: Tensor | None
    ) -> None:
        super().__init__(embed_dim, output_dim, activation_fn, weight)
        self.activation = activation_fn

    def forward(
        self, features: Tensor, masked_tokens: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Logits [..., V] of features [..., C]; masked_tokens: those to project, bool [...]."""
        if masked_tokens is not None:
            features = features[masked_tokens, :]
        rows = features.flatten(0, -2)
        rng = torch.zeros(2, dtype=torch.int64, device=rows.device)
        logits = masked_lm_logits(
            rows, self.dense, self.activation, self.layer_norm, self.weight, self.bias, rng
        )
        return logits.unflatten(0, features.shape[:-1])


class LSRobertaEncoder(RobertaEncoder):
    """A stack of fused layers with its head. Source: ``fairseq.models.roberta.RobertaEncoder``."""

    def __init__(self, args: Any, dictionary: Any) -> None:
        super().__init__(args, dictionary)
        self.graphs = EncoderGraphs()

    def build_encoder(self, args: Any, dictionary: Any, embed_tokens: Any) -> LSTransformerEncoder:
        cfg = TransformerConfig.from_namespace(args)
        encoder = LSTransformerEncoder(cfg, dictionary, embed_tokens)
        encoder.apply(init_bert_params)
        return encoder

    def build_lm_head(
        self, embed_dim: int, output_dim: int, activation_fn: str, weight: Tensor | None
    ) -> LSRobertaLMHead:
        return LSRobertaLMHead(embed_dim, output_dim, activation_fn, weight)

    def extract_features(
        self, src_tokens: Tensor, return_all_hiddens: bool = False, **options: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Features [B, L, C] of src_tokens int64 [B, L], zeros at pads; and fairseq's extras.

        In 16-bit evaluation on a GPU without gradients, they come from CUDA graphs.
        """
        encoder = self.sentence_encoder
        weight = encoder.embed_tokens.weight
        trains = torch.is_grad_enabled() or any(x.training for x in (encoder, *encoder.layers))
        only_features = not (trains or return_all_hiddens or options)
        if only_features and weight.is_cuda and weight.dtype.itemsize == 2:
            return self.graphs.features(encoder, src_tokens), {"inner_states": None}
        features, extra = super().extract_features(src_tokens, return_all_hiddens, **options)
        return features, extra


@register_model("ls_roberta")
class LSRobertaModel(FlatModel, RobertaModel):
    """Bidirectional encoder, trained to restore masked tokens and fine-tuned to classify sentences.

    Source: ``fairseq.models.roberta.RobertaModel``, whose flags, parameter names, initial values
    and padded interface it keeps; Liu et al. 2019.
    """

    family = families.ROBERTA

    @classmethod
    def build_model(cls, args: Any, task: Any) -> LSRobertaModel:
        """As in ``FlatModel``."""
        encoder = "fairseq.models.roberta.model:RobertaEncoder"
        with patching.within(encoder, LSRobertaEncoder), berts_initial_values():
            model: LSRobertaModel = super().build_model(args, task)
        return model

    def sides(self) -> list[tuple[LSTransformerEncoder]]:
        return [(self.encoder.sentence_encoder,)]

    def spared(self) -> list[Tensor]:
        head = self.encoder.lm_head
        return [head.weight, head.bias]

    def packed_logits(self, batch: Packed, rng: Tensor) -> Tensor:
        """See ``step.objectives.PackedModel``; the rows with labels are the masked ones."""
        x = self._features(batch, rng)
        logits: Tensor = self.encoder.lm_head(x.index_select(0, batch["masked"]["rows"]))
        return logits

    def class_outputs(self, batch: Packed, rng: Tensor, head: str) -> Tensor:
        """See ``step.objectives.ModelWithHeads``."""
        x = self._features(batch, rng)
        # Sentences that fill up the bucket are empty, and begin after the last real row.
        starts = batch["source"].segments.cu_seqlens[:-1].clamp(max=len(x) - 1)
        return classified(self.classification_heads[head], x.index_select(0, starts), rng)

    def _features(self, batch: Packed, rng: Tensor) -> Tensor:
        """Features [T, C] of the packed tokens."""
        source = batch["source"]
        return self.encoder.sentence_encoder.features(source["tokens"], source.segments, rng)

    def unused_by(self, head: str | None) -> list[nn.Parameter]:
        """See ``step.objectives.ModelWithHeads``."""
        used = [self.encoder.sentence_encoder]
        used.append(self.encoder.lm_head if head is None else self.classification_heads[head])
        places = {id(p) for module in used for p in module.parameters()}
        return [p for p in self.parameters() if id(p) not in places]


def classified(head: Any, x: Tensor, rng: Tensor) -> Tensor:
    """fairseq's ``RobertaClassificationHead`` of features [B, C], with our dropout."""
    p = head.dropout.p if head.training else 0.0
    x = dropout(x, p, rng, _HEAD_SITES[0])
    x = head.activation_fn(linear(x, head.dense.weight, head.dense.bias))
    x = dropout(x, p, rng, _HEAD_SITES[1])
    return linear(x, head.out_proj.weight, head.out_proj.bias)
