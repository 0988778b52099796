"""16-bit copies of float32 parameters, which autocast computes with.

Autocast casts each weight by itself, forward and backward. Here one kernel casts all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightseq_fairseq.memory.parameters import FlatBuffer


def half_copies(buffers: Sequence[FlatBuffer], dtype: torch.dtype) -> dict[int, Tensor]:
    """``id(parameter)`` -> its copy of ``dtype``; differentiable, the gradients are float32.

    Neighbours in a buffer have neighbouring copies. The copies are new at each call, so they never
    have old values.
    """
    copies: dict[int, Tensor] = {}
    for buffer in buffers:
        made = _HalfCopies.apply(buffer, dtype, *buffer.parameters)
        copies |= {id(p): copy for p, copy in zip(buffer.parameters, made, strict=True)}
    return copies


class _HalfCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: FlatBuffer, dtype: torch.dtype, *parameters: Tensor) -> Any:
        ctx.buffer = buffer
        ctx.set_materialize_grads(False)
        copies = buffer.views(buffer.data.to(dtype))
        frozen = [c for c, p in zip(copies, parameters, strict=True) if not p.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        # A new tensor: the parameters' ``.grad`` become its views.
        whole = torch.empty_like(ctx.buffer.data)
        views = ctx.buffer.views(whole)
        given = [(view, g) for view, g in zip(views, gradients, strict=True) if g is not None]
        if given:
            torch._foreach_copy_([view for view, _ in given], [g for _, g in given])
        found = [None if g is None else v for v, g in zip(views, gradients, strict=True)]
        return None, None, *found
