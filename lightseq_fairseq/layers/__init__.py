"""Fused Transformer layers on packed tokens, usable without fairseq.

In data-flow order: embedding, encoder, decoder, vocabulary projection, loss.
"""

from lightseq_fairseq.layers.dropout import draw_rng
from lightseq_fairseq.layers.embedding import Embedding, embed, sinusoidal_positions
from lightseq_fairseq.layers.attention import MultiheadAttention  # isort: skip
from lightseq_fairseq.layers.encoder import EncoderLayer, run_encoder  # isort: skip
from lightseq_fairseq.layers.decoder import DecoderLayer, run_decoder  # isort: skip
from lightseq_fairseq.layers.linear import linear  # isort: skip
from lightseq_fairseq.layers.cross_entropy import label_smoothed_cross_entropy  # isort: skip

__all__ = [
    "DecoderLayer",
    "Embedding",
    "EncoderLayer",
    "MultiheadAttention",
    "draw_rng",
    "embed",
    "label_smoothed_cross_entropy",
    "linear",
    "run_decoder",
    "run_encoder",
    "sinusoidal_positions",
]
