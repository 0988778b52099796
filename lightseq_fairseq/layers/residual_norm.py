"""The end of every sublayer as one op: add bias, dropout, add the residual, LayerNorm.

Shapes: T = packed tokens, C = model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightseq_fairseq import ops
from lightseq_fairseq.layers.node import Input, Pair, apply
from lightseq_fairseq.memory import passes
from lightseq_fairseq.memory.gradients import Gradients
from lightseq_fairseq.ops import Cast, Dropout, Quantised


class Affine(NamedTuple):
    """What an ``nn.LayerNorm`` has when forward runs."""

    gamma: Tensor
    beta: Tensor
    eps: float

    @classmethod
    def of(cls, norm: nn.LayerNorm) -> Affine:
        return cls(norm.weight, norm.bias, norm.eps)


@dataclass(frozen=True)
class ResidualNorm:
    """The end of one sublayer.

    Attributes:
        bias: of the sublayer's last product.
        norm: the LayerNorm applied to the sum: the sublayer's own (post-norm) or the next
            sublayer's (pre-norm); None if no LayerNorm follows.
        is_pre_norm: the sum is the residual of the next sublayer; otherwise the result is.
        dropout: of the product's result.
        cast: of the product that reads the result, if it is in fp8.
        keeps_y: others read the result as well.
    """

    bias: Tensor
    norm: Affine | None
    is_pre_norm: bool
    dropout: Dropout
    cast: Cast | None = None
    keeps_y: bool = True

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.bias, *(() if self.norm is None else self.norm[:2]))

    def forward(self, h: Tensor, residual: Tensor) -> tuple[Input, Tensor, Any]:
        """The result, the residual of the next sublayer, and what backward needs.

        h: [T, C], the result of the sublayer's last product, without bias.
        """
        norm, dropout = self.norm, self.dropout
        if norm is None:
            total, _, mean, rstd, *_ = ops.dropout_residual_layer_norm_fwd(
                h, self.bias, residual, None, None, dropout, eps=0.0
            )
            return Input(total), total, (total, mean, rstd)
        total, y, mean, rstd, values, transpose = ops.dropout_residual_layer_norm_fwd(
            h, self.bias, residual, norm.gamma, norm.beta, dropout, norm.eps, self.keeps_y,
            self.cast,
        )  # fmt: skip
        residual = total if self.is_pre_norm else y
        return Input(y, values, transpose, self.cast), residual, (total, mean, rstd)

    def backward(
        self, dy: Tensor | None, dresidual: Tensor | None, kept: Any, to: Gradients,
        cast: Cast | None,
    ) -> tuple[Tensor | Quantised, Tensor]:  # fmt: skip
        """Gradients of h and of the residual.

        dy, dresidual: of the results; only dresidual without ``norm``, only dy if the result is the
        residual. cast: of dh.
        """
        total, mean, rstd = kept
        gamma = None if self.norm is None else self.norm.gamma
        with to.of(*([p] for p in self.parameters)) as (tensors, accumulate):
            dbias, dgamma, dbeta = (*tensors, None, None)[:3]
            dh, dresidual, transpose = ops.dropout_residual_layer_norm_bwd(
                dy, dresidual, total, gamma, mean, rstd, self.dropout,
                dgamma=dgamma, dbeta=dbeta, dbias=dbias, accumulate=accumulate, cast=cast,
            )  # fmt: skip
        if cast is not None:
            return Quantised(dh, transpose, cast.scale), dresidual
        return (dh if self.dropout.p > 0 else dresidual), dresidual


@dataclass(frozen=True)
class Norm(Pair):
    """A LayerNorm without a residual before it, such as at the start of a pre-norm stack.

    Attributes:
        rng: its value is not used, since there is no dropout.
        cast, keeps_y: as in `ResidualNorm`.
    """

    norm: Affine
    rng: Tensor
    cast: Cast | None = None
    keeps_y: bool = True

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self.norm[:2]

    @property
    def _dropout(self) -> Dropout:
        return Dropout(0.0, self.rng, 0)

    def normalise(self, x: Tensor) -> tuple[Input, Any]:
        """The LayerNorm of x [T, C], and what backward needs."""
        passes.current().wait_for(self.parameters)
        gamma, beta, eps = self.norm
        _, y, mean, rstd, values, transpose = ops.dropout_residual_layer_norm_fwd(
            x, None, None, gamma, beta, self._dropout, eps, self.keeps_y, self.cast
        )
        return Input(y, values, transpose, self.cast), (x, mean, rstd)

    def gradient(self, dy: Tensor, dx: Tensor | None, kept: Any, to: Gradients) -> Tensor:
        """The gradient of x; dx: another gradient of x, which is added."""
        x, mean, rstd = kept
        with to.of(*([p] for p in self.parameters)) as ((dgamma, dbeta), accumulate):
            _, dx, _ = ops.dropout_residual_layer_norm_bwd(
                dy, dx, x, self.norm.gamma, mean, rstd, self._dropout,
                dgamma=dgamma, dbeta=dbeta, dbias=None, accumulate=accumulate,
            )  # fmt: skip
        return dx

    def forward(self, x: Input) -> tuple[list[Input], list[Any]]:
        y, kept = self.normalise(x.x)
        return [y], [kept]

    def backward(
        self, kept: list[Any], to: Gradients, needed: Sequence[bool], dy: Tensor
    ) -> list[Tensor | None]:
        return [self.gradient(dy.contiguous(), None, kept.pop(), to)]


def layer_norm(x: Tensor, norm: nn.LayerNorm, rng: Tensor) -> Tensor:
    """The LayerNorm of x [T, C], differentiable. rng: its value is not used."""
    return apply(Norm(Affine.of(norm), rng), Input(x))[0].x
