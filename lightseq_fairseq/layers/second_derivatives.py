"""Raises an error for gradients of gradients, which the layers do not support."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable as torchs


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of the same name, but it also covers losses that are linear in the output.

    torch's raises an error in a second derivative only if a gradient of the output needs a
    gradient. If the loss is linear in the output, none does, and torch would silently treat the
    result as a constant. So with ``create_graph`` every gradient of the output needs one here.
    """
    guarded = torchs(backward)

    @functools.wraps(backward)
    def refused_twice(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # create_graph
            gradients = tuple(
                dy if dy is None else dy.detach().requires_grad_() for dy in gradients
            )
        return guarded(ctx, *gradients)

    return refused_twice
