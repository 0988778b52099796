"""Projection of packed rows: y = x W^T + b.

Shapes: T = rows, K = input features, N = output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightseq_fairseq import ops
from lightseq_fairseq.parameters import as_one, gradients_for


class _Linear(torch.autograd.Function):
    """One GEMM over several stacked weight matrices; the result is split into ``parts`` outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int, *parameters: Tensor) -> Any:
        count = len(parameters) // 2 if parameters[-1] is not None else len(parameters) - 1
        weights, biases = parameters[:count], parameters[count:]
        weight = as_one(weights)
        bias = None if biases[0] is None else as_one(biases)
        ctx.save_for_backward(x, *weights, *(() if bias is None else biases))
        ctx.rows = [w.shape[0] for w in weights]
        ctx.set_materialize_grads(False)
        y = ops.linear_fwd(x, weight, bias)
        return y if parts == 1 else y.chunk(parts, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, *parameters = ctx.saved_tensors
        count = len(ctx.rows)
        weight, biases = as_one(parameters[:count]), parameters[count:]
        width = weight.shape[0] // len(grads)
        given = [x.new_zeros(x.shape[0], width) if g is None else g for g in grads]
        dy = as_one(given, dim=1) if len(given) > 1 else given[0].contiguous()
        need_dx = ctx.needs_input_grad[0]
        to = gradients_for(weight, *([as_one(biases)] if biases else []))
        dweight = to.tensors[0]
        dbias = to.tensors[1] if biases else None
        dx = ops.linear_bwd(dy, x, weight, dweight, dbias, to.accumulate, need_dx)
        dbiases = (None,) if dbias is None else to.handed(*dbias.split(ctx.rows))
        return (dx if need_dx else None, None, *to.handed(*dweight.split(ctx.rows)), *dbiases)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] or None -> [T, N]; differentiable.

    Source: ``torch.nn.functional.linear``.
    """
    return _Linear.apply(x, 1, weight, bias)


def linear_parts(x: Tensor, parts: int, weights: list[Tensor], biases: list[Tensor]) -> Any:
    """Project x [T, K] by all ``weights`` (each [N_i, K]) in one GEMM.

    Returns ``parts`` tensors of equal width: column slices of the result [T, sum N_i].
    If the weights are neighbours in the flat buffer, nothing is copied.
    """
    y = _Linear.apply(x, parts, *weights, *biases)
    return (y,) if parts == 1 else y
