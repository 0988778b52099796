"""The Transformer decoder layer and stack on packed tokens.

Shapes: T = packed target tokens, T_src = packed source tokens, B = sentences, L = longest target,
S = longest source, C = model width, C_enc = encoder width, H = heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lightseq_fairseq.layers.attention import ColumnSlices, MultiheadAttention
from lightseq_fairseq.layers.encoder import EncoderLayer, Following, TransformerLayer
from lightseq_fairseq.layers.linear import linear_parts
from lightseq_fairseq.layers.products import PLAIN, Product, product_for
from lightseq_fairseq.layers.residual_norm import layer_norm
from lightseq_fairseq.memory.packing import Segments
from lightseq_fairseq.memory.parameters import as_one


class DecoderLayer(TransformerLayer):
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
            dropout=dropout, activation_dropout=activation_dropout, activation=activation,
            normalize_before=normalize_before, site=site,
        )  # fmt: skip
        self.self_attn = MultiheadAttention(embed_dim, num_heads, dropout=attention_dropout)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.encoder_attn = MultiheadAttention(
            embed_dim, num_heads, key_dim=encoder_dim, dropout=attention_dropout
        )
        self.encoder_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1 = nn.Linear(embed_dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def norms(self, next_norm: nn.LayerNorm | None) -> tuple[nn.LayerNorm | None, ...]:
        """The LayerNorm that is applied at the end of each of the three sublayers."""
        own = (self.self_attn_layer_norm, self.encoder_attn_layer_norm, self.final_layer_norm)
        return (*own[1:], next_norm) if self.normalize_before else own

    def forward_in_stack(
        self, x: Tensor, stream: Tensor | None, memory: Tensor, slices: ColumnSlices,
        target: Segments, source: Segments, rng: Tensor, following: Following,
        causal: bool = True, need_weights: bool = False,
    ) -> tuple[Any, Any, Tensor | None]:  # fmt: skip
        """One layer of a stack, see ``EncoderLayer.forward_in_stack``.

        memory: [T_src, 2 * C], keys and values of the cross attention. The third result is
        ``MultiheadAttention.cross_weights`` with ``need_weights``, else None.
        """
        norms = self.norms(following.norm)
        heads = self.self_attn.heads(target, target, causal, rng, self.first_site(rng))
        reader = PLAIN if need_weights else self.encoder_attn.query_product
        residual = self.residual(norms[0], rng, 1, reader)
        stream, x = self.self_attn.self_attention(x, stream, heads, residual)
        heads = self.encoder_attn.heads(target, source, False, rng, self.first_site(rng) + 2)
        weights = self.encoder_attn.cross_weights(x, memory, heads) if need_weights else None
        residual = self.residual(norms[1], rng, 3, product_for(self.fc1.weight))
        stream, x = self.encoder_attn.cross_attention(x, stream, memory, slices, heads, residual)
        stream, x = self.feed_forward(x, stream, norms[2], rng, 4, following.reader)
        return x, stream, weights

    def forward(
        self, x: Tensor, encoder_out: Tensor, target: Segments, source: Segments, rng: Tensor
    ) -> Tensor:
        """x [T, C], encoder_out [T_src, C_enc] -> [T, C]; ``rng`` from ``layers.draw_rng``."""
        return run_decoder([self], None, x, encoder_out, target, source, rng)


def memory_weights(layers: Iterable[DecoderLayer]) -> tuple[list[Tensor], list[Tensor]]:
    """Key and value weights, and biases, of all cross attentions, in the order of their GEMM."""
    blocks = [layer.encoder_attn for layer in layers]
    projections = [p for block in blocks for p in (block.k_proj, block.v_proj)]
    return [p.weight for p in projections], [p.bias for p in projections]


def fused_groups(layers: Iterable[EncoderLayer | DecoderLayer]) -> list[list[Tensor]]:
    """Lists the parameters that one GEMM reads together, for ``parameters.flatten_parameters``.

    With these groups, no weights are copied before the GEMMs. Without them, results are the same.

    Args:
        layers: encoder and decoder layers in the order of the data flow. Decoder layers must be
            those of one stack, because one GEMM computes the keys and values of all of them.

    Returns:
        Weights and biases of each self-attention, and those that read the encoder's output.
    """
    stack = list(layers)
    groups: list[list[Tensor]] = []
    for layer in stack:
        parts = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        groups += [[part.weight for part in parts], [part.bias for part in parts]]
    memory = memory_weights(layer for layer in stack if isinstance(layer, DecoderLayer))
    return [*groups, *(group for group in memory if group)]


def product_weights(layers: Iterable[EncoderLayer | DecoderLayer]) -> list[list[Tensor]]:
    """For each matrix product of these layers the weights that it reads, in the order of rows.

    layers: as in ``fused_groups``.
    """
    stack = list(layers)
    products: list[list[Tensor]] = []
    for layer in stack:
        own = layer.self_attn
        products += [[own.q_proj.weight, own.k_proj.weight, own.v_proj.weight]]
        linears = [own.out_proj, layer.fc1, layer.fc2]
        if isinstance(layer, DecoderLayer):
            linears += [layer.encoder_attn.q_proj, layer.encoder_attn.out_proj]
        products += [[linear.weight] for linear in linears]
    weights, _ = memory_weights(layer for layer in stack if isinstance(layer, DecoderLayer))
    return [*products, *([weights] if weights else [])]


def memory_product(layers: Iterable[DecoderLayer]) -> Product:
    """The product by which a stack of at least one layer reads the encoder's output."""
    return product_for(as_one(memory_weights(layers)[0]))


def project_memory(
    layers: list[DecoderLayer], encoder_out: Tensor
) -> tuple[tuple[Tensor, ...], ColumnSlices]:
    """Compute keys and values of every layer's cross attention in one GEMM.

    encoder_out [T_src, C_enc] -> one tensor [T_src, 2 * C] per layer, and where their gradients
    are written.
    """
    memories = linear_parts(encoder_out, len(layers), *memory_weights(layers))
    return memories, ColumnSlices(memory_product(layers))


def run_decoder(
    layers: Iterable[DecoderLayer], last_norm: nn.LayerNorm | None, x: Tensor,
    encoder_out: Tensor, target: Segments, source: Segments, rng: Tensor, causal: bool = True,
    checkpoint_activations: bool = False,
) -> Tensor:  # fmt: skip
    """Run a stack on x [T, C] with cross attention to encoder_out [T_src, C_enc]; returns [T, C].

    causal: a target token attends only to itself and to earlier target tokens.
    checkpoint_activations: see ``run_encoder``.
    """
    return run_decoder_with_weights(
        layers, last_norm, x, encoder_out, target, source, rng, causal, None, checkpoint_activations
    )[0]


def run_decoder_with_weights(
    layers: Iterable[DecoderLayer], last_norm: nn.LayerNorm | None, x: Tensor,
    encoder_out: Tensor, target: Segments, source: Segments, rng: Tensor, causal: bool,
    attention_of: int | None, checkpoint_activations: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As ``run_decoder``; also returns the cross-attention weights of the layer ``attention_of``.

    The weights are ``MultiheadAttention.cross_weights``, [H, B, L, S]; None if ``attention_of`` is
    None.
    """
    stack = list(layers)
    if not stack:
        return (x if last_norm is None else layer_norm(x, last_norm, rng)[1]), None
    memories, slices = project_memory(stack, encoder_out)
    stream = wanted = None
    if stack[0].normalize_before:
        stream, x = layer_norm(
            x, stack[0].self_attn_layer_norm, rng, stack[0].self_attn.self_product
        )
    followings = (*(layer.as_following() for layer in stack[1:]), Following(last_norm))
    for place, (layer, memory) in enumerate(zip(stack, memories, strict=True)):
        x, stream, weights = layer.run(
            checkpoint_activations, x, stream, memory, slices, target, source, rng,
            followings[place], causal, place == attention_of,
        )  # fmt: skip
        wanted = wanted if weights is None else weights
    return (stream if x is None else x), wanted
