"""A stack of layers as one autograd node: its sublayers forward, then the same ones backward.

A sublayer is a pair of functions from its first product to its last one. Between two sublayers is
one op (`residual_norm`): it ends the one and computes the LayerNorm that the next one reads, cast
if the next product is in fp8.

Shapes: T = packed tokens, T_src = packed source tokens, C = model width, M = columns of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightseq_fairseq.layers.node import Input, Pair
from lightseq_fairseq.layers.residual_norm import Affine, Norm, ResidualNorm
from lightseq_fairseq.layers.weight import Weight
from lightseq_fairseq.memory import passes
from lightseq_fairseq.memory.gradients import Gradients
from lightseq_fairseq.ops import Cast, Dropout


@dataclass(frozen=True, kw_only=True)
class Sublayer:
    """A pair of functions, each defined by a subclass.

    ``forward(x: Input, memory)`` returns the last product's result h, without bias, and what
    backward needs. ``backward(dh, kept, to, onto, dmemory)`` returns the gradient of x, or adds it
    ``onto`` another one; it writes the gradients of parameters ``to`` a `Gradients`, and that of
    memory to ``dmemory``.

    memory: [T_src, 2 * C], keys and values, if there are ``columns``; else None.

    Attributes:
        norm: its LayerNorm: before it in a pre-norm stack, else behind it.
        first, last: its first product, which reads x, and its last one.
        bias: of the last product, added behind it.
        dropout: of the last product's result.
        columns: those of all layers' memory that it reads.
    """

    forward: ClassVar[Callable[..., tuple[Tensor, Any]]]
    backward: ClassVar[Callable[..., Tensor]]
    norm: nn.LayerNorm
    first: Weight
    last: Weight
    bias: Tensor
    dropout: Dropout
    columns: slice | None = None

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Those that its functions read; others read ``bias`` and ``norm``."""
        return *self.first.parameters, *self.last.parameters


class Stack(Pair):
    """A stack that runs once; see `node.Pair`.

    The inputs are x [T, C] and, with cross attention, the encoder's output. The results are that of
    the stack; with ``states`` the residual stream behind each layer; and with ``watched`` the x and
    the memory that this sublayer reads.

    Args:
        layers: the sublayers of each layer; at least one layer.
        last_norm: the LayerNorm at the end of a pre-norm stack.
        is_pre_norm: pre-LayerNorm (tensor2tensor), not post-LayerNorm (Vaswani et al. 2017).
        recomputes: save only the input of each layer for backward, which runs the layers again.
        memory: the product by which all cross attentions read the encoder's output.
        cast: of the product that reads the stack's result.
    """

    def __init__(
        self, layers: Sequence[Sequence[Sublayer]], last_norm: nn.LayerNorm | None, *,
        is_pre_norm: bool, recomputes: bool = False, memory: Weight | None = None,
        cast: Cast | None = None, states: bool = False, watched: Sublayer | None = None,
    ) -> None:  # fmt: skip
        self.is_pre_norm, self.recomputes, self.memory = is_pre_norm, recomputes, memory
        self.states, self.watched = states, watched
        self.trains = torch.is_grad_enabled()  # false within the node
        sublayers = [sublayer for layer in layers for sublayer in layer]
        self.rng = sublayers[0].dropout.rng  # of all dropouts
        # The scalars for which each sublayer's x is cast, and the stack's result.
        casts = [None if s is watched else s.first.input_cast for s in sublayers]
        norms = [Affine.of(s.norm) for s in sublayers]
        self.start = None
        if is_pre_norm:
            self.start = Norm(norms[0], self.rng, casts[0], keeps_y=casts[0] is None)
        last = None if last_norm is None else Affine.of(last_norm)
        ends = [
            ResidualNorm(s.bias, norm, is_pre_norm, s.dropout, to, not is_pre_norm or to is None)
            for s, norm, to in zip(
                sublayers, [*norms[1:], last] if is_pre_norm else norms, [*casts[1:], cast],
                strict=True,
            )
        ]  # fmt: skip
        # Other nodes pass the result on, also if a product reads only its cast.
        ends[-1] = replace(ends[-1], keeps_y=True)
        pairs = iter(zip(sublayers, ends, strict=True))
        self.layers = [[next(pairs) for _ in layer] for layer in layers]

    @property
    def others(self) -> tuple[Tensor]:
        return (self.rng,)

    @property
    def parameters(self) -> list[Tensor]:
        owners = [part for layer in self.layers for pair in layer for part in pair]
        before = [part for part in (self.memory, self.start) if part is not None]
        return [p for part in (*before, *owners) for p in part.parameters]

    def forward(self, x: Input, *source: Input) -> tuple[list[Input], list[Any]]:
        memory = of_source = of_start = None
        states: list[Input] = []
        watched: list[Input] = []
        needed = self.trains and any(i.x.requires_grad for i in (x, *source))
        if self.memory is not None:
            self.memory.wait()
            memory, of_source = self.memory.multiply(*source)
            needed |= self.trains and _is_trained(self.memory)
        residual = x.x
        if self.start is not None:
            x, of_start = self.start.normalise(residual)
            needed |= self.trains and _is_trained(self.start)
        kept = [(memory, of_source), of_start if needed else None]
        for layer in self.layers:
            # Nothing below the first layer that is trained is needed.
            needed |= self.trains and any(_is_trained(part) for pair in layer for part in pair)
            saved: list[Any] | None = [] if needed and not self.recomputes else None
            kept.append((x, residual) if needed and self.recomputes else saved)
            x, residual = self._run(layer, x, residual, memory, saved, watched)
            states += [Input(residual)] if self.states else []
        return [x, *states, *watched], kept

    def _run(
        self, layer: _Layer, x: Input, residual: Tensor, memory: Tensor | None,
        saved: list[Any] | None, watched: list[Input],
    ) -> tuple[Input, Tensor]:  # fmt: skip
        """A layer's result, and the residual of the next one.

        saved: gets what backward needs, in the order of the sublayers.
        """
        for sublayer, end in layer:
            passes.current().wait_for((*sublayer.parameters, *end.parameters))
            columns = _columns(memory, sublayer)
            if sublayer is self.watched and columns is not None:
                watched += [Input(x.x), Input(columns)]
            x, residual = self._run_one(sublayer, end, x, residual, columns, saved)
        return x, residual

    def _run_one(
        self, sublayer: Sublayer, end: ResidualNorm, x: Input, residual: Tensor,
        columns: Tensor | None, saved: list[Any] | None,
    ) -> tuple[Input, Tensor]:  # fmt: skip
        h, of_sublayer = sublayer.forward(x, columns)
        x, residual, of_end = end.forward(h, residual)
        if saved is not None:
            saved.append((of_sublayer, of_end))
        return x, residual

    def backward(
        self, kept: list[Any], to: Gradients, needed: Sequence[bool], *gradients: Tensor | None
    ) -> list[Tensor | None]:
        dy, *others = (None if g is None else g.contiguous() for g in gradients)
        dstates = others[: len(self.layers)] if self.states else [None] * len(self.layers)
        dwatched = others[-2:] if self.watched is not None else [None, None]
        dresidual = dmemory = None
        if self.layers[-1][-1][1].norm is None:  # the result is the residual
            dy, dresidual = None, dy
        memory, of_source = kept[0]
        for layer in reversed(self.layers):
            saved = kept.pop()
            if saved is None:
                dy = dresidual = None
                break
            if self.is_pre_norm:
                dresidual = _sum(dresidual, dstates.pop())
            else:
                dy = _sum(dy, dstates.pop())
            if self.recomputes:
                (x, residual), saved = saved, []
                self._run(layer, x, residual, memory, saved, [])
            else:
                saved = list(saved)
            for sublayer, end in reversed(layer):
                if sublayer.columns is not None and dmemory is None:
                    assert memory is not None and self.memory is not None
                    dmemory = self.memory.gradient_like(memory)
                    if dy is None and dresidual is None:
                        dmemory.zero_()
                dcolumns = _columns(dmemory, sublayer)
                dy, dresidual = self._run_back(
                    sublayer, end, dy, dresidual, saved.pop(), to, dcolumns
                )
                if sublayer is self.watched:
                    dy = _sum(dy, dwatched[0])
                    if dcolumns is not None and dwatched[1] is not None:
                        dcolumns += dwatched[1]
        else:
            of_start = kept.pop()
            if self.start is not None and dy is not None and of_start is not None:
                dy = self.start.gradient(dy, dresidual, of_start, to)
        if self.memory is None:
            return [dy]
        dsource = None
        if dmemory is not None and (needed[1] or _is_trained(self.memory)):
            dsource = self.memory.backward(dmemory, of_source, to, needed[1])
        return [dy, dsource if needed[1] else None]

    def _run_back(
        self, sublayer: Sublayer, end: ResidualNorm, dy: Tensor | None, dresidual: Tensor | None,
        kept: Any, to: Gradients, dcolumns: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """Gradients of a sublayer's input and of its residual; if they are one tensor, the first.

        dy, dresidual: the same of what follows; both None if nothing depends on it.
        """
        if dy is None and dresidual is None:
            return None, None
        of_sublayer, of_end = kept
        dh, dresidual = end.backward(dy, dresidual, of_end, to, sublayer.last.gradient_cast)
        onto = None if self.is_pre_norm else dresidual
        dx = sublayer.backward(dh, of_sublayer, to, onto, dcolumns)
        return (dx, dresidual) if self.is_pre_norm else (dresidual, None)


_Layer = Sequence[tuple[Sublayer, ResidualNorm]]


def _is_trained(part: Sublayer | ResidualNorm | Norm | Weight) -> bool:
    return any(parameter.requires_grad for parameter in part.parameters)


def _columns(memory: Tensor | None, sublayer: Sublayer) -> Tensor | None:
    return None if memory is None or sublayer.columns is None else memory[:, sublayer.columns]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
