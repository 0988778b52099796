"""The Transformer encoder layer and stack on packed tokens.

Shapes: T = packed tokens, C = model width, F = feed-forward width, H = heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightseq_fairseq.layers.attention import AttentionParts, MultiheadAttention
from lightseq_fairseq.layers.feed_forward import FeedForward
from lightseq_fairseq.layers.node import Input, apply
from lightseq_fairseq.layers.residual_norm import Norm
from lightseq_fairseq.layers.sites import first_site
from lightseq_fairseq.layers.stack import Stack, Sublayer
from lightseq_fairseq.layers.weight import Projection, Weight
from lightseq_fairseq.memory.packing import Segments
from lightseq_fairseq.ops import Cast, Dropout

TensorOrInput = TypeVar("TensorOrInput", Tensor, Input)


class LayerParts:
    """What encoder and decoder layers consist of, in fairseq's modules or in another library's.

    Attributes:
        self_attn, fc1, fc2: the products of its sublayers.
        self_attn_layer_norm, final_layer_norm: the LayerNorm of each sublayer; None only before the
            first one of a pre-norm layer, which then reads the residual.
        dropout, activation_dropout: see ``EncoderLayer``; if ``training``.
        feed_forward_dropout: in place of ``dropout`` for the feed-forward's result, unless None.
        is_gated: the feed-forward is a GLU, whose ``fc1`` has twice as many outputs.
        activation, normalize_before: see ``EncoderLayer``.
        site: see ``EncoderLayer``.
    """

    self_attn: AttentionParts
    self_attn_layer_norm: Norm | None
    fc1: Projection
    fc2: Projection
    final_layer_norm: Norm
    dropout: float
    activation_dropout: float
    feed_forward_dropout: float | None = None
    is_gated: bool = False
    activation: str
    normalize_before: bool
    site: int | None
    training: bool

    def first_site(self, rng: Tensor) -> int:
        """See ``sites.first_site``."""
        return first_site(self, self.site, rng)

    def output_dropout(self, rng: Tensor, site: int, p: float | None = None) -> Dropout:
        """The dropout of a sublayer's result; p: its rate in training, by default ``dropout``."""
        p = self.dropout if p is None else p
        return Dropout(p if self.training else 0.0, rng, site)

    def feed_forward(self, rng: Tensor, site: int) -> FeedForward:
        """The sublayer; it has two dropout sites, from ``site`` on."""
        return FeedForward(
            norm=self.final_layer_norm,
            first=Weight.of(self.fc1, bias=self.is_gated, rng=rng),
            last=Weight.of(self.fc2, bias=False, rng=rng), bias=self.fc2.bias,
            dropout=self.output_dropout(rng, site + 1, self.feed_forward_dropout),
            first_bias=None if self.is_gated else self.fc1.bias,
            activation=self.activation, is_gated=self.is_gated,
            inner_dropout=self.output_dropout(rng, site, self.activation_dropout),
            trains=torch.is_grad_enabled(),
        )  # fmt: skip


class EncoderParts(LayerParts):
    """A layer that `run_encoder` runs."""

    def sublayers(self, segments: Segments, rng: Tensor, causal: bool) -> list[Sublayer]:
        site = self.first_site(rng)
        arguments = self.self_attn.arguments(segments, segments, causal, rng, site)
        dropout = self.output_dropout(rng, site + 1)
        return [
            self.self_attn.sublayer(arguments, self.self_attn_layer_norm, dropout),
            self.feed_forward(rng, site + 2),
        ]


class TransformerLayer(LayerParts, nn.Module):
    """Common base of encoder and decoder layers.

    encoder_dim: width of what cross attention reads; None if there is none.
    """

    def __init__(
        self, embed_dim: int, ffn_dim: int, num_heads: int, encoder_dim: int | None, *,
        dropout: float, attention_dropout: float, activation_dropout: float, activation: str,
        normalize_before: bool, site: int | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.self_attn = MultiheadAttention(embed_dim, num_heads, dropout=attention_dropout)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.encoder_attn: AttentionParts
        self.encoder_attn_layer_norm: Norm
        if encoder_dim is not None:
            self.encoder_attn = MultiheadAttention(
                embed_dim, num_heads, encoder_dim, attention_dropout
            )
            self.encoder_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1 = nn.Linear(embed_dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)
        self.dropout, self.activation_dropout = dropout, activation_dropout
        self.activation, self.normalize_before, self.site = activation, normalize_before, site


class EncoderLayer(EncoderParts, TransformerLayer):
    """Self-attention and feed-forward with residuals; fairseq's parameter names and initial values.

    Args:
        embed_dim: C.
        ffn_dim: F.
        num_heads: H.
        dropout: rate for each sublayer's output. All three rates are for training mode only.
        attention_dropout: rate for the attention probabilities.
        activation_dropout: rate after the activation function.
        activation: relu, gelu (erf), gelu_accurate (tanh) or silu.
        normalize_before: pre-LayerNorm (tensor2tensor), not post-LayerNorm (Vaswani et al. 2017).
        site: first dropout site of the layer. None assigns one that no other layer of the pass has,
            see ``sites.first_site``. Sites that you choose must be below 2**20 and at least
            ``sites.SITES_PER_LAYER`` apart.

    With ``causal`` in ``run_encoder``, it is also the layer of a decoder-only model, which has the
    same parts.

    Source: ``fairseq.modules.transformer_layer.TransformerEncoderLayerBase``.
    """

    def __init__(
        self, embed_dim: int, ffn_dim: int, num_heads: int, *, dropout: float = 0.0,
        attention_dropout: float = 0.0, activation_dropout: float = 0.0,
        activation: str = "relu", normalize_before: bool = False, site: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            embed_dim, ffn_dim, num_heads, None, dropout=dropout,
            attention_dropout=attention_dropout, activation_dropout=activation_dropout,
            activation=activation, normalize_before=normalize_before, site=site,
        )  # fmt: skip

    def forward(self, x: Tensor, segments: Segments, rng: Tensor) -> Tensor:
        """x [T, C] -> [T, C]; ``rng`` int64 [2] from ``layers.draw_rng``."""
        return run_encoder([self], None, x, segments, rng)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """Accept checkpoints of older fairseq versions, which name or store weights differently."""
        for place, norm in enumerate(("self_attn_layer_norm", "final_layer_norm")):
            for kind in ("weight", "bias"):
                old = state_dict.pop(f"{name}.layer_norms.{place}.{kind}", None)
                if old is not None:
                    state_dict[f"{name}.{norm}.{kind}"] = old
        # fairseq 0.12.2 stores each matrix twice; the second copy was never trained.
        for dead in ("in_proj", "out_proj", "fc1", "fc2"):
            for kind in ("weight", "bias"):
                state_dict.pop(f"{name}.{dead}_{kind}", None)


def first_cast(layers: Iterable[LayerParts]) -> Cast | None:
    """How to cast the input of a stack for its first product; None if LayerNorm reads it."""
    first = next(iter(layers), None)
    if first is None or first.normalize_before:
        return None
    block = first.self_attn
    return Weight.of(block.q_proj, block.k_proj, block.v_proj).input_cast


def run_encoder(
    layers: Iterable[EncoderParts], last_norm: Norm | None, x: TensorOrInput,
    segments: Segments, rng: Tensor, causal: bool = False, checkpoint_activations: bool = False,
    states: list[Tensor] | None = None, cast: Cast | None = None,
) -> TensorOrInput:  # fmt: skip
    """Run a stack on x [T, C]; returns [T, C].

    In pre-norm stacks, each LayerNorm is fused into the op before it.

    x: a tensor, or an ``Input``, which may have its cast to fp8; the result is of the same kind.
    causal: a token attends only to itself and to earlier tokens.
    checkpoint_activations: save only the input of each layer for backward, which runs the layers
        again, one at a time. This saves memory, takes time, and gives the same bits. Until backward
        is done, do not change the layers' parameters.
    states: a list to which x and the residual stream after each layer are appended.
    cast: of the product that reads the result, if that is an ``Input``.
    """
    stack, given = list(layers), Input.of(x)
    result, *behind = apply(
        Stack(
            [layer.sublayers(segments, rng, causal) for layer in stack], last_norm, rng,
            is_pre_norm=not stack or stack[0].normalize_before, recomputes=checkpoint_activations,
            cast=cast, states=states is not None,
        ), given,
    )  # fmt: skip
    if states is not None:
        states += [given.x, *(state.x for state in behind)]
    return result.x if isinstance(x, Tensor) else result
