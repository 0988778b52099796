"""Projection of packed rows: y = x W^T + b.

Shapes: T = rows, K = input features, N = output features, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightseq_fairseq.layers.node import Input, Pair, apply
from lightseq_fairseq.layers.weight import Weight
from lightseq_fairseq.memory import passes
from lightseq_fairseq.memory.gradients import Gradients
from lightseq_fairseq.memory.parameters import with_spare_rows


class _Linear(Pair):
    """One product as a node."""

    def __init__(self, weight: Weight) -> None:
        self.weight, self.parameters = weight, weight.parameters

    def forward(self, x: Input) -> tuple[list[Input], list[Any]]:
        passes.current().wait_for(self.parameters)
        y, kept = self.weight.multiply(x)
        return [Input(y)], [kept]

    def backward(
        self, kept: list[Any], to: Gradients, needed: Sequence[bool], dy: Tensor
    ) -> list[Tensor | None]:
        dx = self.weight.backward(dy.contiguous(), kept.pop(), to, needed[0])
        return [dx if needed[0] else None]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] or None -> [T, N]; differentiable.

    Source: ``torch.nn.functional.linear``.
    """
    biases = [] if bias is None else [bias]
    return apply(_Linear(Weight([weight], biases)), Input(x))[0].x


class _Logits(_Linear):
    """x weight^T + bias, including the spare rows of both; their logits are zero and are cut off.

    If the width is no multiple of 8, such as 50 257, the product is computed in scratch memory and
    copied, see csrc/linear/linear.cu. When the loss overwrites the logits with their gradient, the
    columns of the spare rows stay zero, so backward may read them as well.
    """

    def forward(self, x: Input) -> tuple[list[Input], list[Any]]:
        (y,), kept = super().forward(x)
        whole = y.x
        # Not a view, since autograd forbids the loss to overwrite a view that a Function returns.
        shape = (len(whole), len(self.parameters[0]))
        logits = whole.new_empty(0).set_(
            whole.untyped_storage(), whole.storage_offset(), shape, whole.stride()
        )
        return [Input(logits)], [*kept, whole]

    def backward(
        self, kept: list[Any], to: Gradients, needed: Sequence[bool], dy: Tensor
    ) -> list[Tensor | None]:
        logits = kept.pop()
        if dy.data_ptr() == logits.data_ptr() and dy.stride() == logits.stride():
            dy = logits
        else:
            dy = nn.functional.pad(dy, (0, logits.shape[1] - dy.shape[1]))
        return super().backward(kept, to, needed, dy)


def vocabulary_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, added: Tensor | None = None
) -> Tensor:
    """x [T, K], weight [V, K], bias [V] or None -> logits [T, V], differentiable.

    If V is no multiple of 8, and weight and bias have spare rows (``parameters.with_spare_rows``),
    the logits' row stride is larger than V.

    added: [V], in place of a bias: a constant, which gets no gradient.
    """
    biases = [] if bias is None else [bias]
    if len(weight) % 8 == 0 or any(with_spare_rows(p) is None for p in (weight, *biases)):
        return apply(_Linear(Weight([weight], biases, added=added)), Input(x))[0].x
    if added is not None:
        added = nn.functional.pad(added, (0, -len(added) % 8))
    return apply(_Logits(Weight([weight], biases, spared=True, added=added)), Input(x))[0].x
