"""Projection of packed rows: y = x W^T + b.

Shapes: T = rows, K = input features, N = output features, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightseq_fairseq import ops
from lightseq_fairseq.layers.products import product_for
from lightseq_fairseq.layers.second_derivatives import once_differentiable
from lightseq_fairseq.memory.arrival import wait_for
from lightseq_fairseq.memory.gradients import gradients_for
from lightseq_fairseq.memory.parameters import as_one, with_spare_rows


class _Linear(torch.autograd.Function):
    """One GEMM over several stacked weight matrices; the result is split into ``parts`` outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int, *parameters: Tensor) -> Any:
        wait_for(*parameters)
        count = len(parameters) // 2 if parameters[-1] is not None else len(parameters) - 1
        weights, biases = parameters[:count], parameters[count:]
        weight = as_one(weights)
        bias = None if biases[0] is None else as_one(biases)
        ctx.product = product_for(weight)
        y, of_x = ctx.product.forward(x, weight, bias)
        ctx.save_for_backward(of_x, *weights, *(() if bias is None else biases))
        ctx.tokens, ctx.rows = len(x), [w.shape[0] for w in weights]
        ctx.set_materialize_grads(False)
        return y if parts == 1 else y.chunk(parts, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        of_x, *parameters = ctx.saved_tensors
        count = len(ctx.rows)
        weight, biases = as_one(parameters[:count]), parameters[count:]
        width = weight.shape[0] // len(grads)
        known = {i: ctx.product.from_autograd(g) for i, g in enumerate(grads) if g is not None}
        dtype = next((g.dtype for g in known.values()), weight.dtype)
        given = [
            known[i] if i in known else weight.new_zeros(ctx.tokens, width, dtype=dtype)
            for i in range(len(grads))
        ]
        dy = as_one(given, dim=1) if len(given) > 1 else given[0].contiguous()
        need_dx = ctx.needs_input_grad[0]
        to = gradients_for(weight, *([as_one(biases)] if biases else []))
        dweight = to.tensors[0]
        dbias = to.tensors[1] if biases else None
        dx = ctx.product.backward(dy, of_x, weight, dweight, dbias, to.accumulate, need_dx)
        dbiases = () if dbias is None else dbias.split(ctx.rows)
        handed = to.handed(*dweight.split(ctx.rows), *dbiases)
        return (dx if need_dx else None, None, *handed, *((None,) if dbias is None else ()))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] or None -> [T, N]; differentiable.

    Source: ``torch.nn.functional.linear``.
    """
    return _Linear.apply(x, 1, weight, bias)


def linear_parts(x: Tensor, parts: int, weights: list[Tensor], biases: list[Tensor]) -> Any:
    """Project x [T, K] by all ``weights`` (each [N_i, K]) in one GEMM.

    Returns ``parts`` tensors of equal width: column slices of the result [T, sum N_i].
    If the weights are adjacent in the flat buffer, and so are the biases, nothing is copied.
    """
    y = _Linear.apply(x, parts, *weights, *biases)
    return (y,) if parts == 1 else y


class _Logits(torch.autograd.Function):
    """x weight^T + bias, including the spare rows of both; their logits are zero and are cut off.

    If the width is no multiple of 8, such as 50 257, the product is computed in scratch memory and
    copied, see csrc/linear/linear.cu. When the loss overwrites the logits with their gradient, the
    columns of the spare rows stay zero, so backward may read them as well.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        wholes = [with_spare_rows(p) for p in parameters]
        wait_for(*wholes)
        weight, bias = wholes[0], wholes[1] if len(wholes) > 1 else None
        assert weight is not None
        ctx.save_for_backward(x, *parameters, *wholes)
        ctx.logits = whole = ops.linear_fwd(x, weight, bias)
        # Not a view, since autograd forbids the loss to overwrite a view that a Function returns.
        shape = (len(x), len(parameters[0]))
        return whole.new_empty(0).set_(
            whole.untyped_storage(), whole.storage_offset(), shape, whole.stride()
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, *saved = ctx.saved_tensors
        parameters, wholes = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        logits, ctx.logits = ctx.logits, None
        if dy.data_ptr() == logits.data_ptr() and dy.stride() == logits.stride():
            dy = logits
        else:
            dy = nn.functional.pad(dy, (0, len(wholes[0]) - dy.shape[1]))
        to = gradients_for(*wholes)
        need_dx = ctx.needs_input_grad[0]
        dweight, dbias = (*to.tensors, None)[:2]
        dx = ops.linear_bwd(dy, x, wholes[0], dweight, dbias, to.accumulate, need_dx)
        cut = [gradient[: len(p)] for gradient, p in zip(to.tensors, parameters, strict=True)]
        return dx if need_dx else None, *to.handed(*cut)


def vocabulary_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [V, K], bias [V] or None -> logits [T, V], differentiable.

    If V is no multiple of 8, and weight and bias have spare rows (``parameters.with_spare_rows``),
    the logits' row stride is larger than V.
    """
    parameters = (weight,) if bias is None else (weight, bias)
    if len(weight) % 8 == 0 or any(with_spare_rows(p) is None for p in parameters):
        return linear(x, weight, bias)
    return _Logits.apply(x, *parameters)
