"""Token and position embedding of packed tokens.

Shapes: T = packed tokens, V = vocabulary, C = model width, P = positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightseq_fairseq import ops
from lightseq_fairseq.layers.dropout import dropout
from lightseq_fairseq.layers.node import Input, Pair, apply
from lightseq_fairseq.layers.residual_norm import Affine, Norm
from lightseq_fairseq.layers.sites import first_site
from lightseq_fairseq.layers.stack import layer_norm
from lightseq_fairseq.memory import passes
from lightseq_fairseq.memory.gradients import Gradients
from lightseq_fairseq.memory.packing import Segments
from lightseq_fairseq.ops import Cast, Dropout


@dataclass
class _LookUp(Pair):
    """The arguments of `embed` without ``project``; see `node.Pair`."""

    tokens: Tensor
    weight: Tensor
    positions: Tensor | None
    position_weight: Tensor | None
    scale: float
    padding_idx: int
    dropout: Dropout
    norm: Affine | None = None
    cast: Cast | None = None

    def __post_init__(self) -> None:
        self.tables = self.tokens, self.weight, self.positions, self.position_weight
        weights = [x for x in (self.weight, self.position_weight) if x is not None]
        self.parameters = [*weights, *(() if self.norm is None else self.norm.parameters)]
        ids = self.tokens, self.positions, self.dropout.rng
        self.others = [x for x in ids if x is not None]

    def forward(self) -> tuple[list[Input], list[Any]]:
        passes.current().wait_for(self.parameters)
        if self.norm is None:
            y, values = ops.embedding_fwd(*self.tables, self.scale, self.dropout, self.cast)
            return [Input(y, values, None, self.cast)], []
        y, mean, rstd, values = ops.embedding_layer_norm_fwd(
            *self.tables, *self.norm[:2], self.scale, self.dropout, self.norm.eps, self.cast
        )  # fmt: skip
        return [Input(y, values, None, self.cast)], [mean, rstd]

    def backward(
        self, kept: list[Any], to: Gradients, needed: Sequence[bool], dy: Tensor
    ) -> list[Tensor | None]:
        dy, mask = dy.contiguous(), self.dropout
        if self.norm is not None:
            rstd, mean = kept.pop(), kept.pop()
            # Look x up again: this costs a kernel, but saves storing x [T, C] since forward.
            none = mask._replace(p=0.0)
            x, _ = ops.embedding_fwd(*self.tables, self.scale, none)
            gamma, beta, _ = self.norm
            with to.of([gamma], [] if beta is None else [beta]) as ((dgamma, dbeta), accumulate):
                dy = ops.embedding_layer_norm_bwd(
                    dy, x, gamma, mean, rstd, mask, dgamma, dbeta, accumulate
                )
            mask = none
        positions = () if self.position_weight is None else (self.position_weight,)
        with to.of([self.weight], positions) as ((dweight, dposition), accumulate):
            ops.embedding_bwd(
                dy, self.tokens, self.positions, self.scale, self.padding_idx, mask,
                dweight, dposition, accumulate,
            )  # fmt: skip
        return []


def embed(
    tokens: Tensor, weight: Tensor, positions: Tensor | None, position_weight: Tensor | None, *,
    scale: float, padding_idx: int, p: float, rng: Tensor, site: int,
    project: nn.Linear | None = None, norm: Norm | None = None,
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

    Returns: [T, C].
    Source: ``TransformerEncoderBase.forward_embedding`` of fairseq.
    """
    return embed_and_cast(
        tokens, weight, positions, position_weight, scale=scale, padding_idx=padding_idx,
        p=p, rng=rng, site=site, project=project, norm=norm,
    ).x  # fmt: skip


def embed_and_cast(
    tokens: Tensor, weight: Tensor, positions: Tensor | None, position_weight: Tensor | None, *,
    scale: float, padding_idx: int, p: float, rng: Tensor, site: int,
    project: nn.Linear | None = None, norm: Norm | None = None, cast: Cast | None = None,
) -> Input:  # fmt: skip
    """As `embed`. cast: of the product that reads the result; not used with ``project``."""
    if project is None:  # one kernel computes everything
        mask = Dropout(p, rng, site)
        affine = None if norm is None else Affine.of(norm)
        look_up = _LookUp(
            tokens, weight, positions, position_weight, scale, padding_idx, mask, affine, cast
        )
        return apply(look_up)[0]
    none = Dropout(0.0, rng, site)
    x = apply(_LookUp(tokens, weight, None, None, scale, padding_idx, none))[0].x
    read = (project.weight, position_weight)
    passes.current().wait_for(table for table in read if table is not None)
    x = nn.functional.linear(x, project.weight)
    if positions is not None and position_weight is not None:
        x = x + position_weight.index_select(0, positions)
    if norm is not None:
        x = layer_norm(x, norm, rng)
    return Input(dropout(x, p, rng, site))


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
