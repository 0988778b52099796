"""The classes of a case: its systems, and its baselines in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Run = Callable[[], Sequence[Tensor]]
PAD = 1  # fairseq's padding index
SITE = 3  # dropout site: the number of the dropout in the model; any number will do


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and the batch; the defaults are those of the README's figures."""

    width: int = 1024
    ffn: int = 4096
    heads: int = 16
    vocabulary: int = 40_000
    decoder_layers: int = 6
    parameters: int = 217_000_000
    dropout: float = 0.1
    beam: int = 5


@dataclass(frozen=True)
class Case:
    """One op in one direction; its name is `<op>[.<shape>]/<size>`."""

    name: str
    least_bytes: int
    systems: dict[str, Callable[[], Run]]  #: each prepares (untimed) and returns the timed function
    flops: int = 0
    restore: Callable[[], object] = lambda: None  #: restores (untimed) what a run overwrites


@dataclass(frozen=True)
class Formula:
    """A baseline in plain torch: `function(*inputs)`, and `grads` of its first outputs."""

    function: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]

    def systems(self) -> tuple[dict[str, Callable[[], Run]], dict[str, Callable[[], Run]]]:
        """Return the systems eager and compile: of the forward case, and of the backward case."""
        both = self._functions()
        return (
            {name: lambda get=get: self._forward(get()) for name, get in both.items()},
            {name: lambda get=get: self._backward(get()) for name, get in both.items()},
        )

    def systems_at_once(self) -> dict[str, Callable[[], Run]]:
        """Return the systems eager and compile of a case of forward and backward together."""
        both = self._functions()
        return {name: lambda get=get: self._at_once(get()) for name, get in both.items()}

    def _functions(self) -> dict[str, Callable[[], Callable[..., tuple[Tensor, ...]]]]:
        @functools.cache
        def compiled() -> Callable[..., tuple[Tensor, ...]]:
            torch.compiler.reset()  # compile each shape anew, so that no recompile limit is reached
            return torch.compile(self.function, dynamic=False)

        return {"eager": lambda: self.function, "compile": compiled}

    def _forward(self, function: Callable[..., tuple[Tensor, ...]]) -> Run:
        return lambda: function(*self.inputs)

    def _backward(self, function: Callable[..., tuple[Tensor, ...]]) -> Run:
        outputs = function(*self.inputs)[: len(self.grads)]
        return lambda: torch.autograd.grad(outputs, self._leaves(), self.grads, retain_graph=True)

    def _at_once(self, function: Callable[..., tuple[Tensor, ...]]) -> Run:
        def run() -> Sequence[Tensor]:
            outputs = function(*self.inputs)[: len(self.grads)]
            return torch.autograd.grad(outputs, self._leaves(), self.grads)

        return run

    def _leaves(self) -> list[Tensor]:
        return [x for x in self.inputs if x.requires_grad]


@dataclass(frozen=True)
class Make:
    """Random tensors of one dtype on one device."""

    dtype: torch.dtype
    device: str

    def rows(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device).mul_(scale)

    def leaf(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.rows(*shape, scale=scale).requires_grad_()

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def rng(self) -> Tensor:
        return torch.tensor([20, 7], device=self.device)


def without_autograd(run: Run) -> Callable[[], Run]:
    """Return a system that runs without autograd, as ours and the library's kernels do."""
    return lambda: torch.no_grad()(run)
