"""Layers of Hugging Face as ours read them: the tensors of their modules, and how they compute.

Shapes: N = outputs of a product.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightseq_fairseq.huggingface.covered import LayerNorm, Linear
from lightseq_fairseq.layers.attention import AttentionParts
from lightseq_fairseq.layers.decoder import DecoderParts
from lightseq_fairseq.layers.encoder import EncoderParts, LayerParts


@dataclass
class ReadAttention(AttentionParts):
    """An attention block.

    Attributes:
        dropout: the rate now, 0 in evaluation.
    """

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    out_proj: Linear
    num_heads: int
    dropout: float
    training: bool = True
    window: int = 0
    rotation: tuple[Tensor, Tensor] | None = None

    @property
    def parts(self) -> list[Linear]:
        return [self.q_proj, self.k_proj, self.v_proj, self.out_proj]


@dataclass(kw_only=True)
class _ReadLayer(LayerParts):
    """What both kinds of layers have; its rates are those of now."""

    self_attn: ReadAttention
    self_attn_layer_norm: LayerNorm | None
    fc1: Linear
    fc2: Linear
    final_layer_norm: LayerNorm
    dropout: float
    activation: str
    site: int
    activation_dropout: float = 0.0
    feed_forward_dropout: float | None = None
    is_gated: bool = False
    normalize_before: bool = False
    training: bool = True

    @property
    def blocks(self) -> list[ReadAttention]:
        return [self.self_attn]

    @property
    def parts(self) -> list[Linear | LayerNorm]:
        norms = [self.self_attn_layer_norm, self.final_layer_norm]
        return [
            *self.self_attn.parts, self.fc1, self.fc2, *(norm for norm in norms if norm is not None)
        ]  # fmt: skip


@dataclass(kw_only=True)
class ReadEncoderLayer(_ReadLayer, EncoderParts):
    """A layer with self-attention."""


@dataclass(kw_only=True)
class ReadDecoderLayer(_ReadLayer, DecoderParts):
    """A layer with self-attention and cross attention."""

    encoder_attn: ReadAttention
    encoder_attn_layer_norm: LayerNorm

    @property
    def blocks(self) -> list[ReadAttention]:
        return [self.self_attn, self.encoder_attn]

    @property
    def parts(self) -> list[Linear | LayerNorm]:
        return [*super().parts, *self.encoder_attn.parts, self.encoder_attn_layer_norm]
