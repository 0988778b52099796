"""The Transformer encoder layer and stack on packed tokens.

Shapes: T = packed tokens, C = model width, F = feed-forward width, H = heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightseq_fairseq.layers.attention import MultiheadAttention
from lightseq_fairseq.layers.feed_forward import Activation, feed_forward
from lightseq_fairseq.layers.products import PLAIN, Product, product_for
from lightseq_fairseq.layers.residual_norm import Residual, layer_norm
from lightseq_fairseq.layers.sites import first_site
from lightseq_fairseq.memory.packing import Segments


class Following(NamedTuple):
    """What follows a layer in its stack.

    Attributes:
        norm: the LayerNorm of the next layer or of the stack's end, in a pre-norm stack.
        reader: the product that reads the layer's result.
    """

    norm: nn.LayerNorm | None
    reader: Product = PLAIN


class TransformerLayer(nn.Module):
    """Common base of encoder and decoder layers: feed-forward, residuals, dropout rates."""

    self_attn: MultiheadAttention
    self_attn_layer_norm: nn.LayerNorm
    fc1: nn.Linear
    fc2: nn.Linear
    forward_in_stack: Callable[..., Any]

    def __init__(
        self, *, dropout: float, activation_dropout: float, activation: str,
        normalize_before: bool, site: int | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dropout, self.activation_dropout = dropout, activation_dropout
        self.activation, self.normalize_before, self.site = activation, normalize_before, site

    def first_site(self, rng: Tensor) -> int:
        """See ``sites.first_site``."""
        return first_site(self, self.site, rng)

    def run(self, checkpoint_activations: bool, *arguments: Any) -> Any:
        """``forward_in_stack(*arguments)``; backward may run it again, see ``run_encoder``."""
        if not checkpoint_activations:
            return self.forward_in_stack(*arguments)
        # Masks are functions of the rng, so the state of torch's generator need not be restored.
        # The rng is an argument, so torch raises an error in backward if it has changed.
        return checkpoint(
            self.forward_in_stack, *arguments, use_reentrant=False, preserve_rng_state=False
        )

    def as_following(self) -> Following:
        """This layer, for the one before it."""
        return Following(self.self_attn_layer_norm, self.self_attn.self_product)

    def residual(
        self, norm: nn.LayerNorm | None, rng: Tensor, site: int, reader: Product = PLAIN
    ) -> Residual:
        p = self.dropout if self.training else 0.0
        return Residual(norm, self.normalize_before, p, rng, self.first_site(rng) + site, reader)

    def feed_forward(
        self, x: Tensor, stream: Tensor | None, norm: nn.LayerNorm | None, rng: Tensor, site: int,
        reader: Product = PLAIN,
    ) -> tuple[Any, Any]:  # fmt: skip
        p = self.activation_dropout if self.training else 0.0
        activation = Activation(self.activation, p, rng, self.first_site(rng) + site)
        residual = self.residual(norm, rng, site + 1, reader)
        return feed_forward(x, stream, self.fc1, self.fc2, activation, residual)


class EncoderLayer(TransformerLayer):
    """Self-attention and feed-forward with residuals; fairseq's parameter names and initial values.

    Args:
        embed_dim: C.
        ffn_dim: F.
        num_heads: H.
        dropout: rate for each sublayer's output. All three rates are for training mode only.
        attention_dropout: rate for the attention probabilities.
        activation_dropout: rate after the activation function.
        activation: relu, gelu (erf) or gelu_accurate (tanh).
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
            dropout=dropout, activation_dropout=activation_dropout, activation=activation,
            normalize_before=normalize_before, site=site,
        )  # fmt: skip
        self.self_attn = MultiheadAttention(embed_dim, num_heads, dropout=attention_dropout)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1 = nn.Linear(embed_dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def norms(self, next_norm: nn.LayerNorm | None) -> tuple[nn.LayerNorm | None, ...]:
        """The LayerNorm that is applied at the end of each of the two sublayers."""
        own = (self.self_attn_layer_norm, self.final_layer_norm)
        return (own[1], next_norm) if self.normalize_before else own

    def forward_in_stack(
        self, x: Tensor, stream: Tensor | None, segments: Segments, rng: Tensor,
        following: Following, causal: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        """One layer of a stack: (x, stream) -> (x, stream).

        Pre-norm: x is already normalised, ``stream`` is the residual stream, and the layer's last
        op applies ``following.norm``. Post-norm: ``stream`` is None.
        """
        norms = self.norms(following.norm)
        heads = self.self_attn.heads(segments, segments, causal, rng, self.first_site(rng))
        residual = self.residual(norms[0], rng, 1, product_for(self.fc1.weight))
        stream, x = self.self_attn.self_attention(x, stream, heads, residual)
        stream, x = self.feed_forward(x, stream, norms[1], rng, 2, following.reader)
        return x, stream

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


def first_product(layers: Iterable[TransformerLayer]) -> Product:
    """The product by which a stack reads its input; none if LayerNorm reads it."""
    first = next(iter(layers), None)
    return PLAIN if first is None or first.normalize_before else first.self_attn.self_product


def run_encoder(
    layers: Iterable[EncoderLayer], last_norm: nn.LayerNorm | None, x: Tensor,
    segments: Segments, rng: Tensor, causal: bool = False, checkpoint_activations: bool = False,
    states: list[Tensor] | None = None, reader: Product = PLAIN,
) -> Tensor:  # fmt: skip
    """Run a stack on x [T, C]; returns [T, C].

    In pre-norm stacks, each LayerNorm is fused into the op before it.

    causal: a token attends only to itself and to earlier tokens.
    checkpoint_activations: save only the input of each layer for backward, which runs the layers
        again, one at a time. This saves memory, takes time, and gives the same bits. Until backward
        is done, change neither the layers' parameters nor their mode.
    states: a list to which x and the residual stream after each layer are appended.
    reader: the product that reads the result; the only reader.
    """
    stack = list(layers)
    if states is not None:
        states.append(x)
    if not stack:
        return x if last_norm is None else layer_norm(x, last_norm, rng, reader)[1]
    stream = None
    if stack[0].normalize_before:
        stream, x = layer_norm(
            x, stack[0].self_attn_layer_norm, rng, stack[0].self_attn.self_product
        )
    followings = (*(layer.as_following() for layer in stack[1:]), Following(last_norm, reader))
    for layer, following in zip(stack, followings, strict=True):
        x, stream = layer.run(checkpoint_activations, x, stream, segments, rng, following, causal)
        if states is not None:
            states.append(x if stream is None else stream)
    return stream if x is None else x
