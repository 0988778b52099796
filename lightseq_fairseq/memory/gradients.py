"""The flat gradient, into which ops write in backward.

Shapes: N = elements of a buffer, including alignment gaps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.memory.parameters import FlatBuffer


class DirectGradients:
    """A flat gradient into which ops write in backward, so that autograd copies and adds nothing.

    In a backward pass, the first write to a parameter's gradient overwrites it and later ones add
    (a tied embedding has three). Gradients of ops that do not use `gradients_for` appear in
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
        # Addresses of the parameters whose next gradient is added, not copied; None: all.
        self._added: set[int] | None = None

    @contextmanager
    def write(self, accumulate: bool, part: str = "") -> Iterator[None]:
        """Let backward write into ``flat``.

        Args:
            accumulate: add to the existing values.
            part: name of the part of the model that is trained.

        Raises:
            RuntimeError: backward writes to a finished piece.
        """
        global _direct
        self._added = None if accumulate else set()
        self._due, self._seen = self._writes.get(part), Counter()
        self._open = set(range(len(self._pieces)))
        _direct = self
        ops.defer_column_sums(self.flat)
        try:
            yield
        except BaseException:
            ops.flush_column_sums(self.flat, wanted=False)
            for parameter in self.buffer.parameters:
                parameter.grad = None  # left by the unfinished backward pass
            raise
        finally:
            _direct = None
        ops.flush_column_sums(self.flat, wanted=True)
        for parameter in self.buffer.parameters:
            if parameter.grad is not None:
                view = self.view(parameter)
                view.add_(parameter.grad) if self.is_added(parameter) else view.copy_(
                    parameter.grad
                )
                parameter.grad = None
                self._count(parameter)
        self._finish(set(self._open))
        self._writes[part] = self._seen

    def holds(self, parameter: Tensor) -> bool:
        return 0 <= parameter.data_ptr() - self._start < self._bytes

    def view(self, parameter: Tensor) -> Tensor:
        """The part of ``flat`` for a parameter, or for neighbours that ``as_one`` has joined."""
        return self.flat.as_strided(parameter.shape, parameter.stride(), self._offset(parameter))

    def _offset(self, parameter: Tensor) -> int:
        return (parameter.data_ptr() - self._start) // parameter.element_size()

    def is_added(self, parameter: Tensor) -> bool:
        """Whether the next write must add. Marks the gradient as written: all later writes add."""
        if self._added is None or parameter.data_ptr() in self._added:
            return True
        self._added.add(parameter.data_ptr())
        return False

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
        start = self._offset(parameter)
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


_direct: DirectGradients | None = None


class Gradients(NamedTuple):
    """The tensors into which an op writes the gradients of some parameters.

    Attributes:
        tensors: one for each parameter, of its shape and dtype.
        accumulate: whether the op adds to them instead of overwriting them.
        parameters: whose gradients they are.
        direct: if they are views of a flat gradient, its owner; autograd then receives None.
    """

    tensors: list[Tensor]
    accumulate: bool
    parameters: tuple[Tensor, ...]
    direct: DirectGradients | None

    def handed(self, *parts: Tensor) -> tuple[Tensor | None, ...]:
        """Backward's results for autograd: ``parts`` (default ``tensors``), or None each if direct.

        Call it once, after the op.
        """
        parts = parts or tuple(self.tensors)
        if self.direct is None:
            return parts
        self.direct.written(self.parameters)
        return (None,) * len(parts)


def gradients_for(*parameters: Tensor) -> Gradients:
    """Where an op must write the gradients of ``parameters`` (also of results of ``as_one``).

    Inside `DirectGradients.write` this is the flat gradient; elsewhere new tensors for autograd.
    """
    direct = _direct
    if direct is None or not all(direct.holds(p) for p in parameters):
        return Gradients([torch.empty_like(p) for p in parameters], False, parameters, None)
    views = [direct.view(p) for p in parameters]
    added = [direct.is_added(p) for p in parameters]
    if any(added):
        for view, is_added in zip(views, added, strict=True):
            if not is_added:
                view.zero_()
    return Gradients(views, any(added), parameters, direct)
