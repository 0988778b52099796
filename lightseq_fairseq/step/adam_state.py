"""The state of Adam over one flat buffer, or over the parts of it that one rank updates.

Shapes: N = elements of a parameter buffer, including alignment gaps; S = elements of the parts of
it that one rank updates, each part rounded up to ``ALIGNMENT``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.memory.parameters import ALIGNMENT, FlatBuffer
from lightseq_fairseq.step.exchange import Exchange

_HALF = (torch.float16, torch.bfloat16)
_BLOCK = 1 << 20  # elements that one kernel splits or joins


@dataclass
class Span:
    """Neighbouring parameters ``first`` to ``last`` (inclusive) with the same step count."""

    first: int
    last: int
    # int64 [parts], a copy of the count for each part of the buffer, since each part's update
    # increments its own copy. If a part has no element of the span, its copy is not incremented.
    steps: Tensor


class Gathered(NamedTuple):
    """The state of a sharded buffer in host memory: moments [N] and counts of the parameters."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: list[int]


class AdamState:
    """A buffer, its Adam state, and the step count of each of its parameters.

    Attributes:
        parts: the elements of the buffer whose state this process has.
        exp_avg, exp_avg_sq: moments of the parts, [N], or [S] if they are sharded.
        eps_after_correction: see ``ops.adam_step``.
        masters: if the state is sharded and the parameters are float32 copies of a model's: this
            rank's parts of the copies, [S]; else None.
    """

    def __init__(
        self, buffer: FlatBuffer, group: dict[str, Any], expert: bool,
        eps_after_correction: bool = False,
    ) -> None:  # fmt: skip
        self.buffer = buffer
        self.eps_after_correction = eps_after_correction
        self.group = group
        self.expert = expert
        dtype = torch.float32 if buffer.data.dtype in _HALF else buffer.data.dtype
        self.exp_avg, self.exp_avg_sq = buffer.zeros(dtype), buffer.zeros(dtype)
        self.parts = [slice(0, len(buffer.data))]
        self._starts = [0]  # index of each part's first element in the moments
        self.masters: Tensor | None = None
        self._exchange: Exchange | None = None  # that of a sharded state
        self._whole: Gathered | None = None
        self._remainders: Remainders | None = None  # if parameters are split
        self._used = [True] * len(buffer.parameters)
        # Computed now, because the parameters are empty tensors while the buffer is lent.
        self._ends = [
            offset + p.numel() for offset, p in zip(buffer.offsets, buffer.parameters, strict=True)
        ]
        self.set_steps([0] * len(buffer.parameters))

    def moments(self) -> list[tuple[Tensor, ...]]:
        """Views of both moments of each parameter."""
        whole = (self.exp_avg, self.exp_avg_sq) if self._exchange is None else self._gathered()[:2]
        return list(zip(*(self.buffer.views(x) for x in whole), strict=True))

    def steps(self) -> list[int]:
        """Step count of each parameter; reads the device once per span."""
        if self._exchange is not None:
            return self._gathered().steps
        return self._own_steps()

    def _own_steps(self) -> list[int]:
        counts: list[int] = []
        for span in self.spans:
            counts += [int(span.steps.max())] * (span.last - span.first + 1)
        return counts

    def _gathered(self) -> Gathered:
        if self._whole is None:
            raise RuntimeError("the state of a sharded optimizer is read before gather()")
        return self._whole

    @torch.no_grad()
    def shard(self, exchange: Exchange, has_masters: bool) -> None:
        """Keep only the state of the parts that this rank updates. This cannot be undone.

        Afterwards `gather` before the state is read, and do not use `FlatAdam.step`.

        has_masters: the parameters are float32 copies of a model's. The other ranks' parts of these
            copies are freed as well. Until `gather` the parameters are empty tensors.
        """
        self.join()
        counts = self.steps()
        self._exchange = exchange
        self.parts = [exchange.ranks.own(piece) for piece in exchange.pieces]
        self._starts, end = [], 0
        for part in self.parts:
            self._starts.append(end)
            end += -(-(part.stop - part.start) // ALIGNMENT) * ALIGNMENT

        def kept(x: Tensor) -> Tensor:
            mine = x.new_zeros(end)
            for part, own in zip(self.parts, self._split(mine), strict=True):
                own.copy_(x[part])
            return mine

        self.exp_avg, self.exp_avg_sq = kept(self.exp_avg), kept(self.exp_avg_sq)
        if has_masters:
            self.masters = kept(self.buffer.lend())
        self.set_steps(counts)

    def _split(self, state: Tensor) -> list[Tensor]:
        """The parts of a vector [S]."""
        return [
            state[start : start + part.stop - part.start]
            for start, part in zip(self._starts, self.parts, strict=True)
        ]

    @torch.no_grad()
    def gather(self) -> None:
        """Gather sharded state in the host memory of rank 0; all ranks must call it.

        There the state and the float32 parameters can be read until `release`.
        """
        if self._exchange is None:
            return
        steps = torch.tensor(self._own_steps(), device=self.exp_avg.device)
        counts = self._exchange.ranks.largest(steps).tolist()
        first, second, masters = (
            None if x is None else self._exchange.whole(self._split(x))
            for x in (self.exp_avg, self.exp_avg_sq, self.masters)
        )
        if first is not None and second is not None:
            self._whole = Gathered(first, second, counts)
        if masters is not None:
            self.buffer.take_back(masters)

    def release(self) -> None:
        """Free what `gather` has gathered."""
        if self._whole is not None and self.masters is not None:
            self.buffer.lend()
        self._whole = None

    def set_steps(self, counts: list[int]) -> None:
        """Set the step count of each parameter."""
        self.spans: list[Span] = []
        for place, count in enumerate(counts):
            if place and counts[place - 1] == count:
                self.spans[-1].last = place
            else:
                steps = torch.full((len(self.parts),), count, device=self.exp_avg.device)
                self.spans.append(Span(place, place, steps))

    def due(self, used: list[bool]) -> list[Span]:
        """The spans of used parameters; a partly used span is split permanently."""
        if not all(used):
            self.spans = [piece for span in self.spans for piece in _cut(span, used)]
        return [span for span in self.spans if used[span.first]]

    def common(self, span: Span, place: int) -> tuple[slice, slice]:
        """The common elements of a span and a part: slices of the buffer and of the moments.

        The gaps between the span's parameters are included.
        """
        part = self.parts[place]
        start = max(self.buffer.offsets[span.first], part.start)
        stop = max(min(self._ends[span.last], part.stop), start)
        shift = self._starts[place] - part.start
        return slice(start, stop), slice(start + shift, stop + shift)

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """Let `update` skip these parameters, which have no gradient: no decay, no step."""
        unused = {id(p) for p in parameters}
        self._used = [id(p) not in unused for p in self.buffer.parameters]
        self.due(self._used)  # now, because a graph's capture cannot create new step counts

    @torch.no_grad()
    def split(self, low: Tensor) -> Tensor | None:
        """Store each fp32 parameter as its 16-bit remainder over the bf16 copy ``low``.

        An update then moves 2 bytes per parameter less. Until `join` the fp32 parameters cannot be
        read. Sharded parameters are not split.
        low: bfloat16 [N], laid out like the buffer.

        Returns memory that is free until `join`, see `Remainders.free`; None if all parameters are
        split already, or none is.

        `split` and `join` work block by block. If an error ends one of them (such as out of
        memory), nothing is lost: the next call of either one continues from that block.
        """
        if self._exchange is not None:
            return None
        if self._remainders is None:
            self._remainders = Remainders(self.buffer, low)
        return self._remainders.free if self._remainders.split() else None

    @torch.no_grad()
    def join(self) -> None:
        """Undo `split`: restore the float32 parameters. Call this before reading them."""
        if self._remainders is not None:
            self._remainders.join()
            self._remainders = None

    @torch.no_grad()
    def update(
        self, gradient: Tensor, low: Tensor | None, lr: Tensor, multiplier: Tensor, norm: Tensor,
        max_norm: float, clip_eps: float, updated: Callable[[int], None] = lambda place: None,
        cast: ops.WeightCast | None = None, used: list[bool] | None = None,
    ) -> None:  # fmt: skip
        """Update the parameters with scalars on the device; for CUDA graphs.

        One launch updates adjacent parameters with equal step counts. If the state is sharded, only
        this rank's part of each piece is updated.
        gradient: [N], laid out like the buffer. low: 16-bit copies of the parameters, which are
        updated too, or None. updated: called with a piece's index after the update of the piece.
        cast: low is cast to fp8, by the same launch if one launch updates all parameters and the
        gradient is bfloat16; None if the state is sharded.
        used: which parameters are updated; None: all but those of `leave_out`.
        The other arguments are those of ``ops.adam_step``.
        """
        group = self.group
        beta1, beta2 = group["betas"]
        spans = self.due(self._used if used is None else used)
        split, masters = self._remainders, self.masters
        for place in reversed(range(len(self.parts))):  # the next forward needs the last one first
            for span in spans:
                part, mine = self.common(span, place)
                if part.start == part.stop:
                    continue
                if masters is not None:
                    param = masters[mine]
                else:
                    param = (self.buffer.data if split is None else split.values)[part]
                copy = None if low is None else low[part]
                if param.dtype in _HALF:
                    param, copy = param.float(), param
                # With --fp32-reduce-scatter the gradient is float32.
                is_whole = part == slice(0, len(gradient)) and gradient.dtype == torch.bfloat16
                ops.adam_step(
                    param, self.exp_avg[mine], self.exp_avg_sq[mine], gradient[part], copy,
                    span.steps[place], lr, multiplier, norm, max_norm, clip_eps, beta1, beta2,
                    group["eps"], group["weight_decay"], cast if is_whole else None,
                    self.eps_after_correction,
                )  # fmt: skip
                cast = None if is_whole else cast
            updated(place)
        if cast is not None:
            assert low is not None
            ops.fp8_weights(low, cast)


class Remainders:
    """Stores float32 parameters as 16-bit remainders over their bfloat16 copies.

    The remainders overwrite the first half of the memory of the float32 parameters, which the
    buffer lends. Meanwhile the float32 parameters cannot be read.

    Args:
        low: bfloat16 [N], laid out like ``buffer``.

    Attributes:
        values: int16 [N], see ``ops.split_floats``.
        free: uint8, the other half of the memory; begins at a multiple of ``ALIGNMENT``. It may be
            written after `split` and until `join`.
    """

    def __init__(self, buffer: FlatBuffer, low: Tensor) -> None:
        self._buffer = buffer
        self._memory = buffer.lend()
        self.values = self._memory.view(torch.int16)[: len(low)]
        self.free = self._memory.view(torch.uint8)[
            -(-self.values.nbytes // ALIGNMENT) * ALIGNMENT :
        ]
        parts = (x.split(_BLOCK) for x in (self._memory, low, self.values))
        self._blocks = list(zip(*parts, strict=True))
        self._done = 0  # number of blocks that are split, counted from the first

    def split(self) -> bool:
        """Split the remaining blocks, first to last; returns whether there were any.

        The remainder of a block overwrites only blocks that have been read already.
        """
        is_new = self._done < len(self._blocks)
        while self._done < len(self._blocks):
            of_whole, of_low, of_values = self._blocks[self._done]
            of_values.copy_(ops.split_floats(of_whole, of_low))
            self._done += 1
        return is_new

    def join(self) -> None:
        """Restore the blocks, last to first, and then the buffer's parameters."""
        while self._done > 0:
            of_whole, of_low, of_values = self._blocks[self._done - 1]
            of_whole.copy_(ops.join_floats(of_low, of_values))
            self._done -= 1
        self._buffer.take_back(self._memory)


def _cut(span: Span, used: list[bool]) -> list[Span]:
    """Cut the span into pieces, each entirely used or entirely unused."""
    edges = [p for p in range(span.first + 1, span.last + 1) if used[p] != used[p - 1]]
    if not edges:
        return [span]
    firsts, lasts = [span.first, *edges], [*(p - 1 for p in edges), span.last]
    # Step counts are tensors; each piece needs its own, since the pieces are updated separately.
    return [Span(f, e, span.steps.clone()) for f, e in zip(firsts, lasts, strict=True)]
