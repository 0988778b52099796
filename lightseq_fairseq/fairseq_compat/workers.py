"""Ends the data loading processes when a command ends, also by an error.

After GPUHangs it does not end them: they end with their parent process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from lightseq_fairseq.errors import GPUHangs
from lightseq_fairseq.fairseq_compat import patching


@contextmanager
def no_workers_left() -> Iterator[None]:
    """At its end, the block ends the data loading workers that it has started.

    When a worker's iterator is freed, torch asks the worker to end, waits 5 s and then terminates
    it. If Python exits before that, multiprocessing sends SIGTERM once and waits without a limit.
    In training, a worker gets SIGKILL in place of SIGTERM (``training.stopping.launch``).
    """
    iterators: WeakSet[Any] = WeakSet()

    def begin(original: Callable[[Any, Any], None], iterator: Any, loader: Any) -> None:
        original(iterator, loader)
        iterators.add(iterator)

    try:
        with patching.within(
            "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter.__init__", begin
        ):
            yield
    except GPUHangs:
        iterators.clear()  # the thread that pins batches might never end
        raise
    finally:
        for iterator in list(iterators):
            iterator._shutdown_workers()


__all__ = ["no_workers_left"]
