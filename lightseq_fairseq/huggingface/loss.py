"""Cross entropy over a large vocabulary, in half the memory of torch's or less.

Shapes: V = classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.layers.cross_entropy import label_smoothed_cross_entropy

_REDUCTIONS = ("mean", "sum", "none")
_NOTHING = -1  # a label that no row has


def cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """``torch.nn.functional.cross_entropy``, whose backward pass overwrites ``logits`` with their
    gradient.

    So the largest tensor of a step exists once, and 16-bit logits need no copy in float32. Do not
    read the logits after the backward pass.

    Args:
        logits: [..., V], a floating dtype.
        labels: int64 [...], of the same shape without the last dimension. A label outside [0, V)
            makes the loss NaN.
        ignore_index: rows with this label do not count.
        reduction: "mean" over the rows that count, "sum", or "none".
        label_smoothing: in [0, 1), distributed over all V classes, as in torch.

    Returns:
        float32 (float64 for float64 logits): [], or [...] for "none".

    Raises:
        UserError: shapes do not fit, or another reduction.

    Source: ``torch.nn.functional.cross_entropy``.
    """
    if reduction not in _REDUCTIONS:
        raise UserError(f"The reduction is {reduction!r}: use one of {', '.join(_REDUCTIONS)}.")
    if logits.dim() < 1 or logits.shape[:-1] != labels.shape:
        raise UserError(
            f"The labels have the shape {list(labels.shape)}, but the logits {list(logits.shape)}: "
            "the labels need the same shape without the last dimension."
        )
    classes = logits.shape[-1]
    rows, target = logits.reshape(-1, classes), labels.reshape(-1)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    counts, known = target != ignore_index, (target >= 0) & (target < classes)
    loss, _, _ = label_smoothed_cross_entropy(
        rows, target.masked_fill(~known, 0), label_smoothing * (classes - 1) / classes, _NOTHING
    )
    loss = loss.masked_fill(~counts, 0.0).masked_fill(counts & ~known, torch.nan)
    if reduction == "none":
        return loss.view(labels.shape)
    return loss.sum() if reduction == "sum" else loss.sum() / counts.sum()
