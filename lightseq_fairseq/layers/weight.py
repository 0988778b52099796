"""A weight, and all that a layer does with it: products in the model's precision or in fp8.

In fp8 both operands of a product are E4M3, and its result is bfloat16. Where an op of the layers
produces an operand, it casts it (the embedding; LayerNorm, the activation and attention, forward
and backward); the others are cast here.

Shapes: T = packed tokens, K = inputs, N = outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.layers.adapter import Added, adapter_of
from lightseq_fairseq.layers.node import Input
from lightseq_fairseq.memory import passes
from lightseq_fairseq.memory.gradients import Gradients
from lightseq_fairseq.memory.parameters import read_as_one
from lightseq_fairseq.ops import Cast, Quantised
from lightseq_fairseq.ops.arguments import Operand
from lightseq_fairseq.ops.casting import E4M3, padded
from lightseq_fairseq.ops.linear import matrix


class Projection(Protocol):
    """An ``nn.Linear``, or what has its tensors."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def out_features(self) -> int: ...


class Weight:
    """Parameters that one product reads as one matrix [N, K]; it belongs to one pass.

    Args:
        weights: their rows follow each other.
        biases: of the same rows; empty if this product adds none.
        spared: a single weight, and perhaps its bias, are read with their spare rows.
        added: [N], in place of biases: a constant, which gets no gradient.
        adapters: added to parts of the product, which is then not in fp8.

    Attributes:
        input_cast, gradient_cast: how the ops that produce the product's input and the gradient of
            its result cast them; None if the product is not in fp8.
    """

    def __init__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), spared: bool = False,
        added: Tensor | None = None, adapters: Sequence[Added] = (),
    ) -> None:  # fmt: skip
        self.parameters = (*weights, *biases, *(p for each in adapters for p in each.parameters))
        self.adapters, self.weights = adapters, weights
        self._biases, self._spared = biases, spared
        self._is_trained = any(weight.requires_grad for weight in weights)
        self._added = added
        self._fp8 = fp8 = None if adapters else passes.current().fp8.operands(weights)
        self.input_cast: Cast | None = None if fp8 is None else fp8.input
        self.gradient_cast: Cast | None = None if fp8 is None else fp8.gradient

    @classmethod
    def of(cls, *projections: Projection, bias: bool = True, rng: Tensor | None = None) -> Weight:
        """Of one or more projections; bias: the product adds their biases, if they have any.
        rng: of the dropout of their adapters, in training."""
        ends = [0, *itertools.accumulate(p.out_features for p in projections)]
        adapters = [
            Added(adapter, slice(start, end), rng)
            for p, start, end in zip(projections, ends, ends[1:], strict=False)
            if (adapter := adapter_of(p)) is not None
        ]
        biases = [p.bias for p in projections if bias and p.bias is not None]
        return cls([p.weight for p in projections], biases, adapters=adapters)

    @property
    def matrix(self) -> Operand:
        if self._fp8 is not None:
            return self._fp8.matrix
        return read_as_one(self.weights, self._spared)

    @property
    def bias(self) -> Tensor | None:
        return read_as_one(self._biases, self._spared) if self._biases else self._added

    def multiply(self, x: Input, *, keep: bool = False) -> tuple[Tensor, Any]:
        """x weight^T + bias [T, N], and what backward needs of x [T, K].

        keep: it is needed even if the weights are frozen.
        """
        operand, kept = self.operand(x, keep)
        y = ops.linear_fwd(operand, self.matrix, self.bias)
        if self.adapters:
            return y, (kept, x.x, [each.add(x.x, y) for each in self.adapters])
        return y, kept

    def operand(self, x: Input, keep: bool = False) -> tuple[Operand, Tensor | None]:
        """x as an op reads it, and what backward needs of it: x, or if it exists its transpose;
        None if the weights are frozen, unless ``keep``."""
        keep |= self._is_trained
        if self._fp8 is None:
            return x.x, x.x if keep else None
        cast = self._fp8.input
        if x.cast is not cast:
            x = Input(x.x, *ops.fp8_quantise(x.x, cast), cast)
        assert x.values is not None
        self._fp8.count(x.values.numel())
        kept = x.transpose if x.has_transpose else x.x
        return Quantised(x.values, None, cast.scale), kept if keep else None

    def kept_operand(self, kept: Tensor | None, dy: Operand) -> Operand:
        """The input as an op reads it in backward; kept: from `multiply`.

        If nothing was kept, no op reads it: it has only the right shape for the gradient ``dy``.
        """
        rows, inputs = len(matrix(dy)), self.weights[0].shape[1]
        if self._fp8 is None:
            return matrix(dy).new_empty(rows, inputs) if kept is None else kept
        scale = self._fp8.input.scale
        if kept is None:
            return Quantised(None, matrix(dy).new_empty(inputs, padded(rows), dtype=E4M3), scale)
        if kept.dtype != E4M3:
            kept = ops.fp8_transpose(kept, scale)
        return Quantised(None, kept, scale)

    def gradient_like(self, y: Tensor) -> Tensor:
        """Memory for the gradient of y, a result of this product, as attention writes it."""
        return torch.empty_like(y, dtype=None if self._fp8 is None else E4M3)

    def gradient(
        self, dy: Operand, dbias: Tensor | None = None, accumulate: bool = False
    ) -> Operand:
        """The gradient of the result as an op reads it.

        dbias: in fp8 the op that casts or transposes dy writes it here.
        """
        if self._fp8 is None:
            return dy
        cast = self._fp8.gradient
        if isinstance(dy, Tensor):
            if dy.dtype == E4M3:
                parts = dy, ops.fp8_transpose(dy, cast.scale, dbias, accumulate)
            else:
                parts = ops.fp8_quantise(dy, cast, dbias, accumulate)
            dy = Quantised(*parts, cast.scale)
        assert dy.values is not None
        self._fp8.count(dy.values.numel())
        return dy

    def backward(
        self, dy: Operand, kept: Any, to: Gradients, need_dx: bool = True,
        onto: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """dx [T, K], unless it is added ``onto`` another gradient of x or not needed.

        dy: [T, N], memory of `gradient_like`, or cast by ``gradient_cast``.
        to: receives the gradients of the parameters.
        """
        groups = self.weights, self._biases
        given = dy
        if self.adapters:
            kept, x_of_adapters, hidden = kept
        with to.of(*groups, spared=self._spared) as ((dweight, dbias), accumulate):
            dy, x = self.gradient(dy, dbias, accumulate), self.kept_operand(kept, dy)
            dbias = dbias if self._fp8 is None else None
            need_dx = need_dx and onto is None
            dx = ops.linear_bwd(dy, x, self.matrix, dweight, dbias, onto, accumulate, need_dx)
        for each, h in zip(self.adapters, hidden if self.adapters else (), strict=True):
            assert isinstance(given, Tensor)
            target = onto if onto is not None else dx if need_dx else None
            each.backward(given, x_of_adapters, h, to, target)
        return dx
