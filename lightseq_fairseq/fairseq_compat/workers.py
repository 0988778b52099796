"""Starts the worker processes that load data, and ends them and fairseq's threads with the command.

After GPUHangs it does not end them: the processes end with their parent process.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any
from weakref import WeakSet

from lightseq_fairseq.base.errors import GPUHangs
from lightseq_fairseq.fairseq_compat import patching

# Seconds in which a thread must end. Only one whose worker process hangs does not.
_LAST_BATCH = 2.0


@contextmanager
def no_loading_left() -> Iterator[None]:
    """At its end, the block ends the loading of data that it has started, also after an error.

    - fairseq's threads that load batches ahead (its ``BackgroundConsumer``) end after the batch
      that they are loading. fairseq leaves them to Python's exit, and Python aborts if it ends
      while a thread runs torch code.
    - Worker processes: when a worker's iterator is freed, torch asks the worker to end, waits 5 s
      and then terminates it. If Python exits before that, multiprocessing sends SIGTERM once and
      waits without a limit. In training, a worker gets SIGKILL in place of SIGTERM
      (``training.stopping.launch``).
    """
    iterators: WeakSet[Any] = WeakSet()
    threads: WeakSet[Thread] = WeakSet()

    def begin(original: Callable[[Any, Any], None], iterator: Any, loader: Any) -> None:
        _leave_no_garbage()
        original(iterator, loader)
        iterators.add(iterator)

    def prepare(original: Callable[..., None], thread: Thread, *arguments: Any) -> None:
        original(thread, *arguments)
        threads.add(thread)

    try:
        with (
            patching.within(
                "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter.__init__", begin
            ),
            patching.within("fairseq.data.iterators:BackgroundConsumer.__init__", prepare),
        ):
            yield
    except GPUHangs:
        iterators.clear()  # the thread that pins batches might never end
        threads.clear()
        raise
    finally:
        left = list(iterators)  # else a thread that ends would free its own, and wait for workers
        _end(threads)
        for iterator in left:
            iterator._shutdown_workers()
        gc.unfreeze()


def _leave_no_garbage() -> None:
    """Collect garbage; then exclude the objects that are left, also in processes forked later.

    A worker process must never free an object that it has inherited. Such an object can be part of
    a reference cycle that nobody uses any more. For example, an error of omegaconf keeps the frames
    of the training step, and so a batch in pinned memory. If the worker's garbage collector freed
    it, torch would call CUDA in the forked process and abort.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _end(threads: WeakSet[Thread]) -> None:
    running: list[Any] = [thread for thread in threads if thread.is_alive()]
    for thread in running:
        thread._max_len = 0  # the number of batches after which it ends
        with thread._queue.mutex:
            thread._queue.maxsize = sys.maxsize  # the thread may be waiting for room
            thread._queue.not_full.notify_all()
    for thread in running:
        thread.join(_LAST_BATCH)
