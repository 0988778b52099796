"""What the optimizers of flat buffers share."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch


class FlatOptimizer(torch.optim.Optimizer):
    """torch's class without the wrapper that leaves its methods out of torch.compile. The wrapper's
    first call would import torch.compile, which takes seconds.

    A subclass defines ``update_all``.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the loss of ``closure``, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update_all()
        return loss

    @abstractmethod
    def update_all(self) -> None:
        """Update every parameter that has a gradient, in a context without gradients."""
