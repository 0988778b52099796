"""One decoder step with cached keys and values, in plain torch.

Letters: N hypotheses, C model width, H heads, D head width, S source length, L target length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightseq_fairseq.layers.decoder import DecoderLayer, memory_weights
from lightseq_fairseq.parameters import as_one


def _split(x: Tensor, heads: int) -> Tensor:
    """[N, C] -> [N, H, 1, D]."""
    return x.view(x.shape[0], heads, 1, -1)


@dataclass
class Cache:
    """Keys and values of every layer.

    Attributes:
        memory: a layer's cross-attention (keys, values), each [N, H, S, D].
        mask: bool [N, 1, 1, S], true at real source tokens; None when there are no pads.
        past: a layer's self-attention (keys, values), each [N, H, L, D]; grows every step.
    """

    memory: list[tuple[Tensor, Tensor]]
    mask: Tensor | None
    past: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def begin(
        cls, layers: list[DecoderLayer], encoder_out: Tensor, padding_mask: Tensor | None
    ) -> Cache:
        """encoder_out [S, N, C_enc] and padding_mask [N, S] (true at pads), as fairseq has them."""
        weights, biases = memory_weights(layers)
        source, rows = encoder_out.shape[:2]
        kv = F.linear(encoder_out, as_one(weights), as_one(biases)).view(
            source, rows, len(layers), 2, layers[0].encoder_attn.num_heads, -1
        )
        k, v = kv.permute(3, 2, 1, 4, 0, 5).contiguous()
        mask = None if padding_mask is None else ~padding_mask[:, None, None, :]
        return cls(list(zip(k, v, strict=True)), mask)

    def reorder(self, order: Tensor) -> None:
        """Keep the hypotheses ``order`` (int64 [N'])."""
        self.past = [(k.index_select(0, order), v.index_select(0, order)) for k, v in self.past]
        if order.numel() != self.memory[0][0].shape[0]:
            # Reordering that keeps the count stays inside a sentence, whose hypotheses share
            # their source; fairseq relies on the same in ``MultiheadAttention``.
            self.memory = [
                (k.index_select(0, order), v.index_select(0, order)) for k, v in self.memory
            ]
            self.mask = None if self.mask is None else self.mask.index_select(0, order)


def _self_attention(layer: DecoderLayer, x: Tensor, cache: Cache, place: int) -> Tensor:
    block = layer.self_attn
    projections = (block.q_proj, block.k_proj, block.v_proj)
    weight = as_one([p.weight for p in projections])
    bias = as_one([p.bias for p in projections])
    q, k, v = (_split(part, block.num_heads) for part in F.linear(x, weight, bias).chunk(3, dim=1))
    if place < len(cache.past):
        k = torch.cat([cache.past[place][0], k], dim=2)
        v = torch.cat([cache.past[place][1], v], dim=2)
        cache.past[place] = (k, v)
    else:
        cache.past.append((k, v))
    out = F.scaled_dot_product_attention(q, k, v)
    return F.linear(out.reshape(x.shape), block.out_proj.weight, block.out_proj.bias)


def _cross_attention(
    layer: DecoderLayer, x: Tensor, cache: Cache, place: int, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    block = layer.encoder_attn
    q = _split(F.linear(x, block.q_proj.weight, block.q_proj.bias), block.num_heads)
    k, v = cache.memory[place]
    weights = None
    if need_weights:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
        if cache.mask is not None:
            scores = scores.masked_fill(~cache.mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
        out = weights.to(v.dtype) @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=cache.mask)
    return F.linear(out.reshape(x.shape), block.out_proj.weight, block.out_proj.bias), weights


def _norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_accurate": lambda x: F.gelu(x, approximate="tanh"),
}


@torch.no_grad()
def decode_step(
    layers: list[DecoderLayer], last_norm: nn.LayerNorm | None, x: Tensor, cache: Cache,
    attention_of: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Advance every hypothesis by one token, without dropout or gradients.

    Args:
        x: embedded tokens [N, C].
        cache: extended by one position.
        attention_of: index of the layer whose cross-attention weights are wanted.

    Returns: features [N, C] and weights [H, N, 1, S] (float32) or None.
    """
    wanted = None
    for place, layer in enumerate(layers):
        pre = layer.normalize_before
        residual = x
        h = _self_attention(layer, _norm(layer.self_attn_layer_norm, x) if pre else x, cache, place)
        x = residual = residual + h if pre else _norm(layer.self_attn_layer_norm, residual + h)
        h, weights = _cross_attention(
            layer, _norm(layer.encoder_attn_layer_norm, x) if pre else x, cache, place,
            place == attention_of,
        )  # fmt: skip
        x = residual = residual + h if pre else _norm(layer.encoder_attn_layer_norm, residual + h)
        h = _norm(layer.final_layer_norm, x) if pre else x
        h = _ACTIVATIONS[layer.activation](F.linear(h, layer.fc1.weight, layer.fc1.bias))
        h = F.linear(h, layer.fc2.weight, layer.fc2.bias)
        x = residual + h if pre else _norm(layer.final_layer_norm, residual + h)
        if weights is not None:
            wanted = weights.transpose(0, 1)
    return (x if last_norm is None else _norm(last_norm, x)), wanted
