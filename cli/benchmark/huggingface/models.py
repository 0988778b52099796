"""The models of ``lightseq-bench huggingface``, with random weights.

A model is one entry of `MODELS`: its class, and the settings of its configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lightseq_fairseq.cli.benchmark.huggingface.cases import Case


class Model(NamedTuple):
    """A model, in the names of transformers.

    Attributes:
        family: the beginning of the names of its classes.
        heads: kind of a case, a key of `cases.WORK` -> the end of the name of the class.
        rates: setting of the configuration -> dropout rate, as published.
        settings: others that differ from transformers' own defaults.
        positions: tokens of the longest sentence.
    """

    family: str
    heads: Mapping[str, str]
    rates: Mapping[str, float] = {}
    settings: Mapping[str, Any] = {}
    positions: int = 512

    def but(self, **settings: Any) -> Model:
        """The model with these settings in addition."""
        return self._replace(settings={**self.settings, **settings})


_HEADS = {
    "sentences": "ForSequenceClassification", "pairs": "ForSequenceClassification",
    "tokens": "ForTokenClassification", "mlm": "ForMaskedLM", "b": "Model",
}  # fmt: skip
_RATES = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_RATES_OF_PAIRS = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.0}
_BERT = Model("Bert", _HEADS, _RATES)
_ROBERTA = Model("Roberta", _HEADS, _RATES).but(
    max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5
)
# As answerdotai/ModernBERT-base, which drops nothing.
_MODERNBERT = Model(
    "ModernBert", {kind: head for kind, head in _HEADS.items() if kind != "b"}, positions=8192
)
_GPT2 = Model(
    "GPT2", {"text": "LMHeadModel"}, {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    positions=1024,
)  # fmt: skip
# As facebook/bart-large, which drops activations, too.
_BART = Model(
    "Bart", {"summaries": "ForConditionalGeneration"}, dict.fromkeys(_RATES_OF_PAIRS, 0.1),
    positions=1024,
)  # fmt: skip
# As Helsinki-NLP's models, with the sizes of Transformer big.
_MARIAN = Model(
    "Marian", {"translation": "MTModel"}, {**_RATES_OF_PAIRS, "attention_dropout": 0.0},
    {"encoder_layers": 6, "decoder_layers": 6, "activation_function": "silu",
     "scale_embedding": True},
)  # fmt: skip
# facebook/nllb-200-distilled-600M
_NLLB = Model(
    "M2M100", {"verses": "ForConditionalGeneration"}, _RATES_OF_PAIRS,
    {"vocab_size": 256_206, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
)  # fmt: skip
_VIT = Model("ViT", {"images": "ForImageClassification"})
_LARGE: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096,
}  # fmt: skip
_TINY: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256,
}  # fmt: skip
_TINY_PAIRS: dict[str, Any] = {
    "d_model": 64, "vocab_size": 500,
    **{f"{side}_{name}": size for side in ("encoder", "decoder")
       for name, size in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 64))},
}  # fmt: skip
MODELS = {
    "bert_base": _BERT,
    "bert_large": _BERT.but(**_LARGE),
    "roberta_base": _ROBERTA,
    "roberta_large": _ROBERTA.but(**_LARGE),
    "xlmr_base": _ROBERTA._replace(family="XLMRoberta").but(vocab_size=250_002),
    "modernbert_base": _MODERNBERT,
    "gpt2": _GPT2,
    "bart_large": _BART,
    "marian_big": _MARIAN,
    "nllb_600m": _NLLB,
    "vit_b": _VIT,
    "vit_l": _VIT.but(**_LARGE),
    # For machines without a GPU, to test that everything works.
    "roberta_tiny": _ROBERTA.but(**_TINY, vocab_size=500),
    "modernbert_tiny": _MODERNBERT.but(
        **_TINY,
        vocab_size=500,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
    "gpt2_tiny": _GPT2.but(n_embd=64, n_layer=2, n_head=2, vocab_size=500),
    "bart_tiny": _BART.but(**_TINY_PAIRS),
    "marian_tiny": _MARIAN.but(**_TINY_PAIRS, pad_token_id=499, decoder_start_token_id=499),
    "nllb_tiny": _NLLB.but(**_TINY_PAIRS),
    "vit_tiny": _VIT.but(**_TINY, image_size=32, patch_size=8),
}


def configuration(case: Case, attention: str = "sdpa") -> Any:
    """The configuration of a case's model; attention: the name of the function that computes it."""
    import transformers

    model = MODELS[case.model]
    rates = {name: rate if case.dropout else 0.0 for name, rate in model.rates.items()}
    config = getattr(transformers, f"{model.family}Config")(
        **model.settings, **rates, num_labels=case.work.classes, attn_implementation=attention
    )
    # Else the first batch decides it, and torch compiles the model a second time.
    config.problem_type = "single_label_classification"
    return config


def built(case: Case, attention: str = "sdpa") -> Any:
    """The model of a case, in float32 on the CPU; attention: see `configuration`."""
    import transformers

    model = MODELS[case.model]
    head = model.heads[case.kind]
    options = {"add_pooling_layer": False} if head == "Model" else {}
    made = getattr(transformers, model.family + head)(configuration(case, attention), **options)
    # Else GPT-2 warns of a missing type, which cuts the compiled graph in pieces.
    made.loss_type = made.loss_type or "ForCausalLM"
    return made
