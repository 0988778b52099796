"""The models of ``lightseq-bench huggingface``, with random weights."""

from __future__ import annotations

from typing import Any, NamedTuple

LABELS = 9  # of a token, as in CoNLL-2003


class Model(NamedTuple):
    """A model's family, by the beginning of the names of transformers' classes, and its sizes.

    Attributes:
        positions: tokens of the longest sentence.
        pad: the number of the pad token.
    """

    family: str
    width: int = 768
    layers: int = 12
    heads: int = 12
    vocabulary: int = 50_265
    positions: int = 512
    pad: int = 1


_LARGE: dict[str, Any] = {"width": 1024, "layers": 24, "heads": 16}
_BERT = Model("Bert", vocabulary=30_522, pad=0)
MODELS = {
    "bert_base": _BERT,
    "bert_large": _BERT._replace(**_LARGE),
    "roberta_base": Model("Roberta"),
    "roberta_large": Model("Roberta", **_LARGE),
    "xlmr_base": Model("XLMRoberta", vocabulary=250_002),
    # For machines without a GPU, to test that everything works.
    "roberta_tiny": Model("Roberta", 64, 2, 2, 500),
}


def built(name: str, head: str, rate: float) -> Any:
    """The model ``name`` of transformers, in float32 on the CPU.

    head: the end of the name of its class, such as "ForMaskedLM", or "Model". rate: of all dropout.
    """
    import transformers

    model = MODELS[name]
    # The family's first positions are those of pads; BERT's are not.
    unused = model.pad + 1 if model.pad else 0
    config = getattr(transformers, f"{model.family}Config")(
        vocab_size=model.vocabulary, hidden_size=model.width, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, intermediate_size=4 * model.width,
        max_position_embeddings=model.positions + unused, type_vocab_size=1 if model.pad else 2,
        layer_norm_eps=1e-5 if model.pad else 1e-12, pad_token_id=model.pad,
        hidden_dropout_prob=rate, attention_probs_dropout_prob=rate, attn_implementation="sdpa",
        num_labels=LABELS if head == "ForTokenClassification" else 2,
    )  # fmt: skip
    # Else the first batch decides it, and torch compiles the model a second time.
    config.problem_type = "single_label_classification"
    options = {"add_pooling_layer": False} if head == "Model" else {}
    return getattr(transformers, f"{model.family}{head}")(config, **options)
