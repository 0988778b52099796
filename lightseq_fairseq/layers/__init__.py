"""Fused Transformer layers on packed tokens, usable without fairseq."""
# ruff: noqa: I001, RUF022  (sorted in the order of the data flow, not alphabetically)

from lightseq_fairseq.layers.dropout import draw_rng, dropout
from lightseq_fairseq.layers.embedding import Embedding, embed, sinusoidal_positions
from lightseq_fairseq.layers.attention import MultiheadAttention
from lightseq_fairseq.layers.encoder import EncoderLayer, run_encoder
from lightseq_fairseq.layers.decoder import DecoderLayer, fused_groups, run_decoder
from lightseq_fairseq.layers.linear import linear, vocabulary_logits
from lightseq_fairseq.layers.masked_lm_head import masked_lm_logits
from lightseq_fairseq.layers.cross_entropy import label_smoothed_cross_entropy

__all__ = [
    "draw_rng",
    "dropout",
    "embed",
    "sinusoidal_positions",
    "Embedding",
    "MultiheadAttention",
    "EncoderLayer",
    "run_encoder",
    "DecoderLayer",
    "run_decoder",
    "fused_groups",
    "linear",
    "vocabulary_logits",
    "masked_lm_logits",
    "label_smoothed_cross_entropy",
]
