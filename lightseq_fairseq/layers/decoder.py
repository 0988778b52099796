"""The Transformer decoder layer and stack on packed tokens.

Shapes: T = packed target tokens, T_src = packed source tokens, B = sentences, L = longest target,
S = longest source, C = model width, C_enc = encoder width, H = heads.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lightseq_fairseq.layers.adapter import adapter_of
from lightseq_fairseq.layers.attention import AttentionParts, MultiheadAttention
from lightseq_fairseq.layers.encoder import LayerParts, TransformerLayer, run_encoder
from lightseq_fairseq.layers.node import Input, apply
from lightseq_fairseq.layers.residual_norm import Norm
from lightseq_fairseq.layers.stack import Stack, Sublayer
from lightseq_fairseq.layers.weight import Projection, Weight
from lightseq_fairseq.memory.packing import Segments


class DecoderParts(LayerParts):
    """A layer that `run_decoder` runs.

    Attributes:
        encoder_attn, encoder_attn_layer_norm: of the cross attention.
    """

    encoder_attn: AttentionParts
    encoder_attn_layer_norm: Norm

    def sublayers(
        self, target: Segments, source: Segments, rng: Tensor, causal: bool, memory: Weight,
        place: int,
    ) -> list[Sublayer]:  # fmt: skip
        """place: of the layer in its stack, see ``memory_weight``."""
        site = self.first_site(rng)
        own = self.self_attn.arguments(target, target, causal, rng, site)
        cross = self.encoder_attn.arguments(target, source, False, rng, site + 2)
        norms = self.self_attn_layer_norm, self.encoder_attn_layer_norm
        return [
            self.self_attn.sublayer(own, norms[0], self.output_dropout(rng, site + 1)),
            self.encoder_attn.sublayer(
                cross, norms[1], self.output_dropout(rng, site + 3), memory, place
            ),
            self.feed_forward(rng, site + 4),
        ]


class DecoderLayer(DecoderParts, TransformerLayer):
    """Self-attention, cross attention and feed-forward with residuals.

    Args as ``EncoderLayer``; ``encoder_dim`` is the width of the encoder's output (default C).

    Source: ``fairseq.modules.transformer_layer.TransformerDecoderLayerBase``.
    """

    def __init__(
        self, embed_dim: int, ffn_dim: int, num_heads: int, *, encoder_dim: int | None = None,
        dropout: float = 0.0, attention_dropout: float = 0.0, activation_dropout: float = 0.0,
        activation: str = "relu", normalize_before: bool = False, site: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            embed_dim, ffn_dim, num_heads, embed_dim if encoder_dim is None else encoder_dim,
            dropout=dropout, attention_dropout=attention_dropout,
            activation_dropout=activation_dropout, activation=activation,
            normalize_before=normalize_before, site=site,
        )  # fmt: skip

    def forward(
        self, x: Tensor, encoder_out: Tensor, target: Segments, source: Segments, rng: Tensor
    ) -> Tensor:
        """x [T, C], encoder_out [T_src, C_enc] -> [T, C]; ``rng`` from ``layers.draw_rng``."""
        return run_decoder([self], None, x, encoder_out, target, source, rng)


def _memory(layers: Iterable[DecoderParts]) -> list[Projection]:
    """Key and value projections of all cross attentions, in the order of their GEMM."""
    blocks = [layer.encoder_attn for layer in layers]
    return [p for block in blocks for p in (block.k_proj, block.v_proj)]


def memory_weight(layers: Iterable[DecoderParts], rng: Tensor | None = None) -> Weight:
    """By which one product makes keys and values [T_src, 2 * C] of all layers, side by side."""
    return Weight.of(*_memory(layers), rng=rng)


def _products(layers: Iterable[LayerParts]) -> list[list[Projection]]:
    """For each matrix product of these layers what it reads as one, in the order of rows.

    layers: as in ``fused_groups``.
    """
    stack = list(layers)
    products: list[list[Projection]] = []
    for layer in stack:
        own = layer.self_attn
        products += [[own.q_proj, own.k_proj, own.v_proj], [own.out_proj], [layer.fc1], [layer.fc2]]
        if isinstance(layer, DecoderParts):
            products += [[layer.encoder_attn.q_proj], [layer.encoder_attn.out_proj]]
    memory = _memory(layer for layer in stack if isinstance(layer, DecoderParts))
    return [*products, memory] if memory else products


def fused_groups(layers: Iterable[LayerParts]) -> list[list[Tensor]]:
    """Lists the parameters that one GEMM reads together, for ``parameters.flatten_parameters``.

    With these groups, no weights are copied before the GEMMs. Without them, results are the same.

    Args:
        layers: encoder and decoder layers in the order of the data flow. Decoder layers must be
            those of one stack, because one GEMM computes the keys and values of all of them.

    Returns:
        Weights and biases of each self-attention, and those that read the encoder's output.
    """
    groups: list[list[Tensor]] = []
    for product in _products(layers):
        if len(product) > 1:
            biases = [part.bias for part in product if part.bias is not None]
            groups += [[part.weight for part in product], biases]
    return [group for group in groups if group]


def product_weights(layers: Iterable[LayerParts]) -> list[list[Tensor]]:
    """For each matrix product without adapters the weights that it reads, in the order of rows.

    If a product with adapters makes queries, keys or values of cross attention, these products are
    all left out, because one op writes their gradients, in one format.

    layers: as in ``fused_groups``.
    """
    stack = list(layers)
    decoders = [layer for layer in stack if isinstance(layer, DecoderParts)]
    cross = {*_memory(decoders), *(layer.encoder_attn.q_proj for layer in decoders)}
    products = _products(stack)
    adapted = {x for product in products for x in product if adapter_of(x) is not None}
    if adapted & cross:
        adapted |= cross
    return [[x.weight for x in product] for product in products if adapted.isdisjoint(product)]


def run_decoder(
    layers: Iterable[DecoderParts], last_norm: Norm | None, x: Tensor | Input,
    encoder_out: Tensor | Input, target: Segments, source: Segments, rng: Tensor,
    causal: bool = True, checkpoint_activations: bool = False,
    attention: list[Tensor] | None = None, attention_of: int = 0,
) -> Tensor:  # fmt: skip
    """Run a stack on x [T, C] with cross attention to encoder_out [T_src, C_enc]; returns [T, C].

    x, encoder_out: tensors, or an ``Input`` each, see ``run_encoder``.
    causal: a target token attends only to itself and to earlier target tokens.
    checkpoint_activations: see ``run_encoder``.
    attention: a list to which the cross-attention weights [H, B, L, S] of the layer
        ``attention_of`` are appended, before dropout; as in fairseq, none if fewer layers run.
    """
    stack = list(layers)
    inputs = Input.of(x), Input.of(encoder_out)
    if not stack:
        return run_encoder([], last_norm, inputs[0].x, target, rng)
    memory = memory_weight(stack, rng)
    if attention_of >= len(stack):  # --decoder-layerdrop has dropped layers
        attention = None
    sublayers = [
        layer.sublayers(target, source, rng, causal, memory, place)
        for place, layer in enumerate(stack)
    ]
    result, *asked = apply(
        Stack(
            sublayers, last_norm, rng, is_pre_norm=stack[0].normalize_before,
            recomputes=checkpoint_activations, memory=memory,
            watched=None if attention is None else sublayers[attention_of][1],
        ), *inputs,
    )  # fmt: skip
    if attention is not None:
        block, (queries_of, keys_of) = stack[attention_of].encoder_attn, asked
        assert isinstance(block, MultiheadAttention)
        attention.append(block.cross_weights(queries_of.x, keys_of.x, target, source))
    return result.x
