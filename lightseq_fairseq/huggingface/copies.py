"""Copies of parameters, which the layers read: side by side what one product reads as one, and
under autocast in 16 bits.

The parameters themselves are never moved. Others may refer to their memory, such as an optimizer,
and files of safetensors lack parameters that share a storage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_ALIGNMENT = 128  # elements; kernels read 16 bytes at a time, TMA needs up to 256


def copies(blocks: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> dict[int, Tensor]:
    """``id(parameter)`` -> its copy of ``dtype``; differentiable.

    The copies are new at each call, so they never have old values.

    blocks: parameters of one dtype; the copies of a block have no gaps between them.
    """
    parameters = [p for block in blocks for p in block]
    if not parameters:
        return {}
    made = _Copies.apply(*_laid_out(blocks), dtype, *parameters)
    return {id(p): copy for p, copy in zip(parameters, made, strict=True)}


class KeptCopies:
    """Copies at addresses that stay the same from call to call, for CUDA graphs; without gradients.

    Attributes:
        moved: whether the last call had to allocate.
    """

    def __init__(self) -> None:
        self._flat, self.moved = torch.empty(0), False
        self._layout: Any = None

    def __call__(self, blocks: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> dict[int, Tensor]:
        """As `copies`: the copies have the values of now."""
        parameters = [p for block in blocks for p in block]
        offsets, end = _laid_out(blocks)
        shapes = [p.shape for p in parameters]
        device = parameters[0].device if parameters else None
        layout = offsets, shapes, dtype, device
        self.moved = layout != self._layout
        if self.moved:
            self._flat, self._layout = torch.empty(end, dtype=dtype, device=device), layout
        made = _views(self._flat, offsets, shapes)
        if made:
            torch._foreach_copy_(made, parameters)
        return {id(p): copy for p, copy in zip(parameters, made, strict=True)}


def _laid_out(blocks: Sequence[Sequence[Tensor]]) -> tuple[list[int], int]:
    """Where each copy begins, and the size of all, in elements."""
    offsets, end = [], 0
    for block in blocks:
        end = -(-end // _ALIGNMENT) * _ALIGNMENT
        for parameter in block:
            offsets.append(end)
            end += parameter.numel()
    return offsets, end


@contextlib.contextmanager
def replaced(model: nn.Module, tensors: dict[int, Tensor]) -> Iterator[None]:
    """Within the block, modules have other tensors in place of parameters: ``tensors[id]``."""
    before = [
        (module._parameters, name, parameter)
        for module in (model.modules() if tensors else ())
        for name, parameter in module._parameters.items()
        if id(parameter) in tensors
    ]
    for place, name, parameter in before:
        place[name] = tensors[id(parameter)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for place, name, parameter in before:
            place[name] = parameter


class _Copies(torch.autograd.Function):
    """One kernel copies many tensors, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, offsets: Sequence[int], size: int, dtype: torch.dtype, *parameters: Tensor
    ) -> Any:
        ctx.offsets, ctx.like = offsets, parameters[0].new_empty(0)
        ctx.set_materialize_grads(False)
        flat = parameters[0].new_empty(size, dtype=dtype)
        made = _views(flat, offsets, [p.shape for p in parameters])
        torch._foreach_copy_(made, list(parameters))
        frozen = [c for c, p in zip(made, parameters, strict=True) if not p.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        given = [(offset, g) for offset, g in zip(ctx.offsets, gradients, strict=True)
                 if g is not None]  # fmt: skip
        found = list(gradients)
        if given and given[0][1].dtype != ctx.like.dtype:
            # A new tensor: the parameters' ``.grad`` become its views.
            whole = ctx.like.new_empty(given[-1][0] + given[-1][1].numel())
            views = _views(whole, [offset for offset, _ in given], [g.shape for _, g in given])
            torch._foreach_copy_(views, [g for _, g in given])
            left = iter(views)
            found = [None if g is None else next(left) for g in gradients]
        return None, None, None, *found


def _views(flat: Tensor, offsets: Sequence[int], shapes: Sequence[torch.Size]) -> list[Tensor]:
    return [
        flat[offset : offset + shape.numel()].view(shape)
        for offset, shape in zip(offsets, shapes, strict=True)
    ]
