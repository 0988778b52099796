"""Models of Hugging Face transformers, for the loop of `compiled`."""

from __future__ import annotations

import transformers
from torch import Tensor, nn
from torch.nn import functional

from lightseq_fairseq.cli.benchmark.attention import WITHOUT_CAUSAL_MASK, WITHOUT_MASK
from lightseq_fairseq.cli.benchmark.train.batches import Blocks, PaddedPairs
from lightseq_fairseq.cli.benchmark.train.cases import Case
from lightseq_fairseq.cli.benchmark.train.corpus import EOS
from lightseq_fairseq.cli.benchmark.train.packed_transformer import PAD, SMOOTHING
from lightseq_fairseq.cli.benchmark.train.shapes import DROPOUT, UNUSED_POSITIONS, Shape


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


def pair_config(shape: Shape, vocabulary: int, attention: str) -> transformers.PreTrainedConfig:
    """The sizes of a model with a source and a target; ``attention``: see `config`."""
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("ffn_dim", shape.ffn), ("attention_heads", shape.heads), ("layerdrop", 0.0),
        )
    }  # fmt: skip
    positions = {"max_position_embeddings": shape.positions} if shape.positions else {}
    made: transformers.PreTrainedConfig = getattr(transformers, f"{shape.hugging_face}Config")(
        vocab_size=vocabulary, d_model=shape.width, encoder_layers=shape.encoder_layers,
        decoder_layers=shape.decoder_layers, dropout=DROPOUT, activation_function=shape.activation,
        attention_dropout=shape.attention_dropout, activation_dropout=shape.activation_dropout,
        scale_embedding=not shape.norms_embedding, use_cache=False, pad_token_id=PAD,
        eos_token_id=EOS, decoder_start_token_id=EOS, attn_implementation=attention, **sides,
        **positions,
    )  # fmt: skip
    return made


class SequenceToSequence(nn.Module):
    """The model of a case with a source and a target; computes the loss of a batch.

    As its users do, it computes the logits of all tokens.
    """

    def __init__(self, case: Case, vocabulary: int) -> None:
        super().__init__()
        sizes = pair_config(case.shape, vocabulary, WITHOUT_CAUSAL_MASK)
        task = "MTModel" if case.shape.is_marian else "ForConditionalGeneration"
        family = getattr(transformers, f"{case.shape.hugging_face}{task}")
        self.model = family(sizes)

    def forward(self, *inputs: Tensor) -> Tensor:
        source, previous, target = PaddedPairs(*inputs)
        logits = self.model(
            source, attention_mask=source.ne(PAD).long(), decoder_input_ids=previous
        ).logits
        return functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=PAD, label_smoothing=SMOOTHING,
            reduction="sum",
        )  # fmt: skip
