"""Token and position embedding with dropout (fairseq: TransformerEncoderBase.forward_embedding).

y = dropout(scale * weight[token] + position_weight[position])

T packed tokens (rows), C model width, V vocabulary, P rows of the position table.
Dropout's row is the token's row, its column the channel. Nothing but the indices is saved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import FLOATS, INTEGERS, check_dropout, check_range, check_rows, check_tensor
from .numerics import store_gradient, work_dtype
from .philox import dropout_factors
from .registry import register


def embedding_fwd(
    tokens: Tensor,
    weight: Tensor,
    positions: Tensor | None,
    position_weight: Tensor | None,
    scale: float,
    p: float,
    rng: Tensor,
    site: int,
) -> Tensor:
    """y [T, C] in weight's dtype.

    tokens: int32 or int64 [T], in [0, V). weight: [V, C].
    positions: int32 or int64 [T], in [0, P), with position_weight [P, C]; both None: no positions.
    scale: factor of the token embedding (fairseq: sqrt(C), or 1 with --no-scale-embedding).
    p, rng, site: dropout, see `philox.keep_mask`.
    Raises ValueError on a wrong shape, dtype, device or layout; on an index out of range on a CPU,
    and on a GPU with LIGHTSEQ_CHECK_INDICES=1.
    """
    op = "embedding_fwd"
    check_tensor(op, "tokens", tokens, ("T",), INTEGERS, weight)
    check_tensor(op, "weight", weight, ("V", "C"), FLOATS)
    check_rows(op, "weight", weight)
    check_dropout(op, p, rng, weight)
    check_range(op, "tokens", tokens, len(weight), "V")
    if (positions is None) != (position_weight is None):
        raise ValueError(f"{op}: give both positions and position_weight, or neither")
    if positions is not None and position_weight is not None:
        check_tensor(op, "positions", positions, (len(tokens),), INTEGERS, weight)
        shape = ("P", weight.shape[1])
        check_tensor(op, "position_weight", position_weight, shape, (weight.dtype,), weight)
        check_rows(op, "position_weight", position_weight)
        check_range(op, "positions", positions, len(position_weight), "P")
    y: Tensor = _FWD(tokens, weight, positions, position_weight, scale, p, rng, site)
    return y


def embedding_bwd(
    dy: Tensor,
    tokens: Tensor,
    positions: Tensor | None,
    scale: float,
    padding_idx: int,
    p: float,
    rng: Tensor,
    site: int,
    dweight: Tensor | None,
    dposition_weight: Tensor | None,
    accumulate: bool,
) -> None:
    """Gradients of the two tables, written into (or, with accumulate, added to) the caller's.

    dy: [T, C]. dweight: [V, C] or None. dposition_weight: [P, C] or None. The rest as in forward.
    padding_idx: rows whose token is this one give nothing to dweight; negative excludes none.
    Raises ValueError on a wrong shape, dtype, device or layout.
    """
    op = "embedding_bwd"
    check_tensor(op, "dy", dy, ("T", "C"), FLOATS)
    check_rows(op, "dy", dy)
    check_tensor(op, "tokens", tokens, (len(dy),), INTEGERS, dy)
    check_dropout(op, p, rng, dy)
    if positions is not None:
        check_tensor(op, "positions", positions, (len(dy),), INTEGERS, dy)
    elif dposition_weight is not None:
        raise ValueError(f"{op}: dposition_weight needs positions")
    for name, grad, index_name, indices, letter in (
        ("dweight", dweight, "tokens", tokens, "V"),
        ("dposition_weight", dposition_weight, "positions", positions, "P"),
    ):
        if grad is not None and indices is not None:
            check_tensor(op, name, grad, (letter, dy.shape[1]), FLOATS, dy)
            check_rows(op, name, grad)
            check_range(op, index_name, indices, len(grad), letter)
    if dweight is not None and padding_idx >= len(dweight):
        raise ValueError(f"{op}: padding_idx is {padding_idx}, dweight has {len(dweight)} rows")
    _BWD(
        dy,
        tokens,
        positions,
        scale,
        padding_idx,
        p,
        rng,
        site,
        dweight,
        dposition_weight,
        accumulate,
    )


def embedding_fwd_reference(
    tokens: Tensor,
    weight: Tensor,
    positions: Tensor | None,
    position_weight: Tensor | None,
    scale: float,
    p: float,
    rng: Tensor,
    site: int,
) -> Tensor:
    """Reference of lightseq::embedding_fwd."""
    dtype = work_dtype(weight)
    y = weight.index_select(0, tokens).to(dtype).mul_(scale)
    if positions is not None and position_weight is not None:
        y.add_(position_weight.index_select(0, positions))
    if p > 0:
        for part, factor in dropout_factors(rng, site, y.shape, p, dtype):
            y[part].mul_(factor)
    return y.to(weight.dtype)


def embedding_bwd_reference(
    dy: Tensor,
    tokens: Tensor,
    positions: Tensor | None,
    scale: float,
    padding_idx: int,
    p: float,
    rng: Tensor,
    site: int,
    dweight: Tensor | None,
    dposition_weight: Tensor | None,
    accumulate: bool,
) -> None:
    """Reference of lightseq::embedding_bwd."""
    dtype = work_dtype(dy)
    grad = torch.empty_like(dy, dtype=dtype)
    if p > 0:
        for part, factor in dropout_factors(rng, site, dy.shape, p, dtype):
            torch.mul(dy[part], factor, out=grad[part])
    else:
        grad.copy_(dy)
    if dposition_weight is not None and positions is not None:
        _add_rows(dposition_weight, positions, grad, -1, accumulate)
    if dweight is not None:
        _add_rows(dweight, tokens, grad.mul_(scale), padding_idx, accumulate)


def _add_rows(
    table: Tensor, indices: Tensor, rows: Tensor, excluded: int, accumulate: bool
) -> None:
    """table[indices[t]] += rows[t] in a deterministic order, but for the row `excluded`."""
    direct = table.dtype == rows.dtype
    total = table if direct else torch.zeros_like(table, dtype=rows.dtype)
    if direct and not accumulate:
        total.zero_()
    kept = total[excluded].clone() if excluded >= 0 else None
    if table.is_cuda:  # sorts the indices, where index_add_ would use atomics
        total.index_put_((indices.long(),), rows, accumulate=True)
    else:  # adds row after row, where index_put_ would use atomics
        total.index_add_(0, indices, rows)
    if kept is not None:
        total[excluded].copy_(kept)
    if not direct:
        store_gradient(table, total, accumulate)


def _embedding_fwd_fake(
    tokens: Tensor,
    weight: Tensor,
    positions: Tensor | None,
    position_weight: Tensor | None,
    scale: float,
    p: float,
    rng: Tensor,
    site: int,
) -> Tensor:
    return weight.new_empty((tokens.shape[0], weight.shape[1]))


def _embedding_bwd_fake(*arguments: object) -> None:
    return None


_FWD = register(
    "embedding_fwd(Tensor tokens, Tensor weight, Tensor? positions, Tensor? position_weight,"
    " float scale, float p, Tensor rng, int site) -> Tensor",
    embedding_fwd_reference,
    _embedding_fwd_fake,
)
_BWD = register(
    "embedding_bwd(Tensor dy, Tensor tokens, Tensor? positions, float scale, int padding_idx,"
    " float p, Tensor rng, int site, Tensor(a!)? dweight, Tensor(b!)? dposition_weight,"
    " bool accumulate) -> ()",
    embedding_bwd_reference,
    _embedding_bwd_fake,
)
