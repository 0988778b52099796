"""The rng from which all dropout masks of a pass are computed, and dropout by itself."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.layers.node import Input, Pair, apply
from lightseq_fairseq.memory import passes
from lightseq_fairseq.memory.gradients import Gradients
from lightseq_fairseq.ops import Dropout

_numbered: tuple[int, Iterator[int]] | None = None  # within `numbered_passes`: seed, next numbers


def draw_rng(device: torch.device | str = "cpu") -> Tensor:
    """The rng of one forward and backward pass: int64 [2] (seed, micro-batch) on ``device``.

    As in other functions of torch, torch's CPU generator decides: the seed is drawn from it, so
    ``torch.manual_seed`` determines the seed, and the micro-batch is 0. Only within
    `numbered_passes`, for example in training by fairseq, nothing is drawn.
    Every mask of the pass is a function of these two numbers (see ``ops.philox``); backward
    recomputes the masks instead of storing them. Pass this tensor itself, not copies of it, to all
    layers of the pass: layers recognise by the tensor object which other layers belong to the same
    pass. For layers on another device, draw a separate tensor for that device.
    """
    if _numbered is not None:
        seed, numbers = _numbered
        return torch.tensor([seed, next(numbers)], dtype=torch.int64).to(device)
    drawn = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64)
    return torch.cat([drawn, torch.zeros(1, dtype=torch.int64)]).to(device)


@contextlib.contextmanager
def numbered_passes(seed: int) -> Iterator[None]:
    """Within the block, `draw_rng` returns (seed, 0), (seed, 1), ... and draws from no generator.

    So masks change no other random numbers, and do not depend on them.
    """
    global _numbered
    before, _numbered = _numbered, (seed, itertools.count())
    try:
        yield
    finally:
        _numbered = before


class _BiasActivationDropout(Pair):
    """dropout(activation(x + bias))."""

    def __init__(self, bias: Tensor | None, activation: str, dropout: Dropout) -> None:
        self.bias, self.activation, self.dropout = bias, activation, dropout
        self.parameters = () if bias is None else (bias,)
        self.others = (dropout.rng,)

    def forward(self, x: Input) -> tuple[list[Input], list[Any]]:
        passes.current().wait_for(self.parameters)
        y = ops.bias_activation_dropout_fwd(x.x, self.bias, self.activation, self.dropout)
        return [Input(y)], [x.x]

    def backward(
        self, kept: list[Any], to: Gradients, needed: Sequence[bool], dy: Tensor
    ) -> list[Tensor | None]:
        with to.of(self.parameters) as ((dbias,), accumulate):
            dx = ops.bias_activation_dropout_bwd(
                dy.contiguous(), kept.pop(), self.bias, self.activation, self.dropout, dbias,
                accumulate,
            )  # fmt: skip
        return [dx]


def activated(x: Tensor, bias: Tensor, activation: str, rng: Tensor) -> Tensor:
    """activation(x + bias), differentiable; the value of rng is not used."""
    pair = _BiasActivationDropout(bias, activation, Dropout(0.0, rng, 0))
    return apply(pair, Input(x))[0].x


def dropout(x: Tensor, p: float, rng: Tensor, site: int) -> Tensor:
    """Dropout of x [T, C] at the rate ``p``, differentiable; rng and site: see ``ops.philox``."""
    pair = _BiasActivationDropout(None, "identity", Dropout(p, rng, site))
    return x if p == 0.0 else apply(pair, Input(x))[0].x
