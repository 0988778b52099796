"""The end of every sublayer as one op: add bias, dropout, add the residual, LayerNorm.

Shapes: T = packed tokens, C = model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.layers.node import Input
from lightseq_fairseq.memory.gradients import Gradients
from lightseq_fairseq.ops import Cast, Dropout, Quantised
from lightseq_fairseq.ops.arguments import Operand


class Norm(Protocol):
    """An ``nn.LayerNorm``, or what has its tensors."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def eps(self) -> float: ...


class Affine(NamedTuple):
    """What a LayerNorm has when forward runs."""

    gamma: Tensor
    beta: Tensor | None
    eps: float

    @classmethod
    def of(cls, norm: Norm) -> Affine:
        return cls(norm.weight, norm.bias, norm.eps)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.gamma,) if self.beta is None else (self.gamma, self.beta)


@dataclass(frozen=True, kw_only=True)
class ResidualNorm:
    """The end of one sublayer; or, without ``bias`` and residual, a LayerNorm by itself.

    Attributes:
        norm: the LayerNorm applied to the sum: the sublayer's own (post-norm) or the next
            sublayer's (pre-norm); None if no LayerNorm follows.
        dropout: of the product's result.
        bias: of the sublayer's last product.
        is_pre_norm: the sum is the residual of the next sublayer; otherwise the result is.
        cast: of the product that reads the result, if it is in fp8.
        keeps_y: others read the result as well.
    """

    norm: Affine | None
    dropout: Dropout
    bias: Tensor | None = None
    is_pre_norm: bool = True
    cast: Cast | None = None
    keeps_y: bool = True

    @property
    def _vectors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        gamma, beta, _ = self.norm or (None, None, None)
        return self.bias, gamma, beta

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(vector for vector in self._vectors if vector is not None)

    def forward(self, h: Tensor, residual: Tensor | None) -> tuple[Input, Tensor, Any]:
        """The result, the residual of the next sublayer, and what backward needs.

        h: [T, C], the result of the sublayer's last product, without bias.
        """
        bias, gamma, beta = self._vectors
        eps = 0.0 if self.norm is None else self.norm.eps
        total, y, mean, rstd, values, transpose = ops.dropout_residual_layer_norm_fwd(
            h, bias, residual, gamma, beta, self.dropout, eps, self.keeps_y, self.cast
        )
        total = h if residual is None else total  # then the op does not copy h
        y = total if self.norm is None else y
        kept = total, mean, rstd
        return Input(y, values, transpose, self.cast), total if self.is_pre_norm else y, kept

    def backward(
        self, dy: Tensor | None, dresidual: Tensor | None, kept: Any, to: Gradients,
        cast: Cast | None = None,
    ) -> tuple[Operand, Tensor]:  # fmt: skip
        """Gradients of h and of the residual.

        dy, dresidual: of the results; only dresidual without ``norm``, only dy if the result is the
        residual. cast: of dh.
        """
        total, mean, rstd = kept
        _, gamma, _ = self._vectors
        groups = ([] if vector is None else [vector] for vector in self._vectors)
        with to.of(*groups) as ((dbias, dgamma, dbeta), accumulate):
            dh, dresidual, transpose = ops.dropout_residual_layer_norm_bwd(
                dy, dresidual, total, gamma, mean, rstd, self.dropout,
                dgamma=dgamma, dbeta=dbeta, dbias=dbias, accumulate=accumulate, cast=cast,
            )  # fmt: skip
        if cast is not None:
            return Quantised(dh, transpose, cast.scale), dresidual
        return (dh if self.dropout.p > 0 else dresidual), dresidual
