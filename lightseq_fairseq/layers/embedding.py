"""Token and position embedding of packed tokens.

Shapes: T = packed tokens, V = vocabulary, C = model width, P = positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightseq_fairseq import ops
from lightseq_fairseq.layers.dropout import dropout
from lightseq_fairseq.layers.products import PLAIN, Product
from lightseq_fairseq.layers.residual_norm import layer_norm
from lightseq_fairseq.layers.second_derivatives import once_differentiable
from lightseq_fairseq.layers.sites import first_site
from lightseq_fairseq.memory.arrival import wait_for
from lightseq_fairseq.memory.gradients import gradients_for
from lightseq_fairseq.memory.packing import Segments


@dataclass(frozen=True)
class _LookUp:
    """Settings of `embed`'s look-up: the arguments that are neither tables nor their indices."""

    scale: float
    padding_idx: int
    p: float
    site: int
    eps: float = 0.0
    reader: Product = PLAIN


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, positions: Tensor | None,
                position_weight: Tensor | None, gamma: Tensor | None, beta: Tensor | None,
                rng: Tensor, settings: _LookUp) -> Tensor:  # fmt: skip
        tables = tokens, weight, positions, position_weight
        y, mean, rstd = settings.reader.embedded(
            *tables, gamma, beta, settings.scale, ops.Dropout(settings.p, rng, settings.site),
            settings.eps,
        )  # fmt: skip
        ctx.save_for_backward(*tables, gamma, beta, mean, rstd, rng)
        ctx.settings = settings
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        tokens, weight, positions, position_weight, gamma, beta, mean, rstd, rng = ctx.saved_tensors
        settings: _LookUp = ctx.settings
        dy, scale = dy.contiguous(), settings.scale
        dropout, none = (ops.Dropout(p, rng, settings.site) for p in (settings.p, 0.0))
        of_norm: tuple[Tensor | None, ...] = (None, None)
        if gamma is not None:
            # Look x up again: this costs a kernel, but saves storing x [T, C] since forward.
            x, _ = ops.embedding_fwd(tokens, weight, positions, position_weight, scale, none)
            to = gradients_for(gamma, beta)
            dy = ops.embedding_layer_norm_bwd(
                dy, x, gamma, mean, rstd, dropout,
                dgamma=to.tensors[0], dbeta=to.tensors[1], accumulate=to.accumulate,
            )  # fmt: skip
            of_norm, dropout = to.handed(), none
        learned = ctx.needs_input_grad[3]
        to = gradients_for(weight, *([position_weight] if learned else []))
        dweight, dposition = to.tensors if learned else (to.tensors[0], None)
        ops.embedding_bwd(
            dy, tokens, positions, scale, settings.padding_idx, dropout, dweight, dposition,
            accumulate=to.accumulate,
        )  # fmt: skip
        handed = to.handed()
        return None, handed[0], None, handed[1] if learned else None, *of_norm, None, None


def embed(
    tokens: Tensor, weight: Tensor, positions: Tensor | None, position_weight: Tensor | None, *,
    scale: float, padding_idx: int, p: float, rng: Tensor, site: int,
    project: nn.Linear | None = None, norm: nn.LayerNorm | None = None, reader: Product = PLAIN,
) -> Tensor:  # fmt: skip
    """dropout(norm(project(scale * weight[tokens]) + position_weight[positions])), differentiable.

    Args:
        tokens: int64 or int32 [T].
        weight: [V, C]; the row ``padding_idx`` receives no gradient from look-ups.
        positions: int64 [T], rows of ``position_weight`` [P, C]; None for no positions.
        scale: factor of the token embedding, sqrt(C) in fairseq.
        p: dropout rate.
        rng: of the dropout, see ``ops.philox``.
        site: of the dropout, see ``ops.philox``.
        project: maps the embedding width to the model width (fairseq's ``project_in_dim``).
        norm: LayerNorm before the dropout (``--layernorm-embedding``).
        reader: a product that reads the result.

    Returns: [T, C].
    Source: ``TransformerEncoderBase.forward_embedding`` of fairseq.
    """
    modules = [module for module in (project, norm) if module is not None]
    wait_for(weight, position_weight, *(p for module in modules for p in module.parameters()))
    if project is None:  # one kernel computes everything
        gamma, beta, eps = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
        look_up = _LookUp(scale, padding_idx, p, site, eps, reader)
        y: Tensor = _Embedding.apply(
            tokens, weight, positions, position_weight, gamma, beta, rng, look_up
        )
        return y
    look_up = _LookUp(scale, padding_idx, 0.0, site)
    x = _Embedding.apply(tokens, weight, None, None, None, None, rng, look_up)
    x = nn.functional.linear(x, project.weight)
    if positions is not None and position_weight is not None:
        x = x + position_weight.index_select(0, positions)
    if norm is not None:
        x = layer_norm(x, norm, rng)[1]
    return dropout(x, p, rng, site)


def sinusoidal_positions(count: int, width: int, padding_idx: int) -> Tensor:
    """Sinusoidal table, float32 [count, width], row ``padding_idx`` zero.

    The layout is that of tensor2tensor and fairseq: the sines of all frequencies, then the cosines.
    Vaswani et al. 2017 interleave them instead. Bitwise equal to
    ``fairseq.modules.SinusoidalPositionalEmbedding.get_embedding``.
    """
    half = width // 2
    step = math.log(10000) / (half - 1)
    frequencies = torch.exp(torch.arange(half, dtype=torch.float) * -step)
    angles = torch.arange(count, dtype=torch.float).unsqueeze(1) * frequencies.unsqueeze(0)
    table = torch.cat([torch.sin(angles), torch.cos(angles)], dim=1)
    table = nn.functional.pad(table, (0, width - 2 * half))
    table[padding_idx] = 0
    return table


class Embedding(nn.Module):
    """Scaled token embedding plus position embedding plus dropout, for use without fairseq.

    Args:
        vocabulary: V.
        width: C.
        padding_idx: id of the pad token.
        positions: maximum length of a sentence, in tokens.
        dropout: rate in training mode.
        learned: use learned instead of sinusoidal positions.

    Positions start at ``padding_idx + 1`` as in fairseq, so weights can be exchanged with fairseq.
    """

    def __init__(
        self, vocabulary: int, width: int, padding_idx: int, positions: int = 1024,
        dropout: float = 0.0, learned: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.padding_idx, self.dropout, self.scale = padding_idx, dropout, math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(vocabulary, width).normal_(std=width**-0.5))
        table = sinusoidal_positions(positions + padding_idx + 1, width, padding_idx)
        if learned:
            table.normal_(std=width**-0.5)
        with torch.no_grad():
            self.weight[padding_idx] = 0
            table[padding_idx] = 0
        self.position_weight = nn.Parameter(table, requires_grad=learned)

    def forward(
        self, tokens: Tensor, segments: Segments, rng: Tensor, site: int | None = None
    ) -> Tensor:
        """tokens int64 [T] -> [T, C]; ``rng`` int64 [2] from ``layers.draw_rng``.

        site: the dropout site. None assigns one to this module, see ``sites.first_site``. If one
        module embeds source and target, pass sites 0 and 1 to the two calls.
        """
        return embed(
            tokens, self.weight, segments.positions + self.padding_idx + 1, self.position_weight,
            scale=self.scale, padding_idx=self.padding_idx,
            p=self.dropout if self.training else 0.0, rng=rng, site=first_site(self, site, rng),
        )  # fmt: skip
