"""Token and position embedding with dropout (fairseq: TransformerEncoderBase.forward_embedding).

y = dropout(scale * weight[token] + position_weight[position])

Shapes: T = packed tokens (rows), C = model width, V = vocabulary, P = rows of the position table.
Dropout: the row id is the token's row, the column is the channel. Backward needs only the indices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import FLOATS, INTEGERS, check_dropout, check_range, check_rows, check_tensor
from .numerics import store_gradient, work_dtype
from .philox import dropout_factors
from .registry import Written, define


class EmbeddingFwd(NamedTuple):
    """y [T, C] in weight's dtype.

    tokens: int32 or int64 [T], in [0, V). weight: [V, C].
    positions: int32 or int64 [T], in [0, P). position_weight: [P, C]. Both None: no positions.
    scale: factor of the token embedding (fairseq: sqrt(C), or 1 with --no-scale-embedding).
    p, rng, site: dropout, see `philox.keep_mask`.
    Raises ValueError on a wrong shape, dtype, device or layout; on an index out of range (on a GPU
    only with LIGHTSEQ_CHECK_INDICES=1).
    """

    tokens: Tensor
    weight: Tensor
    positions: Tensor | None
    position_weight: Tensor | None
    scale: float
    p: float
    rng: Tensor
    site: int

    def check(self, op: str) -> None:
        tokens, weight, positions, position_weight = self[:4]
        check_tensor(op, "tokens", tokens, ("T",), INTEGERS, weight)
        check_tensor(op, "weight", weight, ("V", "C"), FLOATS)
        check_rows(op, "weight", weight)
        check_dropout(op, self.p, self.rng, weight)
        check_range(op, "tokens", tokens, len(weight), "V")
        if (positions is None) != (position_weight is None):
            raise ValueError(f"{op}: give both positions and position_weight, or neither")
        if positions is not None and position_weight is not None:
            check_tensor(op, "positions", positions, (len(tokens),), INTEGERS, weight)
            shape = ("P", weight.shape[1])
            check_tensor(op, "position_weight", position_weight, shape, (weight.dtype,), weight)
            check_rows(op, "position_weight", position_weight)
            check_range(op, "positions", positions, len(position_weight), "P")

    def shape(self) -> Tensor:
        return self.weight.new_empty((self.tokens.shape[0], self.weight.shape[1]))

    def reference(self) -> Tensor:
        dtype = work_dtype(self.weight)
        y = self.weight.index_select(0, self.tokens).to(dtype).mul_(self.scale)
        if self.positions is not None and self.position_weight is not None:
            y.add_(self.position_weight.index_select(0, self.positions))
        if self.p > 0:
            for part, factor in dropout_factors(self.rng, self.site, y.shape, self.p, dtype):
                y[part].mul_(factor)
        return y.to(self.weight.dtype)


embedding_fwd = define("embedding_fwd", EmbeddingFwd)


class EmbeddingBwd(NamedTuple):
    """Write the gradients of the two tables to the caller's tensors or, with accumulate, add them.

    dy: [T, C]. dweight: [V, C] or None. dposition_weight: [P, C] or None. Other arguments as in
    forward.
    padding_idx: rows with this token are left out of dweight; a negative value excludes none.
    Raises ValueError on a wrong shape, dtype, device or layout.
    """

    dy: Tensor
    tokens: Tensor
    positions: Tensor | None
    scale: float
    padding_idx: int
    p: float
    rng: Tensor
    site: int
    dweight: Written | None
    dposition_weight: Written | None
    accumulate: bool

    def check(self, op: str) -> None:
        dy, tokens, positions = self[:3]
        check_tensor(op, "dy", dy, ("T", "C"), FLOATS)
        check_rows(op, "dy", dy)
        check_tensor(op, "tokens", tokens, (len(dy),), INTEGERS, dy)
        check_dropout(op, self.p, self.rng, dy)
        if positions is not None:
            check_tensor(op, "positions", positions, (len(dy),), INTEGERS, dy)
        elif self.dposition_weight is not None:
            raise ValueError(f"{op}: dposition_weight needs positions")
        for name, grad, index_name, indices, letter in (
            ("dweight", self.dweight, "tokens", tokens, "V"),
            ("dposition_weight", self.dposition_weight, "positions", positions, "P"),
        ):
            if grad is not None and indices is not None:
                check_tensor(op, name, grad, (letter, dy.shape[1]), FLOATS, dy)
                check_rows(op, name, grad)
                check_range(op, index_name, indices, len(grad), letter)
        if self.dweight is not None and self.padding_idx >= len(self.dweight):
            rows = len(self.dweight)
            raise ValueError(f"{op}: padding_idx is {self.padding_idx}, dweight has {rows} rows")

    def reference(self) -> None:
        dy, dtype = self.dy, work_dtype(self.dy)
        grad = torch.empty_like(dy, dtype=dtype)
        if self.p > 0:
            for part, factor in dropout_factors(self.rng, self.site, dy.shape, self.p, dtype):
                torch.mul(dy[part], factor, out=grad[part])
        else:
            grad.copy_(dy)
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
