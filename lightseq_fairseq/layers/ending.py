"""The end of a sublayer in the product that reads it, with few rows, and the LayerNorm of this end.

Shapes: T = packed tokens, C = model width, N = columns of the product.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from lightseq_fairseq import ops


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


@dataclass
class Ending:
    """The end of a sublayer, which the product that reads its result computes, too.

    Attributes:
        h, bias, residual, norm: as in `ResidualNorm`.
        is_pre_norm: see there.
        kept: the residual of the next sublayer; exists after `multiply`.
    """

    h: Tensor
    bias: Tensor | None
    residual: Tensor | None
    norm: Affine
    is_pre_norm: bool
    kept: Tensor = field(init=False)

    def multiply(self, weight: Tensor, bias: Tensor | None, activation: str = "identity") -> Tensor:
        """activation(x weight^T + bias) [T, N] of the end's result x [T, C]."""
        kept, y = ops.norm_linear_fwd(
            self.h, self.bias, self.residual, *self.norm, weight, bias, activation,
            keep_result=not self.is_pre_norm,
        )  # fmt: skip
        self.kept = kept if kept.numel() else self.h
        return y
