"""The collectives of an update: gradients, and with ``--zero-sharding os`` parameters, in pieces.

The flat buffers are divided into a few contiguous pieces. A piece of the gradient is sent as soon
as backward has finished it, on a stream of its own, while the captured graph still runs: the graph
records an event for each piece, and the collective waits for this event. Parameters are gathered
while the next forward runs, which waits for the event behind each collective before it reads the
piece. No collective is inside a graph, since in one update the ranks replay graphs of different
buckets.

The host starts the collectives when the whole backward has been launched. So a rank that runs out
of memory can start its backward again, and has sent nothing of the first one.

Shapes: N = elements of the flat buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from lightseq_fairseq.memory.gradients import DirectGradients
from lightseq_fairseq.memory.parameters import ALIGNMENT, FlatBuffer

# The parameters of a model are laid out in the order of its forward, so backward finishes the last
# ones first. The last piece to be finished is the smallest, since nothing hides its collective.
_CUTS = (2, 4, 8)  # the cuts are after 1/2, 1/4 and 1/8 of the parameters
_BLOCK = 1 << 22  # elements of each rank that `Exchange.whole` gathers at once

# New names in torch 2.13, which warns about the old ones.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Ranks:
    """The processes that train one model, each on its own batches.

    Attributes:
        count: number of ranks. All ranks run the same number of updates; a rank may have no batch.
        rank: index of this process.
        group: process group of ``torch.distributed``.
        widens: gradients of 16 bits are sent and summed as float32.
        sharded: each rank has the optimizer state of a part of the parameters, and updates only
            these (``--zero-sharding os``).
    """

    count: int = 1
    rank: int = 0
    group: Any = None
    widens: bool = False
    sharded: bool = False

    def add_up(self, x: Tensor) -> None:
        """All-reduce: replace ``x`` (any shape) on each rank by the sum over all ranks."""
        dist.all_reduce(x, group=self.group)

    def largest(self, x: Tensor) -> Tensor:
        """Replace ``x`` on each rank by the maximum over all ranks; returns it."""
        dist.all_reduce(x, dist.ReduceOp.MAX, self.group)
        return x

    def wait(self) -> None:
        """Barrier over all ranks."""
        if self.count > 1:
            dist.barrier(self.group)

    def pieces(self, buffer: FlatBuffer) -> list[slice]:
        """Slices that cover [N], in the order of their collectives; none for a single rank.

        They depend only on the layout and the number of ranks, so they are equal on all ranks. A
        cut is at the first parameter at or after a fraction of N (see `_CUTS`), rounded up to a
        multiple of ``count * ALIGNMENT``. With sharded state, the remainder of N by this multiple
        is a separate piece at the end, and all ranks update it.
        """
        if self.count == 1:
            return []
        size, multiple = len(buffer.data), self.count * ALIGNMENT
        most = size // multiple * multiple
        cuts = {0, size} | ({most} if self.sharded else set())
        for fraction in _CUTS:
            edge = next((x for x in buffer.offsets if x * fraction >= size), size)
            cuts.add(min(-(-edge // multiple) * multiple, most))
        return [slice(*ends) for ends in pairwise(sorted(cuts))][::-1]

    def shares(self, piece: slice) -> bool:
        """Whether each rank updates a part of a piece; otherwise each updates all of it."""
        return self.sharded and (piece.stop - piece.start) % (self.count * ALIGNMENT) == 0

    def own(self, piece: slice) -> slice:
        """The part of a piece that this rank updates."""
        if not self.shares(piece):
            return piece
        length = (piece.stop - piece.start) // self.count
        start = piece.start + self.rank * length
        return slice(start, start + length)


class Exchange:
    """Runs the collectives over the pieces of a model.

    Args:
        low: the buffer of the model's parameters.

    Attributes:
        pieces: see ``Ranks.pieces``.
        gradients: this rank's gradients, which backward writes.
        sum: [N], the gradient that the update reads. It is the memory of this rank's gradient,
            or with ``Ranks.widens`` a float32 copy of a 16-bit gradient. With sharded state only
            this rank's parts are sums.
    """

    def __init__(self, ranks: Ranks, low: FlatBuffer) -> None:
        self.ranks, self.pieces = ranks, ranks.pieces(low)
        # Not ``low.data``, which shares autograd's version of the first parameter: gloo's threads
        # write after forward has saved it.
        self._low = low.data.data
        self._stream: torch.cuda.Stream | None = None
        self._finished: list[torch.cuda.Event] = []
        # The places of the pieces that `gather` copies, in the order in which forward reads them.
        self._copied = [x for x, piece in enumerate(self.pieces) if ranks.shares(piece)][::-1]
        # Place -> what the reader of this piece waits for: an event, or on a CPU the collective.
        self._arrivals: dict[int, Any] = {}
        self._awaited = 0  # how many of them, in this order, the current forward has waited for
        if self._low.is_cuda and self.pieces:
            self._stream = torch.cuda.Stream(self._low.device)
            self._finished = [torch.cuda.Event(external=True) for _ in self.pieces]
            self.finish_all()  # an event is created when it is first recorded
            self._arrivals = {place: torch.cuda.Event(external=True) for place in self._copied}
            for event in self._arrivals.values():
                event.record()
        self.gradients = DirectGradients(low, self.pieces, self.finish)
        self.sum = gradient = self.gradients.flat
        if ranks.widens and gradient.element_size() == 2:
            self.sum = torch.zeros_like(gradient, dtype=torch.float32)

    def finish(self, place: int) -> None:
        """Record, in the current stream or its capture, that all work on a piece is launched."""
        if self._finished:
            self._finished[place].record()

    def finish_all(self) -> None:
        """As `finish`, for all pieces."""
        for place in range(len(self.pieces)):
            self.finish(place)

    def add_up(self) -> None:
        """Sum the gradients of all ranks, each piece after its last `finish`.

        The current stream waits for the sums.
        """
        ranks, gradient, works = self.ranks, self.gradients.flat, []
        for place, piece in enumerate(self.pieces):
            with self._after(place):
                x = self.sum[piece]
                if x.dtype != gradient.dtype:
                    x.copy_(gradient[piece])
                if ranks.shares(piece):
                    own = self.sum[ranks.own(piece)]
                    works.append(_reduce_scatter(own, x, group=ranks.group, async_op=True))
                else:
                    works.append(dist.all_reduce(x, group=ranks.group, async_op=True))
        for work in works:
            if work is not None:
                work.wait()

    def gather(self) -> None:
        """Start to copy the parts that each rank has updated to all ranks.

        Each piece is copied after its last `finish`: Adam has updated it, so no backward reads it
        any more. The next forward calls `begin_forward`; before anything else uses the parameters,
        call `wait`.
        """
        for place in self._copied:
            piece = self.pieces[place]
            with self._after(place):
                own = self._low[self.ranks.own(piece)]
                work = _all_gather(self._low[piece], own, group=self.ranks.group, async_op=True)
                if self._stream is None:
                    self._arrivals[place] = work
                else:
                    work.wait()  # the communication stream waits for NCCL's own
                    self._arrivals[place].record()

    @contextmanager
    def _after(self, place: int) -> Iterator[None]:
        """Launch on the communication stream, after the last `finish` of a piece."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._finished[place].wait(self._stream)
            yield

    def begin_forward(self) -> None:
        """Call it before a forward that waits by `wait_until` before it first reads a piece.

        A captured forward contains these waits. A replay waits for what `gather` has started
        before the launch of the replay.
        """
        self._awaited = 0

    def wait(self) -> None:
        """Let the current stream wait for all that `gather` has started."""
        self.begin_forward()
        self.wait_until(len(self._low))

    def wait_until(self, end: int) -> None:
        """As `wait`, but only for the pieces that begin before element ``end``.

        Pieces that this forward has waited for are skipped.
        """
        for place in list(self._arrivals)[self._awaited :]:
            if self.pieces[place].start >= end:
                break
            self._arrivals[place].wait()
            self._awaited += 1

    def squares(self, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """Sum of squares of this rank's parts of the summed gradient.

        norm: returns the L2 norm of a vector.
        Returns a float64 tensor []; its sum over the ranks is that of the whole gradient, since
        only rank 0 counts the pieces that all ranks update.
        """
        pieces = [p for p in self.pieces if self.ranks.shares(p) or self.ranks.rank == 0]
        norms = [norm(self.sum[self.ranks.own(piece)]).double() for piece in pieces]
        return torch.stack(norms).square().sum() if norms else self.sum.new_zeros(()).double()

    @torch.no_grad()
    def whole(self, parts: Sequence[Tensor]) -> Tensor | None:
        """Gather a sharded vector in the host memory of rank 0, in blocks; None on other ranks.

        parts: this rank's part of each piece. Returns [N].
        """
        ranks = self.ranks
        whole = torch.zeros(len(self._low), dtype=parts[0].dtype) if ranks.rank == 0 else None
        for piece, part in zip(self.pieces, parts, strict=True):
            for start in range(0, len(part), _BLOCK):
                blocks = [part[start : start + _BLOCK]]
                if ranks.shares(piece):
                    gathered = blocks[0].new_empty(ranks.count * len(blocks[0]))
                    _all_gather(gathered, blocks[0].contiguous(), group=ranks.group)
                    blocks = list(gathered.chunk(ranks.count))
                if whole is not None:
                    for rank, block in enumerate(blocks):
                        first = piece.start + rank * len(part) + start
                        whole[first : first + len(block)].copy_(block)
        return whole
