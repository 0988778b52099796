"""What surrounds a forward and backward pass of a training step; the layers ask it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from lightseq_fairseq.memory.fp8 import OFF, NoFp8
from lightseq_fairseq.memory.gradients import DirectGradients, Gradients


class Pass:
    """The current pass, from `entered` on; outside of it, nothing of this is used.

    Args:
        gradients: receives the gradients of parameters.
        fp8: the products that are computed in fp8.
        wait_until: other ranks are still sending parameters when forward begins; waits for the
            elements of their buffer before an index. It needs ``gradients``.
    """

    def __init__(
        self, gradients: DirectGradients | None = None, fp8: NoFp8 = OFF,
        wait_until: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        self.direct, self.fp8, self._wait_until = gradients, fp8, wait_until

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let the layers use all this, for the forward and the backward pass."""
        global _current
        _current = self
        try:
            with self.fp8.counting():
                yield
        finally:
            _current = _NOTHING

    def gradients(self) -> Gradients:
        """Where the backward pass of a node writes the gradients of its parameters."""
        return Gradients(self.direct)

    def wait_for(self, parameters: Iterable[Tensor]) -> None:
        """Wait until all ranks have sent these parameters; call it before a forward reads them.

        Tensors that are no parameters are ignored.
        """
        if self._wait_until is not None and self.direct is not None:
            read = [p for p in parameters if self.direct.holds(p)]
            self._wait_until(max((self.direct.offset(p) + p.numel() for p in read), default=0))

    def end_forward(self) -> None:
        """Wait for all parameters, so that backward reads without waits."""
        if self._wait_until is not None and self.direct is not None:
            self._wait_until(len(self.direct.flat))
            self._wait_until = None


_NOTHING = _current = Pass()


def current() -> Pass:
    """The pass that is entered."""
    return _current
