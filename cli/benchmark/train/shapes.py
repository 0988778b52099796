"""The models of the benchmarks, and their sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightseq_fairseq.cli.benchmark.train.corpus import (
    MASKED_VOCABULARY,
    TEXT_VOCABULARY,
    VOCABULARY,
)


class Shape(NamedTuple):
    """A model: fairseq's name of the architecture, and its sizes.

    Attributes:
        encoder_layers: 0 for a language model.
        decoder_layers: 0 for RoBERTa, which has a LayerNorm after its embedding.
        activation: of the feed-forward sublayers, by its name in torch.nn.functional.
        tied: the output projection is the embedding.
        positions: size of the table of learned positions; 0: positions are sinusoidal.
        hugging_face: the beginning of the names of transformers' classes; empty: it has none.
        vocabulary: number of words of the corpus, including fairseq's special words.
    """

    arch: str
    width: int
    ffn: int
    heads: int
    encoder_layers: int = 6
    decoder_layers: int = 6
    normalize_before: bool = False
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: str = "relu"
    tied: bool = True
    positions: int = 0
    hugging_face: str = ""
    vocabulary: int = VOCABULARY

    @property
    def is_language_model(self) -> bool:
        return self.encoder_layers == 0

    @property
    def is_masked(self) -> bool:
        """Whether the model is RoBERTa, which restores masked tokens."""
        return self.decoder_layers == 0

    @property
    def is_bart(self) -> bool:
        return self.hugging_face == "Bart"

    @property
    def is_nllb(self) -> bool:
        return self.hugging_face == "M2M100"

    @property
    def is_marian(self) -> bool:
        return self.hugging_face == "Marian"

    @property
    def norms_embedding(self) -> bool:
        """Whether the model has a LayerNorm after its embeddings."""
        return self.is_masked or self.is_bart


DROPOUT = 0.1
WARM_UP = 4000  # updates, in all systems
UNUSED_POSITIONS = 2  # first rows of fairseq's table of positions, which no token uses
_T2T_BIG = Shape("transformer_wmt_en_de_big_t2t", 1024, 4096, 16, 6, 6, True, 0.1, 0.1)
_GPT2 = Shape("transformer_lm_gpt2_small", 1024, 4096, 16, 0, 24, True, 0.1, activation="gelu",
              tied=False, vocabulary=TEXT_VOCABULARY)  # fmt: skip
_ROBERTA = Shape("roberta_base", 768, 3072, 12, 12, 0, False, 0.1, activation="gelu",
                 positions=512, hugging_face="Roberta", vocabulary=MASKED_VOCABULARY)  # fmt: skip
_BART = _ROBERTA._replace(
    arch="bart_large", width=1024, ffn=4096, heads=16, decoder_layers=12, positions=1024,
    hugging_face="Bart",
)  # fmt: skip
_NLLB = Shape("transformer", 1024, 4096, 16, 12, 12, True, 0.1, hugging_face="M2M100",
              vocabulary=256_206)  # fmt: skip
# As many words as opus-mt-en-de has.
_MARIAN = Shape("marian_base", 512, 2048, 8, activation="silu", hugging_face="Marian",
                vocabulary=58_101)  # fmt: skip
_SMALL: dict[str, Any] = {
    "width": 64,
    "ffn": 64,
    "heads": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
}
SHAPES = {
    "t2t_big": _T2T_BIG,
    "12e12d": _T2T_BIG._replace(encoder_layers=12, decoder_layers=12),
    "24e24d": _T2T_BIG._replace(encoder_layers=24, decoder_layers=24),
    "base": Shape("transformer_wmt_en_de", 512, 2048, 8),
    "iwslt": Shape("transformer_iwslt_de_en", 512, 1024, 4),
    # For machines without a GPU, to test that everything works.
    "tiny": Shape("transformer_tiny", 64, 64, 2, 2, 2),
    # GPT-2's smallest model. fairseq's "gpt2" archs are larger and have sinusoidal positions.
    "gpt2_124m": Shape("transformer_lm_gpt3_small", 768, 3072, 12, 0, 12, True, 0.1, 0.0, "gelu",
                       positions=1024, vocabulary=TEXT_VOCABULARY),
    "lm_base": Shape("transformer_lm", 512, 2048, 8, 0, 6, tied=False, vocabulary=TEXT_VOCABULARY),
    "gpt2_small": _GPT2,
    # The counterpart of "tiny".
    "lm_tiny": _GPT2._replace(
        arch="transformer_lm_gpt2_tiny", width=64, ffn=64, heads=1, decoder_layers=2
    ),
    "roberta_base": _ROBERTA,
    "roberta_large": _ROBERTA._replace(
        arch="roberta_large", width=1024, ffn=4096, heads=16, encoder_layers=24
    ),
    # The counterpart of "tiny"; fairseq has no such arch.
    "roberta_tiny": _ROBERTA._replace(**{**_SMALL, "decoder_layers": 0}),
    "bart_large": _BART,
    "nllb_600m": _NLLB,
    "nllb_1.3b": _NLLB._replace(
        ffn=8192, encoder_layers=24, decoder_layers=24
    ),
    "nllb_3.3b": _NLLB._replace(
        width=2048, ffn=8192, encoder_layers=24, decoder_layers=24
    ),
    "marian_base": _MARIAN,
    "marian_big": _MARIAN._replace(
        arch="marian_big", width=1024, ffn=4096, heads=16, activation="relu"
    ),
    # For machines without a GPU.
    "marian_tiny": _MARIAN._replace(**_SMALL),
    "bart_tiny": _BART._replace(**_SMALL),
    "nllb_tiny": _NLLB._replace(**_SMALL),
}  # fmt: skip
MASKED = [model for model, shape in SHAPES.items() if shape.is_masked]
LANGUAGE = [model for model, shape in SHAPES.items() if shape.is_language_model]
BART = [model for model, shape in SHAPES.items() if shape.is_bart]
NLLB = [model for model, shape in SHAPES.items() if shape.is_nllb]
MARIAN = [model for model, shape in SHAPES.items() if shape.is_marian]
_OTHERS = MASKED + LANGUAGE + BART + NLLB + MARIAN
TRANSLATION = [model for model in SHAPES if model not in _OTHERS]
