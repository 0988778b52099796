"""Embedding whose result is also cast to E4M3, for the product that reads it.

In post-LayerNorm stacks the first product reads the embedding itself. The result is cast after the
rounding to bfloat16: the residual reads it in any case, and backward makes the transpose from it
(`fp8_transpose`).

Shapes: T = packed tokens, C = model width, a multiple of 16.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from .checks import check_tensor
from .embedding import EmbeddingFwd, EmbeddingLayerNormFwd
from .fp8_quantise import check_statistics, empty_like, quantise
from .registry import Written, define

Embedded = tuple[Annotated[Tensor, "y"], Annotated[Tensor, "values"]]
Normed = tuple[
    Annotated[Tensor, "y"],
    Annotated[Tensor, "mean"],
    Annotated[Tensor, "rstd"],
    Annotated[Tensor, "values"],
]


class Fp8EmbeddingFwd(NamedTuple):
    """(y, values): values [T, C] are y in E4M3.

    weight: bfloat16. Other arguments up to site, and y: as in `embedding_fwd`.
    y_scale, amax, saturated: of y, as in `fp8_quantise`.
    Raises ValueError on a wrong shape, dtype, device or layout, and on a CPU on a wrong scale.
    """

    tokens: Tensor
    weight: Tensor
    positions: Tensor | None
    position_weight: Tensor | None
    scale: float
    p: float
    rng: Tensor
    site: int
    y_scale: Tensor
    amax: Written
    saturated: Written

    def check(self, op: str) -> None:
        check_tensor(op, "weight", self.weight, ("V", "C"), (torch.bfloat16,))
        EmbeddingFwd(*self[:8]).check(op)
        check_statistics(op, self.weight, *self[8:])

    def shape(self) -> Embedded:
        y = EmbeddingFwd(*self[:8]).shape()
        return y, empty_like(y)[0]

    def reference(self) -> Embedded:
        y = EmbeddingFwd(*self[:8]).reference()
        return y, quantise(y.float(), *self[8:])[0]


fp8_embedding_fwd = define("fp8_embedding_fwd", Fp8EmbeddingFwd)


class Fp8EmbeddingLayerNormFwd(NamedTuple):
    """(y, mean, rstd, values): values [T, C] are y in E4M3.

    weight: bfloat16. Other arguments up to eps, and the first three results: as in
    `embedding_layer_norm_fwd`. y_scale, amax, saturated: of y, as in `fp8_quantise`.
    Raises ValueError on a wrong shape, dtype, device or layout, and on a CPU on a wrong scale.
    """

    tokens: Tensor
    weight: Tensor
    positions: Tensor | None
    position_weight: Tensor | None
    gamma: Tensor
    beta: Tensor
    scale: float
    p: float
    rng: Tensor
    site: int
    eps: float
    y_scale: Tensor
    amax: Written
    saturated: Written

    def check(self, op: str) -> None:
        check_tensor(op, "weight", self.weight, ("V", "C"), (torch.bfloat16,))
        EmbeddingLayerNormFwd(*self[:11]).check(op)
        check_statistics(op, self.weight, *self[11:])

    def shape(self) -> Normed:
        y, mean, rstd = EmbeddingLayerNormFwd(*self[:11]).shape()
        return y, mean, rstd, empty_like(y)[0]

    def reference(self) -> Normed:
        y, mean, rstd = EmbeddingLayerNormFwd(*self[:11]).reference()
        return y, mean, rstd, quantise(y.float(), *self[11:])[0]


fp8_embedding_layer_norm_fwd = define("fp8_embedding_layer_norm_fwd", Fp8EmbeddingLayerNormFwd)
