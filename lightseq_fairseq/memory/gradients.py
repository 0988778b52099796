"""The flat gradient, into which ops write in backward.

Shapes: N = elements of a buffer, including alignment gaps.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.memory.parameters import FlatBuffer, read_as_one
from lightseq_fairseq.ops.numerics import store_gradient


class DirectGradients:
    """A flat gradient into which ops write in backward, so that autograd copies and adds nothing.

    In a backward pass, the first write to a parameter's gradient overwrites it and later ones add
    (a tied embedding has three). Gradients of ops that do not use `Gradients` appear in
    ``.grad`` as usual; `write` moves them into ``flat`` at its end.

    A piece of ``flat`` is finished when the backward pass writes to it no more. The number of
    writes depends only on the part of the model that is trained, not on the batch. So the first
    backward pass of a part counts them, and finishes all pieces at its end.

    Args:
        pieces: slices of [N].
        finished: called once for each piece in a backward pass, with the index of the piece, after
            the work that finishes it was launched on the current stream.

    Attributes:
        flat: [N], the gradient, with the layout and dtype of the parameters.
    """

    def __init__(
        self,
        buffer: FlatBuffer,
        pieces: Sequence[slice] = (),
        finished: Callable[[int], None] = lambda place: None,
    ) -> None:
        self.buffer = buffer
        self.flat = buffer.zeros()
        self._pieces, self._finished = pieces, finished
        self._writes: dict[str, Counter[int]] = {}  # part -> index of a piece -> writes
        self._due: Counter[int] | None = None  # the writes of the current part, if known
        self._seen: Counter[int] = Counter()  # the writes of this backward pass so far
        self._open: set[int] = set()  # the pieces that are not finished
        self._start = buffer.data.data_ptr()
        self._bytes = buffer.data.numel() * buffer.data.element_size()
        # Address -> bytes of the parameters whose next gradient is added, not copied; None: all.
        self._added: dict[int, int] | None = None

    @contextmanager
    def write(self, accumulate: bool, part: str = "") -> Iterator[None]:
        """Let backward write into ``flat``.

        Args:
            accumulate: add to the existing values.
            part: name of the part of the model that is trained.

        Raises:
            RuntimeError: backward writes to a finished piece.
        """
        self._added = None if accumulate else {}
        self._due, self._seen = self._writes.get(part), Counter()
        self._open = set(range(len(self._pieces)))
        ops.defer_column_sums(self.flat)
        try:
            yield
        except BaseException:
            ops.flush_column_sums(self.flat, wanted=False)
            for parameter in self.buffer.parameters:
                parameter.grad = None  # left by the unfinished backward pass
            raise
        ops.flush_column_sums(self.flat, wanted=True)
        for parameter in self.buffer.parameters:
            if parameter.grad is not None:
                accumulate = self.is_added(parameter)
                store_gradient(self.view(parameter), parameter.grad, accumulate)
                parameter.grad = None
                self._count(parameter)
        self._finish(set(self._open))
        self._writes[part] = self._seen

    def holds(self, parameter: Tensor) -> bool:
        return 0 <= parameter.data_ptr() - self._start < self._bytes

    def view(self, parameter: Tensor) -> Tensor:
        """The part of ``flat`` for a parameter, or for neighbours that ``as_one`` has joined."""
        return self.flat.as_strided(parameter.shape, parameter.stride(), self.offset(parameter))

    def offset(self, parameter: Tensor) -> int:
        """Index of a parameter's first element in ``flat``."""
        return (parameter.data_ptr() - self._start) // parameter.element_size()

    def is_added(self, parameter: Tensor) -> bool:
        """Whether the next write must add. Marks the gradient as written: all later writes add."""
        if self._added is None or parameter.data_ptr() in self._added:
            return True
        self._added[parameter.data_ptr()] = parameter.numel() * parameter.element_size()
        return False

    def unwritten(self) -> list[Tensor]:
        """The parameters whose gradient the last backward pass, which added to nothing, has not
        written."""
        assert self._added is not None
        written = sorted((start, start + size) for start, size in self._added.items())
        starts = [start for start, _ in written]

        def is_written(address: int) -> bool:
            place = bisect.bisect_right(starts, address) - 1
            return place >= 0 and address < written[place][1]

        return [p for p in self.buffer.parameters if not is_written(p.data_ptr())]

    def written(self, parameters: Iterable[Tensor]) -> None:
        """Record that the ops which write these parameters' gradients have been launched."""
        for parameter in parameters:
            self._count(parameter)
        if self._due is None:
            return
        last = {place for place in self._open if self._seen[place] == self._due[place]}
        if last:
            ops.flush_column_sums(self.flat, wanted=True)
            ops.defer_column_sums(self.flat)
            self._finish(last)

    def _count(self, parameter: Tensor) -> None:
        start = self.offset(parameter)
        end = start + parameter.numel()
        for place, piece in enumerate(self._pieces):
            if start < piece.stop and piece.start < end:
                if place not in self._open:
                    raise RuntimeError(
                        "lightseq: this backward pass wrote a gradient more often than the first"
                    )
                self._seen[place] += 1

    def _finish(self, places: set[int]) -> None:
        for place in sorted(places):
            self._open.remove(place)
            self._finished(place)


class Gradients:
    """The gradients of parameters in the backward pass of one node.

    Args:
        direct: a flat gradient that receives those of its parameters; autograd gets the others.
    """

    def __init__(self, direct: DirectGradients | None) -> None:
        self._direct = direct
        self._new: dict[int, Tensor] = {}  # id of a parameter -> its gradient, for autograd

    @contextmanager
    def of(
        self, *groups: Sequence[Tensor], spared: bool = False
    ) -> Iterator[tuple[list[Tensor | None], bool]]:
        """Tensors into which one op writes gradients, and whether it adds to them.

        Args:
            groups: parameters that the op reads as one, see ``parameters.read_as_one``. The op
                writes one tensor for each group, within the block; None for a group that is empty
                or frozen.
            spared: the op reads each of them with its spare rows.
        """
        groups = tuple(group if _is_trained(group) else () for group in groups)
        given = [group for group in groups if group]
        wholes = [read_as_one(group, spared) for group in given]
        direct = self._direct

        def for_groups(tensors: Sequence[Tensor]) -> list[Tensor | None]:
            left = iter(tensors)
            return [next(left) if group else None for group in groups]

        if direct is not None and all(map(direct.holds, wholes)):
            views = [direct.view(whole) for whole in wholes]
            added = [direct.is_added(whole) for whole in wholes]
            if any(added):
                for view, is_added in zip(views, added, strict=True):
                    if not is_added:
                        view.zero_()
            yield for_groups(views), any(added)
            direct.written(wholes)
            return
        new = [torch.empty_like(whole) for whole in wholes]
        yield for_groups(new), False
        for group, gradient in zip(given, new, strict=True):
            rows = [len(parameter) for parameter in group]
            parts = gradient[: sum(rows)].split(rows) if len(gradient) > rows[0] else [gradient]
            for parameter, part in zip(group, parts, strict=True):
                before = self._new.get(id(parameter))  # a layer may occur twice in a stack
                self._new[id(parameter)] = part if before is None else before + part

    def for_autograd(self, parameter: Tensor) -> Tensor | None:
        """What autograd gets as the gradient of a parameter; call it once for each."""
        # Not kept here: autograd copies a gradient to which others refer.
        return self._new.pop(id(parameter), None)


def _is_trained(parameters: Iterable[Tensor]) -> bool:
    return any(parameter.requires_grad for parameter in parameters)
