"""Models of Hugging Face `transformers` that compute what a model of fairseq computes.

`COUNTERPARTS` has a record of each kind of model. It drives both directions, see `from_huggingface`
and `to_huggingface`. A new kind is a record.
"""

from __future__ import annotations

from operator import not_
from typing import Any

from lightseq_fairseq.base import families
from lightseq_fairseq.checkpoints.correspondence import Counterpart, Field, Fixed, activation
from lightseq_fairseq.plugins.marian import sinusoids

_TIED = Fixed("tie_word_embeddings", True, True)
_MODEL = "encoder.sentence_encoder."
ROBERTA = Counterpart(
    types={"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"},
    classes=("ForMaskedLM", "Model", "ForSequenceClassification"),
    classifier="ForSequenceClassification",
    families=(families.ROBERTA,),
    arch="roberta",
    task="masked_lm",
    fields=(
        Field("encoder_embed_dim", "hidden_size", 768),
        Field("encoder_layers", "num_hidden_layers", 12),
        Field("encoder_attention_heads", "num_attention_heads", 12),
        Field("encoder_ffn_embed_dim", "intermediate_size", 3072),
        # The table has two more rows: for numbers up to the pad's, 1.
        Field("max_positions", "max_position_embeddings", 512, lambda v: v - 2, lambda v: v + 2),
        activation("hidden_act", "gelu"),
        Field("dropout", "hidden_dropout_prob", 0.1),
        Field("attention_dropout", "attention_probs_dropout_prob", 0.1),
    ),
    settings={
        "encoder_normalize_before": False,
        "encoder_learned_pos": True,
        "layernorm_embedding": True,
        "no_scale_embedding": True,
        "no_token_positional_embeddings": False,
        "untie_weights_roberta": False,
        "pooler_activation_fn": "tanh",
    },
    fixed=(
        Fixed("type_vocab_size", 1, 2),
        Fixed("layer_norm_eps", 1e-5, 1e-12),
        Fixed("is_decoder", False, False),
        Fixed("add_cross_attention", False, False),
        Fixed("position_embedding_type", "absolute", "absolute"),
        _TIED,
    ),
    names=(
        (f"{_MODEL}embed_tokens.", "roberta.embeddings.word_embeddings."),
        (f"{_MODEL}embed_positions.", "roberta.embeddings.position_embeddings."),
        (f"{_MODEL}layernorm_embedding.", "roberta.embeddings.LayerNorm."),
        *(
            (f"{_MODEL}layers.*.{ours}.", f"roberta.encoder.layer.*.{theirs}.")
            for ours, theirs in (
                ("self_attn.q_proj", "attention.self.query"),
                ("self_attn.k_proj", "attention.self.key"),
                ("self_attn.v_proj", "attention.self.value"),
                ("self_attn.out_proj", "attention.output.dense"),
                ("self_attn_layer_norm", "attention.output.LayerNorm"),
                ("fc1", "intermediate.dense"),
                ("fc2", "output.dense"),
                ("final_layer_norm", "output.LayerNorm"),
            )
        ),
        ("encoder.lm_head.weight", "lm_head.decoder.weight"),
        ("encoder.lm_head.bias", "lm_head.bias"),
        ("encoder.lm_head.bias", "lm_head.decoder.bias"),
        ("encoder.lm_head.", "lm_head."),
        ("classification_heads.sentence_classification_head.", "classifier."),
    ),
    base="roberta.",
    tied=(f"{_MODEL}embed_tokens.weight", "encoder.lm_head.weight"),
    tables={f"{_MODEL}embed_tokens.weight": "source", "encoder.lm_head.bias": "source"},
    optional="encoder.lm_head.",
    ignored=r"roberta\.(pooler\..*|embeddings\.position_ids)",
    types_table="roberta.embeddings.token_type_embeddings.weight",
)

DECODER_TABLES = ("decoder.embed_tokens.weight", "decoder.output_projection.weight")
GPT2 = Counterpart(
    types={"gpt2": "GPT2"},
    classes=("LMHeadModel", "Model"),
    families=(families.LANGUAGE_MODEL,),
    arch="transformer_lm",
    task="language_modeling",
    fields=(
        Field("decoder_embed_dim", "n_embd", 768),
        Field("decoder_input_dim", "n_embd", 768),
        Field("decoder_output_dim", "n_embd", 768),
        Field("decoder_layers", "n_layer", 12),
        Field("decoder_attention_heads", "n_head", 12),
        Field("decoder_ffn_embed_dim", "n_inner", lambda config: 4 * config.get("n_embd", 768)),
        Field("max_target_positions", "n_positions", 1024),
        activation("activation_function", "gelu_new"),
        Field("share_decoder_input_output_embed", "tie_word_embeddings", True, bool, bool),
        Field("dropout", "resid_pdrop", 0.1),
        Field("dropout", "embd_pdrop", 0.1),
        Field("attention_dropout", "attn_pdrop", 0.1),
    ),
    settings={
        "decoder_normalize_before": True,
        "decoder_learned_pos": True,
        "no_scale_embedding": True,
        "layernorm_embedding": False,
        "no_decoder_final_norm": False,
        "no_token_positional_embeddings": False,
        "adaptive_input": False,
        "adaptive_softmax_cutoff": None,
        "character_embeddings": False,
    },
    fixed=(
        Fixed("layer_norm_epsilon", 1e-5, 1e-5),
        Fixed("scale_attn_weights", True, True),
        Fixed("scale_attn_by_inverse_layer_idx", False, False),
        Fixed("add_cross_attention", False, False),
    ),
    names=(
        ("decoder.embed_tokens.", "transformer.wte."),
        ("decoder.embed_positions.", "transformer.wpe."),
        ("decoder.layer_norm.", "transformer.ln_f."),
        ("decoder.output_projection.", "lm_head."),
        ("decoder.layers.*.self_attn.q_proj.", "transformer.h.*.attn.c_attn."),
        *(
            (f"decoder.layers.*.{ours}.", f"transformer.h.*.{theirs}.")
            for ours, theirs in (
                ("self_attn.out_proj", "attn.c_proj"),
                ("self_attn_layer_norm", "ln_1"),
                ("fc1", "mlp.c_fc"),
                ("fc2", "mlp.c_proj"),
                ("final_layer_norm", "ln_2"),
            )
        ),
    ),
    base="transformer.",
    tied=DECODER_TABLES,
    tables=dict.fromkeys(DECODER_TABLES, "source"),
    ignored=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
    fused=".attn.c_attn.",
    transposed=r"\.c_\w+\.weight$",
    first_position=2,
    spare="\u00c0",  # GPT-2's byte 0xC0
    first_words={"bos_token_id": 2},  # a text begins with </s> in fairseq's data
)


def _number(value: float | None) -> float:
    return float(value or 0.0)  # old files lack the setting


def _encoder_decoder(
    types: dict[str, str], *, pre_norm: bool, learned: bool, like_bart: bool | None = None,
    layerdrop: float = 0.0, silu: bool = False, **more: Any,
) -> Counterpart:  # fmt: skip
    """The record of a kind of encoder-decoders.

    Args:
        like_bart: whether the defaults in `transformers` are BART's, not M2M-100's; None: if
            positions are learned.
        layerdrop: its default in `transformers`.
        silu: whether our model may have this activation.
        more: attributes that differ.
    """
    words = "encoder.embed_tokens.weight"
    like_bart = learned if like_bart is None else like_bart
    record = Counterpart(
        types=types,
        classes=("ForConditionalGeneration", "Model"),
        families=(families.TRANSLATION, families.BART),
        arch="transformer",
        task="translation",
        fields=(
            Field("encoder_embed_dim", "d_model", 1024),
            *(
                Field(f"decoder_{kind}_dim", "d_model", 1024)
                for kind in ("embed", "input", "output")
            ),
            *(
                Field(f"{side}_{setting}", f"{side}_{name}", default)
                for side in ("encoder", "decoder")
                for setting, name, default in (
                    ("layers", "layers", 12),
                    ("attention_heads", "attention_heads", 16),
                    ("ffn_embed_dim", "ffn_dim", 4096),
                )
            ),
            *(
                Field(f"{side}_layerdrop", f"{side}_layerdrop", layerdrop, float, _number)
                for side in ("encoder", "decoder")
            ),
            Field("max_source_positions", "max_position_embeddings", 1024),
            Field("max_target_positions", "max_position_embeddings", 1024),
            activation("activation_function", "gelu" if like_bart else "relu", silu),
            Field("no_scale_embedding", "scale_embedding", not like_bart, not_, not_),
            Field("dropout", "dropout", 0.1),
            Field("attention_dropout", "attention_dropout", 0.0 if like_bart else 0.1),
            Field("activation_dropout", "activation_dropout", 0.0),
        ),
        settings={
            "encoder_normalize_before": pre_norm,
            "decoder_normalize_before": pre_norm,
            "encoder_learned_pos": learned,
            "decoder_learned_pos": learned,
            "layernorm_embedding": learned,
            "share_all_embeddings": True,
            "no_decoder_final_norm": False,
            "no_token_positional_embeddings": False,
            "no_cross_attention": False,
            "cross_self_attention": False,
            "adaptive_softmax_cutoff": None,
        },
        fixed=(_TIED,),
        names=(
            ("encoder.embed_tokens.", "model.shared."),
            ("decoder.output_projection.", "lm_head."),
            ("encoder.", "model.encoder."),
            ("decoder.", "model.decoder."),
        ),
        base="model.",
        tied=(words, *DECODER_TABLES),
        tables=dict.fromkeys((words, *DECODER_TABLES), "source"),
        logits_bias="final_logits_bias" if learned else "",
        ignored="" if learned else r"model\.(encoder|decoder)\.embed_positions\.weights?",
    )
    return record._replace(**more)


M2M100 = _encoder_decoder(
    {"m2m_100": "M2M100"},
    pre_norm=True,
    learned=False,
    layerdrop=0.05,
    languages=(r"__(\w+)__|([a-z]{3}_[A-Z][a-z]{3})", "__{}__"),
    flags="--task translation_multi_simple_epoch --encoder-langtok src --decoder-langtok "
    "--lang-dict {folder}/languages.txt --lang-pairs SOURCE-TARGET",
)
MBART = _encoder_decoder(
    {"mbart": "MBart"},
    arch="mbart_base",
    pre_norm=True,
    learned=True,
    languages=(r"([a-z]{2}_[A-Z]{2})", "[{}]"),
    flags="--task translation_from_pretrained_bart --langs {languages}",
)
# Its tokenizer writes languages where M2M-100's does; config.json does not tell.
MBART50 = MBART._replace(flags=f"{M2M100.flags} --lang-tok-style mbart")
BART = _encoder_decoder({"bart": "Bart"}, arch="bart_base", pre_norm=False, learned=True)
FSMT = _encoder_decoder({"fsmt": "FSMT"}, pre_norm=False, learned=False)
FSMT = FSMT._replace(
    fields=(*FSMT.fields, Field("share_all_embeddings", "tie_word_embeddings", False)),
    settings={k: v for k, v in FSMT.settings.items() if k != "share_all_embeddings"},
    fixed=(),
    sinusoids=tuple(f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")),
    names=FSMT.names[2:],
    tables={**FSMT.tables, **dict.fromkeys(DECODER_TABLES, "target")},
    sides={
        "source": ("src_vocab_size", "vocab-src.json"),
        "target": ("tgt_vocab_size", "vocab-tgt.json"),
    },
)


def _marian(types: dict[str, str], *, pre_norm: bool, **more: Any) -> Counterpart:
    """The record of a kind of models that `plugins.marian` computes; ``more``: as above."""
    record = _encoder_decoder(
        types, pre_norm=pre_norm, learned=False, like_bart=True, silu=True, **more
    )
    return record._replace(
        families=(families.MARIAN,),
        arch="ls_marian",
        names=(("decoder.logits_bias", "final_logits_bias"), *record.names),
        tables={**record.tables, "decoder.logits_bias": "source"},
        logits_bias="final_logits_bias",
        own_bias="decoder.logits_bias",
        table_of_positions=(0, sinusoids),
        first_words={"decoder_start_token_id": 1, "bad_words_ids": [[1]]},
    )


MARIAN = _marian({"marian": "Marian"}, pre_norm=False, classes=("MTModel", "Model"))
MARIAN = MARIAN._replace(
    fixed=(*MARIAN.fixed, Fixed("share_encoder_decoder_embeddings", True, True))
)
# With two vocabularies.
MARIAN_OF_TWO = MARIAN._replace(
    settings={
        **MARIAN.settings,
        "share_all_embeddings": False,
        "share_decoder_input_output_embed": True,
    },
    fixed=(_TIED, Fixed("share_encoder_decoder_embeddings", False, True)),
    names=(MARIAN.names[0], *MARIAN.names[2:]),
    tied=DECODER_TABLES,
    tables={**FSMT.tables, "decoder.logits_bias": "target"},
    sides={
        "source": ("vocab_size", "vocab.json"),
        "target": ("decoder_vocab_size", "target_vocab.json"),
    },
)
PEGASUS = _marian({"pegasus": "Pegasus"}, pre_norm=True, sinusoids=FSMT.sinusoids)
XGLM = Counterpart(
    types={"xglm": "XGLM"},
    classes=("ForCausalLM", "Model"),
    families=(families.LANGUAGE_MODEL,),
    arch="transformer_lm",
    task="language_modeling",
    fields=(
        *(Field(f"decoder_{kind}_dim", "d_model", 1024) for kind in ("embed", "input", "output")),
        Field("decoder_layers", "num_layers", 24),
        Field("decoder_attention_heads", "attention_heads", 16),
        Field("decoder_ffn_embed_dim", "ffn_dim", 4096),
        Field("decoder_layerdrop", "layerdrop", 0.0, float, _number),
        Field("max_target_positions", "max_position_embeddings", 2048),
        activation("activation_function", "gelu"),
        Field("no_scale_embedding", "scale_embedding", True, not_, not_),
        Field("share_decoder_input_output_embed", "tie_word_embeddings", True, bool, bool),
        Field("dropout", "dropout", 0.1),
        Field("attention_dropout", "attention_dropout", 0.1),
        Field("activation_dropout", "activation_dropout", 0.0),
    ),
    settings={
        **{k: v for k, v in GPT2.settings.items() if k != "no_scale_embedding"},
        "decoder_learned_pos": False,
    },
    fixed=(Fixed("add_cross_attention", False, False),),
    names=(("decoder.output_projection.", "lm_head."), ("decoder.", "model.")),
    base="model.",
    tied=DECODER_TABLES,
    tables=dict.fromkeys(DECODER_TABLES, "source"),
)

COUNTERPARTS = (ROBERTA, GPT2, M2M100, MBART, BART, FSMT, MARIAN, MARIAN_OF_TWO, PEGASUS, XGLM)
