"""Token and position embedding with dropout (fairseq: TransformerEncoderBase.forward_embedding).

y = dropout(norm(scale * weight[token] + position_weight[position]))

In post-LayerNorm stacks the first product reads the embedding itself, in fp8 a cast of it. The cast
follows the rounding to bfloat16: the residual reads y in any case, and backward makes the transpose
from it (`fp8_transpose`).

norm is LayerNorm (--layernorm-embedding) or nothing; each case has its own forward op. With
LayerNorm, backward is embedding_layer_norm_bwd, then embedding_bwd of its result with p == 0.

Shapes: T = packed tokens (rows), C = model width, V = vocabulary, P = rows of the position table.
Dropout: the row id is the token's row, the column is the channel. embedding_bwd needs dy and the
indices, not the tables.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import Cast, Dropout
from .casting import check_cast, dtypes_for, quantise, quantised_like
from .checks import (
    FLOATS,
    INTEGERS,
    check_dropout,
    check_range,
    check_rows,
    check_tensor,
    check_vectors,
)
from .numerics import layer_norm_backward, store_gradient, work_dtype
from .philox import drop, dropped
from .registry import Written, define


class EmbeddingFwd(NamedTuple):
    """(y [T, C] in weight's dtype, values [T, C]: y in E4M3).

    tokens: int32 or int64 [T], in [0, V). weight: [V, C].
    positions: int32 or int64 [T], in [0, P). position_weight: [P, C]. Both None: no positions.
    scale: factor of the token embedding (fairseq: sqrt(C), or 1 with --no-scale-embedding).
    cast: of y, whose dtype is then bfloat16.
    """

    tokens: Tensor
    weight: Tensor
    positions: Tensor | None
    position_weight: Tensor | None
    scale: float
    dropout: Dropout
    cast: Cast | None = None

    def check(self, op: str) -> None:
        tokens, weight, positions, position_weight = self[:4]
        check_tensor(op, "tokens", tokens, ("T",), INTEGERS, weight)
        check_rows(op, "weight", weight, ("V", "C"), dtypes_for(self.cast))
        check_dropout(op, self.dropout, weight)
        check_range(op, "tokens", tokens, len(weight), "V")
        if (positions is None) != (position_weight is None):
            raise ValueError(f"{op}: give both positions and position_weight, or neither")
        if positions is not None and position_weight is not None:
            check_tensor(op, "positions", positions, (len(tokens),), INTEGERS, weight)
            shape = ("P", weight.shape[1])
            check_rows(op, "position_weight", position_weight, shape, (weight.dtype,), weight)
            check_range(op, "positions", positions, len(position_weight), "P")
        check_cast(op, self.cast, weight)

    def shape(self) -> tuple[Tensor, Tensor]:
        y = self.weight.new_empty((self.tokens.shape[0], self.weight.shape[1]))
        return y, quantised_like(y, self.cast)[0]

    def look_up(self) -> Tensor:
        """y before the dropout, in the working precision."""
        x = self.weight.index_select(0, self.tokens).to(work_dtype(self.weight)).mul_(self.scale)
        if self.positions is not None and self.position_weight is not None:
            x.add_(self.position_weight.index_select(0, self.positions))
        return x

    def reference(self) -> tuple[Tensor, Tensor]:
        return self.finish(self.look_up())

    def finish(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the dropout to y in place, round, and cast."""
        rounded = drop(y, self.dropout).to(self.weight.dtype)
        return rounded, quantise(rounded, self.cast)[0]


embedding_fwd = define("embedding_fwd", EmbeddingFwd, "y values")


class EmbeddingLayerNormFwd(NamedTuple):
    """(y [T, C] in weight's dtype, mean [T], rstd [T], values [T, C]: y in E4M3), with LayerNorm
    before the dropout.

    gamma, beta: [C], in weight's dtype; beta may be None. Other arguments and values as in
    embedding_fwd.
    """

    tokens: Tensor
    weight: Tensor
    positions: Tensor | None
    position_weight: Tensor | None
    gamma: Tensor
    beta: Tensor | None
    scale: float
    dropout: Dropout
    eps: float
    cast: Cast | None = None

    @property
    def _without_norm(self) -> EmbeddingFwd:
        return EmbeddingFwd(*self[:4], self.scale, self.dropout, self.cast)

    def check(self, op: str) -> None:
        weight = self.weight
        self._without_norm.check(op)
        check_tensor(op, "gamma", self.gamma, weight.shape[1:], (weight.dtype,), weight)
        check_vectors(op, weight, (weight.dtype,), beta=self.beta)

    def shape(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y, values = self._without_norm.shape()
        mean, rstd = (y.new_empty(len(y), dtype=work_dtype(y)) for _ in range(2))
        return y, mean, rstd, values

    def reference(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = self._without_norm.look_up()
        normed, mean, rstd = torch.native_layer_norm(
            x,
            x.shape[1:],
            self.gamma.to(x.dtype),
            None if self.beta is None else self.beta.to(x.dtype),
            self.eps,
        )
        y, values = self._without_norm.finish(normed)
        return y, mean.view(-1), rstd.view(-1), values


embedding_layer_norm_fwd = define(
    "embedding_layer_norm_fwd", EmbeddingLayerNormFwd, "y mean rstd values"
)


class EmbeddingLayerNormBwd(NamedTuple):
    """dx [T, C], the gradient of LayerNorm's input; and those of gamma and beta.

    dy: [T, C], the gradient of forward's y. mean, rstd: forward's.
    x: [T, C], LayerNorm's input: embedding_fwd with p == 0.
    dgamma, dbeta: [C].
    """

    dy: Tensor
    x: Tensor
    gamma: Tensor
    mean: Tensor
    rstd: Tensor
    dropout: Dropout
    dgamma: Written | None
    dbeta: Written | None
    accumulate: bool

    def check(self, op: str) -> None:
        dy, x, gamma, mean, rstd = self[:5]
        check_rows(op, "dy", dy, ("T", "C"), FLOATS)
        check_rows(op, "x", x, dy.shape, (dy.dtype,), dy)
        check_tensor(op, "gamma", gamma, dy.shape[1:], (dy.dtype,), dy)
        for name, statistic in (("mean", mean), ("rstd", rstd)):
            check_tensor(op, name, statistic, dy.shape[:1], (work_dtype(dy),), dy)
        check_vectors(op, dy, FLOATS, dgamma=self.dgamma, dbeta=self.dbeta)
        check_dropout(op, self.dropout, dy)

    def shape(self) -> Tensor:
        return self.dy.new_empty(self.dy.shape)

    def reference(self) -> Tensor:
        dy, x, gamma, mean, rstd, dropout, dgamma, dbeta, accumulate = self
        grad = dropped(dy, dropout)
        dx = layer_norm_backward(grad, x, gamma, mean, rstd, dgamma, dbeta, accumulate)
        return dx.to(dy.dtype)


embedding_layer_norm_bwd = define("embedding_layer_norm_bwd", EmbeddingLayerNormBwd)


class EmbeddingBwd(NamedTuple):
    """The gradients of the tables.

    dy: [T, C]. dweight: [V, C]. dposition_weight: [P, C]. Other arguments as in forward.
    padding_idx: rows with this token add nothing to dweight; a negative value excludes none.
    """

    dy: Tensor
    tokens: Tensor
    positions: Tensor | None
    scale: float
    padding_idx: int
    dropout: Dropout
    dweight: Written | None
    dposition_weight: Written | None
    accumulate: bool

    def check(self, op: str) -> None:
        dy, tokens, positions = self[:3]
        check_rows(op, "dy", dy, ("T", "C"), FLOATS)
        check_tensor(op, "tokens", tokens, (len(dy),), INTEGERS, dy)
        check_dropout(op, self.dropout, dy)
        if positions is not None:
            check_tensor(op, "positions", positions, (len(dy),), INTEGERS, dy)
        elif self.dposition_weight is not None:
            raise ValueError(f"{op}: dposition_weight needs positions")
        for name, grad, index_name, indices, letter in (
            ("dweight", self.dweight, "tokens", tokens, "V"),
            ("dposition_weight", self.dposition_weight, "positions", positions, "P"),
        ):
            if grad is not None and indices is not None:
                check_rows(op, name, grad, (letter, dy.shape[1]), FLOATS, dy)
                check_range(op, index_name, indices, len(grad), letter)
        if self.dweight is not None and self.padding_idx >= len(self.dweight):
            rows = len(self.dweight)
            raise ValueError(f"{op}: padding_idx is {self.padding_idx}, dweight has {rows} rows")

    def reference(self) -> None:
        grad = dropped(self.dy, self.dropout)
        if self.dposition_weight is not None and self.positions is not None:
            _add_rows(self.dposition_weight, self.positions, grad, -1, self.accumulate)
        if self.dweight is not None:
            grad.mul_(self.scale)
            _add_rows(self.dweight, self.tokens, grad, self.padding_idx, self.accumulate)


embedding_bwd = define("embedding_bwd", EmbeddingBwd)


def _add_rows(
    table: Tensor, indices: Tensor, rows: Tensor, excluded: int, accumulate: bool
) -> None:
    """table[indices[t]] += rows[t] in a deterministic order, except for the row `excluded`.

    Without accumulate the table is overwritten. A negative `excluded` excludes no row.
    """
    direct = table.dtype == rows.dtype
    total = table if direct else torch.zeros_like(table, dtype=rows.dtype)
    if direct and not accumulate:
        total.zero_()
    kept = total[excluded].clone() if excluded >= 0 else None
    if table.is_cuda:  # index_put_ sorts the indices; index_add_ would use atomics
        total.index_put_((indices.long(),), rows, accumulate=True)
    else:  # index_add_ adds row after row; index_put_ would use atomics
        total.index_add_(0, indices, rows)
    if kept is not None:
        total[excluded].copy_(kept)
    if not direct:
        store_gradient(table, total, accumulate)
