"""RoBERTa of Hugging Face transformers, for the loop of `compiled`."""

from __future__ import annotations

import transformers
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lightseq_fairseq.cli.benchmark.train.batches import Blocks
from lightseq_fairseq.cli.benchmark.train.cases import DROPOUT, UNUSED_POSITIONS, Case, Shape
from lightseq_fairseq.cli.benchmark.train.packed_transformer import PAD

# transformers makes masks only for its own names. Under "sdpa", a compiled model makes one even if
# there are no pads, and then FlashAttention and cuDNN refuse.
WITHOUT_MASK = "sdpa_without_mask"
transformers.AttentionInterface.register(WITHOUT_MASK, sdpa_attention_forward)


def config(shape: Shape, vocabulary: int, attention: str = "sdpa") -> transformers.RobertaConfig:
    """The sizes of a RoBERTa; ``attention``: "sdpa" or `WITHOUT_MASK`."""
    return transformers.RobertaConfig(
        vocab_size=vocabulary, hidden_size=shape.width, intermediate_size=shape.ffn,
        num_hidden_layers=shape.encoder_layers, num_attention_heads=shape.heads,
        hidden_act=shape.activation, hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=shape.attention_dropout,
        max_position_embeddings=shape.positions + UNUSED_POSITIONS, type_vocab_size=1,
        layer_norm_eps=1e-5, pad_token_id=PAD,
        attn_implementation=attention,  # type: ignore[call-arg, unused-ignore]
    )  # fmt: skip


class Roberta(nn.Module):
    """``RobertaForMaskedLM`` of a case; computes the loss of a batch.

    As its users do, it computes the logits of all tokens.
    """

    def __init__(self, case: Case, vocabulary: int) -> None:
        super().__init__()
        self.has_pads = not case.block
        attention = "sdpa" if self.has_pads else WITHOUT_MASK
        self.model = transformers.RobertaForMaskedLM(config(case.shape, vocabulary, attention))

    def forward(self, *inputs: Tensor) -> Tensor:
        tokens, target = Blocks(*inputs)
        is_label = target.ne(PAD)
        loss: Tensor = self.model(
            tokens,
            attention_mask=tokens.ne(PAD).long() if self.has_pads else None,
            labels=target.masked_fill(~is_label, -100),
        ).loss
        return loss * is_label.sum()  # `loss` is the mean
