"""Label-smoothed cross entropy over the vocabulary.

Shapes: T = rows, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.layers.second_derivatives import once_differentiable


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, smoothing: float, padding_idx: int,
        accuracy: bool, dloss: Tensor | None,
    ) -> Any:  # fmt: skip
        ctx.is_overwritten = False
        if dloss is not None:
            loss, nll, correct = ops.cross_entropy_fwd_bwd(
                dloss.expand(len(logits)), logits, target, smoothing, padding_idx, accuracy
            )
            ctx.save_for_backward(logits)
        else:
            loss, nll, lse, correct = ops.cross_entropy_fwd(
                logits, target, smoothing, padding_idx, accuracy
            )
            ctx.save_for_backward(logits, target, lse)
        ctx.smoothing, ctx.padding_idx = smoothing, padding_idx
        ctx.mark_non_differentiable(nll, correct)
        ctx.set_materialize_grads(False)
        return loss, nll, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> Any:
        if ctx.is_overwritten:
            raise RuntimeError(
                "label_smoothed_cross_entropy: an earlier backward pass has overwritten the logits "
                "with their gradient; compute the loss again for another one, or add up what you "
                "want the gradient of and call backward once"
            )
        logits, *others = ctx.saved_tensors
        if others:  # else forward has made the gradient
            # The gradient overwrites the logits: the largest tensor of the step exists only once.
            target, lse = others
            ops.cross_entropy_bwd(dloss, logits, target, lse, ctx.smoothing, ctx.padding_idx)
            ctx.is_overwritten = True
        return logits, None, None, None, None, None


def label_smoothed_cross_entropy(
    logits: Tensor,
    target: Tensor,
    smoothing: float,
    padding_idx: int,
    accuracy: bool = False,
    dloss: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of each row; the backward pass overwrites ``logits`` with their gradient.

    So a second backward pass through the same loss raises a RuntimeError, unless ``dloss`` is
    given.

    Args:
        logits: [T, V], float64/32/16 or bfloat16, contiguous.
        target: int64 [T]; rows whose target is ``padding_idx`` are ignored.
        smoothing: epsilon; it is distributed over the V - 1 other classes, as in fairseq.
        accuracy: also return which rows have their target as arg max.
        dloss: 0-dim float tensor, the gradient that every row's loss will receive in the backward
            pass, if it is known in advance. Then forward already overwrites the logits with their
            gradient, which saves one read of the logits.

    Returns:
        loss [T] (differentiable) and nll [T], in nats, float32 (float64 for float64 logits), and
        correct: bool [T], empty unless ``accuracy``.

    Source: ``fairseq.criterions.label_smoothed_cross_entropy.label_smoothed_nll_loss``.
    """
    return _CrossEntropy.apply(logits, target, smoothing, padding_idx, accuracy, dloss)
