"""The rows of a large step as two halves, which go through the layers beside each other.

Attention waits for memory while products compute, and each kernel for the one before it. What one
half leaves idle is the other's.

Letters: N rows, C model width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LEAST_ROWS = 512  # that are halved
_TIMED = 64  # csrc/common/matmul.h times algorithms for multiples of so many rows


def cut_in_two(rows: int, beam: int) -> int:
    """Where the second half begins; ``rows`` if they stay together.

    Slots, of ``beam`` rows, stay whole. Of their boundaries it is the one nearest to the middle
    that gives both halves numbers of rows for which products are timed, or else the nearest of all;
    a third of the rows is the least for a half.
    """
    if rows < LEAST_ROWS:
        return rows
    for unit in (math.lcm(beam, _TIMED), beam):
        cut = round(rows / 2 / unit) * unit
        if rows <= 3 * cut <= 2 * rows:
            return cut
    return rows


def run_halves(layers: Callable[..., tuple[Tensor, Any]], x: Tensor, cut: int) -> None:
    """Replace x [N, C] by ``layers(slice of rows)[0]``, of rows before ``cut`` and of the others.

    On a GPU the second half has a stream of its own, which forks off and joins again: a branch of
    the graph under capture. It begins when the first half calls ``record`` of what it gets as
    ``begun``; both would else have the same kernel at the same time, throughout.

    Neither stream reads what ``layers`` allocates on the other, where freed memory is used again at
    once.
    """
    upper, lower = slice(0, cut), slice(cut, len(x))
    if not x.is_cuda:
        for half in (upper, lower):
            x[half] = layers(half)[0]
        return
    stream, beside = torch.cuda.current_stream(x.device), _stream_beside(x.device)
    begun = torch.cuda.Event()
    x[upper] = layers(upper, begun=begun)[0]
    if not torch.cuda.is_current_stream_capturing():
        begun.record()  # products may be timed, and nothing is to run beside them then
    beside.wait_event(begun)
    try:
        with torch.cuda.stream(beside):
            x[lower] = layers(lower)[0]
    finally:  # after a failure, too: memory is freed then, and a capture ends
        stream.wait_stream(beside)


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """One for the steps of all decoders."""
    return torch.cuda.Stream(device)
