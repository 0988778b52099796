"""Autograd nodes whose backward pass is written by hand.

Shapes: T = rows, K = columns, P = padded rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightseq_fairseq.layers.second_derivatives import once_differentiable
from lightseq_fairseq.memory import passes
from lightseq_fairseq.ops import Cast


class Input(NamedTuple):
    """What a product reads: rows, and their cast to E4M3 if the op that made them has cast them.

    Attributes:
        x: [T, K]; empty if only the cast exists.
        values: E4M3 [T, K], read only with ``cast``.
        transpose: E4M3 [K, P], see ``ops.Quantised``; empty or None if backward is to make it of x.
        cast: the scalars of the product for which x was cast.
    """

    x: Tensor
    values: Tensor | None = None
    transpose: Tensor | None = None
    cast: Cast | None = None

    @classmethod
    def of(cls, x: Tensor | Input) -> Input:
        return cls(x) if isinstance(x, Tensor) else x

    @property
    def has_transpose(self) -> bool:
        return self.transpose is not None and self.transpose.numel() > 0


class Pair:
    """A computation and its backward pass.

    ``forward(*inputs: Input)`` returns its results, a list of `Input`, and a list of what backward
    needs. ``backward(kept, to, needed, *gradients)`` returns the gradients of the inputs for those
    of the results, and writes those of the parameters ``to`` a `Gradients`. ``kept`` is that list,
    from which it removes what it has used; ``needed`` says for each input whether its gradient is.

    Attributes:
        parameters: what it reads and differentiates besides the inputs.
        others: tensors that must not change between forward and backward, such as the rng.
    """

    parameters: Sequence[Tensor] = ()
    others: Sequence[Tensor] = ()

    forward: Callable[..., tuple[list[Input], list[Any]]]
    backward: Callable[..., Sequence[Tensor | None]]


def apply(pair: Pair, *inputs: Input) -> list[Input]:
    """The results of ``pair.forward``, differentiable."""
    parameters = list({id(p): p for p in pair.parameters}.values())
    tensors = [*(x.x for x in inputs), *parameters]
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return pair.forward(*inputs)[0]
    results: list[Input] = []
    made = _Node.apply(pair, inputs, results, *tensors)
    return [result._replace(x=x) for result, x in zip(results, made, strict=True)]


class _Node(torch.autograd.Function):
    """A pair; casts of inputs and results do not pass through autograd."""

    @staticmethod
    def forward(ctx: Any, pair: Pair, inputs: Sequence[Input], results: list[Input],
                *tensors: Tensor) -> Any:  # fmt: skip
        made, ctx.kept = pair.forward(*inputs)
        results += made
        ctx.pair, ctx.count = pair, len(inputs)
        ctx.parameters = tensors[len(inputs) :]
        # What others can change; what only this node has is in ``kept``.
        read = [x.x for x in inputs if not x.has_transpose]
        ctx.save_for_backward(*read, *ctx.parameters, *pair.others, *(x.x for x in made[1:]))
        ctx.set_materialize_grads(False)
        return tuple(x.x.detach() for x in made)  # itself may be in ``kept``: it would refer to it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.saved_tensors  # noqa: B018  (raises torch's errors if one has changed or is freed)
        kept = ctx.kept
        if torch._C._autograd._get_current_graph_task_keep_graph():
            kept = list(kept)
        to = passes.current().gradients()
        needed = ctx.needs_input_grad[3 : 3 + ctx.count]
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        dinputs = ctx.pair.backward(kept, to, needed, *gradients)
        return None, None, None, *dinputs, *(to.for_autograd(p) for p in ctx.parameters)
