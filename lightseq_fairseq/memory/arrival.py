"""Waiting for parameters that other ranks are still sending while forward has begun.

Shapes: N = elements of a buffer, including alignment gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

_arriving: tuple[Tensor, Callable[[int], None]] | None = None


@contextmanager
def arriving(flat: Tensor, wait_until: Callable[[int], None]) -> Iterator[None]:
    """Run a forward on parameters that other ranks are still sending, see `wait_for`.

    Args:
        flat: [N], the memory of the parameters.
        wait_until: waits for the elements before an index. The last call, at the end of the
            forward, waits for all, so that backward reads without waits.
    """
    global _arriving
    _arriving = flat, wait_until
    try:
        yield
    finally:
        _arriving = None
    wait_until(len(flat))


def wait_for(*parameters: Tensor | None) -> None:
    """Wait until all ranks have sent these parameters; call it before a forward reads them.

    Outside `arriving` it does nothing. Tensors that are no parameters are ignored.
    """
    if _arriving is None:
        return
    flat, wait_until = _arriving
    start, itemsize = flat.data_ptr(), flat.element_size()
    ends = [(p.data_ptr() - start) // itemsize + p.numel() for p in parameters if p is not None]
    wait_until(max((end for end in ends if 0 < end <= len(flat)), default=0))
