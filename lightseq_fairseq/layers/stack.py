"""A stack of layers as one autograd node: its sublayers forward, then the same ones backward.

A sublayer is a pair of functions from its first product to its last one. Between two sublayers is
one op (`residual_norm`): it ends the one and computes the LayerNorm that the next one reads, cast
if the next product is in fp8.

Shapes: T = packed tokens, T_src = packed source tokens, C = model width, M = columns of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightseq_fairseq.layers.node import Input, Pair, apply
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
        norm: its LayerNorm: before it in a pre-norm stack, else behind it. None, in a pre-norm
            stack only: it reads the residual.
        first, last: its first product, which reads x, and its last one.
        bias: of the last product, added behind it.
        dropout: of the last product's result.
        columns: those of all layers' memory that it reads.
    """

    forward: ClassVar[Callable[..., tuple[Tensor, Any]]]
    backward: ClassVar[Callable[..., Tensor]]
    norm: Norm | None
    first: Weight
    last: Weight
    bias: Tensor | None
    dropout: Dropout
    columns: slice | None = None

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Those that its functions read; others read ``bias`` and ``norm``."""
        return *self.first.parameters, *self.last.parameters


class Stack(Pair):
    """A stack that runs once; see `node.Pair`.

    The inputs are x [T, C] and, with ``memory``, the encoder's output. The results are that of the
    stack, and what was asked for, in the order in which it is computed: with ``states`` the
    residual stream behind each layer, with ``watched`` the x and the memory that it reads.

    Args:
        layers: the sublayers of each layer.
        last_norm: the LayerNorm at the end of a pre-norm stack.
        rng: of all dropouts.
        is_pre_norm: pre-LayerNorm (tensor2tensor), not post-LayerNorm (Vaswani et al. 2017).
        recomputes: save only the input of each layer for backward, which runs the layers again.
        memory: the product by which all cross attentions read the encoder's output.
        cast: of the product that reads the stack's result.
        watched: a sublayer with cross attention.
    """

    def __init__(
        self, layers: Sequence[Sequence[Sublayer]], last_norm: Norm | None, rng: Tensor, *,
        is_pre_norm: bool = True, recomputes: bool = False, memory: Weight | None = None,
        cast: Cast | None = None, states: bool = False, watched: Sublayer | None = None,
    ) -> None:  # fmt: skip
        self.is_pre_norm, self.recomputes, self.memory = is_pre_norm, recomputes, memory
        self.states, self.watched, self.others = states, watched, (rng,)
        self.trains = torch.is_grad_enabled()  # false within the node
        sublayers = [sublayer for layer in layers for sublayer in layer]
        # The scalars for which each sublayer's x is cast, and the stack's result.
        casts = [*(None if s is watched else s.first.input_cast for s in sublayers), cast]
        norms = [None if s.norm is None else Affine.of(s.norm) for s in sublayers]
        self.start = None
        if is_pre_norm:
            # Each sublayer ends with the LayerNorm of the next one.
            first, *norms = [*norms, None if last_norm is None else Affine.of(last_norm)]
            if first is not None:
                keeps_y = casts[0] is None or not sublayers
                self.start = ResidualNorm(
                    norm=first, dropout=Dropout(0.0, rng, 0), cast=casts[0], keeps_y=keeps_y
                )
        self.ends_with_residual = bool(sublayers) and norms[-1] is None
        ends = [
            ResidualNorm(
                norm=norm, dropout=sublayer.dropout, bias=sublayer.bias, is_pre_norm=is_pre_norm,
                cast=None if norm is None else to,
                # Other nodes pass the stack's result on, also if a product reads only its cast.
                keeps_y=not is_pre_norm or to is None or sublayer is sublayers[-1],
            )
            for sublayer, norm, to in zip(sublayers, norms, casts[1:], strict=True)
        ]  # fmt: skip
        pairs = iter(zip(sublayers, ends, strict=True))
        self.layers = [[next(pairs) for _ in layer] for layer in layers]
        parts = [part for layer in self.layers for pair in layer for part in pair]
        before = [part for part in (memory, self.start) if part is not None]
        self.parameters = [p for part in (*before, *parts) for p in part.parameters]

    def forward(self, x: Input, *source: Input) -> tuple[list[Input], list[Any]]:
        memory = of_source = of_start = None
        asked: list[Input] = []
        needed = self.trains and any(i.x.requires_grad for i in (x, *source))
        if self.memory is not None:
            passes.current().wait_for(self.memory.parameters)
            memory, of_source = self.memory.multiply(*source)
        residual = x.x
        if self.start is not None:
            passes.current().wait_for(self.start.parameters)
            x, residual, of_start = self.start.forward(residual, None)
            needed |= self.trains and _is_trained(self.start)
        kept = [(memory, of_source), of_start if needed else None]
        for layer in self.layers:
            # Nothing below the first layer that is trained is needed.
            needed |= self.trains and any(_is_trained(part) for pair in layer for part in pair)
            saved: list[Any] | None = [] if needed and not self.recomputes else None
            kept.append((x, residual) if needed and self.recomputes else saved)
            x, residual = self._run(layer, x, residual, memory, saved, asked)
            asked += [Input(residual)] if self.states else []
        return [x, *asked], kept

    def _run(
        self, layer: _Layer, x: Input, residual: Tensor, memory: Tensor | None,
        saved: list[Any] | None, asked: list[Input],
    ) -> tuple[Input, Tensor]:  # fmt: skip
        """A layer's result, and the residual of the next one.

        saved: gets what backward needs, in the order of the sublayers.
        """
        for sublayer, end in layer:
            passes.current().wait_for((*sublayer.parameters, *end.parameters))
            columns = _columns(memory, sublayer)
            if sublayer is self.watched and columns is not None:
                asked += [Input(x.x), Input(columns)]
            x, residual = self._run_one(sublayer, end, x, residual, columns, saved)
        return x, residual

    # Not a part of the loop: what is not saved is freed before the next sublayer runs.
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
        dy, *asked = (None if g is None else g.contiguous() for g in gradients)
        dresidual = dmemory = None
        if self.ends_with_residual:
            dy, dresidual = None, dy
        memory, of_source = kept[0]
        for layer in reversed(self.layers):
            saved = kept.pop()
            if saved is None:
                dy = dresidual = None
                break
            if self.states and self.is_pre_norm:
                dresidual = _sum(dresidual, asked.pop())
            elif self.states:
                dy = _sum(dy, asked.pop())
            if self.recomputes:
                (x, residual), saved = saved, []
                self._run(layer, x, residual, memory, saved, [])
            else:
                saved = list(saved)
            for sublayer, end in reversed(layer):
                if sublayer.columns is not None and dmemory is None:
                    assert memory is not None and self.memory is not None
                    dmemory = self.memory.gradient_like(memory)
                    is_cut = len(kept) > 2 and kept[2] is None  # backward ends above layer 0
                    if is_cut or (dy is None and dresidual is None):
                        dmemory.zero_()
                dcolumns = _columns(dmemory, sublayer)
                dy, dresidual = self._run_back(
                    sublayer, end, dy, dresidual, saved.pop(), to, dcolumns
                )
                if sublayer is self.watched:
                    dwatched = asked.pop()
                    if dcolumns is not None and dwatched is not None:
                        dcolumns += dwatched
                    dy = _sum(dy, asked.pop())
        else:
            of_start = kept.pop()
            if self.start is not None and dy is not None and of_start is not None:
                _, dy = self.start.backward(dy, dresidual, of_start, to)
            elif self.start is None and dy is None:
                dy = dresidual
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
        """Gradients of a sublayer's input and of its residual; if they are one tensor, the first,
        or in a pre-norm stack the second.

        dy, dresidual: the same of what follows; both None if nothing depends on it.
        """
        if dy is None and dresidual is None:
            return None, None
        of_sublayer, of_end = kept
        dh, dresidual = end.backward(dy, dresidual, of_end, to, sublayer.last.gradient_cast)
        has_norm_before = self.is_pre_norm and sublayer.norm is not None
        onto = None if has_norm_before else dresidual
        dx = sublayer.backward(dh, of_sublayer, to, onto, dcolumns)
        if has_norm_before:
            return dx, dresidual
        return (None, dresidual) if self.is_pre_norm else (dresidual, None)


_Layer = Sequence[tuple[Sublayer, ResidualNorm]]


def _is_trained(part: Sublayer | ResidualNorm | Weight) -> bool:
    return any(parameter.requires_grad for parameter in part.parameters)


def _columns(memory: Tensor | None, sublayer: Sublayer) -> Tensor | None:
    return None if memory is None or sublayer.columns is None else memory[:, sublayer.columns]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def layer_norm(x: Tensor, norm: Norm, rng: Tensor) -> Tensor:
    """The LayerNorm of x [T, C], differentiable. rng: its value is not used."""
    return apply(Stack([], norm, rng), Input(x))[0].x
