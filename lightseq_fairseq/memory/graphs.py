"""Capture and replay of CUDA graphs for functions that run many times: training, decoding steps."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from lightseq_fairseq import ops
from lightseq_fairseq.base import library
from lightseq_fairseq.base.errors import GPUHangs, is_out_of_memory

logger = logging.getLogger(__name__)

PATIENCE = 300.0  # seconds that a step may take before the GPU counts as hung
_PATIENCE_WITH_OTHERS = 1800.0  # with several ranks: another one may be writing a checkpoint
_BETWEEN_LOOKS = 1e-4  # seconds between two polls of an event
MOST_GRAPHS = 256
_LARGEST_GRAPH = 64 << 20  # bytes; lost free memory beyond it is attributed to other processes
_GRAPH_MEMORY = 0.1  # fraction of GPU memory for the graphs themselves, without their tensors


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    result: Any


class Graphs:
    """Runs functions without arguments, and replays them as CUDA graphs.

    The first run of a key is eager. It is an ordinary run, not a warm-up: its result is used, and
    libraries search their algorithms in it. If this search is done already, the first run is
    captured. Graphs and eager runs never overlap, and each may overwrite the results of the one
    before, so they share one memory pool.

    If there are too many graphs, the least recently used one is dropped (LRU). Each time this
    happens to a key, the key needs twice as many eager runs before it is captured again. Otherwise
    batches with too many different shapes would be captured again and again.

    Args:
        what: a short name of the functions, for the log.
    """

    def __init__(self, device: torch.device, what: str) -> None:
        self.device, self.what = device, what
        self._eager_runs: Counter[Any] = Counter()  # key -> eager runs since its graph was dropped
        self._needed: dict[Any, int] = {}  # key -> eager runs needed before it is captured again
        self._graphs: OrderedDict[Any, _Captured] = OrderedDict()
        reason = why_not_captured(device)
        self._captures = reason is None
        if self._captures:
            self._begin()
        elif device.type == "cuda":
            logger.info("%s run without CUDA graphs: %s", what, reason)

    def _begin(self) -> None:
        self._pool = _Pool(self.device)
        self._stream = torch.cuda.Stream(self.device)
        self._memory = 0  # bytes of the graphs themselves
        self._next_log = 1  # number of graphs at which the next log line is written
        self._budget = int(_GRAPH_MEMORY * torch.cuda.mem_get_info(self.device)[1])
        torch.cuda.empty_cache()  # the pool cannot use memory cached in other pools

    def launch(self, key: Any, function: Callable[[], Any], is_prepared: bool = False) -> Any:
        """Run ``function``, or replay the graph captured for ``key``.

        is_prepared: libraries have already searched their algorithms for this key, so it may be
        captured at its first run.

        Returns the result of ``function``; the next run may overwrite it.
        """
        captured = self._graphs.get(key)
        if captured is not None:
            self._graphs.move_to_end(key)
        elif self._captures:
            if self._eager_runs[key] < self._needed.get(key, not is_prepared):
                self._eager_runs[key] += 1
                return self._run_eagerly(function)
            captured = self._capture(key, function)
        if captured is None:
            return function()
        captured.graph.replay()
        return captured.result

    def _run_eagerly(self, function: Callable[[], Any]) -> Any:
        """Run eagerly on the capture stream: torch's allocator reuses memory within a stream only.

        Eager runs and graphs then share free memory.
        """
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), self._pool.serves():
            result = function()
        current.wait_stream(self._stream)
        return result

    def _capture(self, key: Any, function: Callable[[], Any]) -> _Captured | None:
        while len(self._graphs) >= MOST_GRAPHS or (self._graphs and self._memory > self._budget):
            self._memory -= self._memory // len(self._graphs)
            oldest, _ = self._graphs.popitem(last=False)
            self._eager_runs[oldest], self._needed[oldest] = 0, 2 * self._needed.get(oldest, 1)
        before = _used_outside_torch(self.device)
        graph = torch.cuda.CUDAGraph()
        # Do not use torch.cuda.graph: it synchronizes the device and empties the allocator's cache.
        try:
            with torch.cuda.stream(self._stream), _without_garbage_collection():
                graph.capture_begin(self._pool.id, capture_error_mode="thread_local")
                try:
                    result = function()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self._forget_failure()
            if not isinstance(_cause(error), RuntimeError) or is_out_of_memory(_cause(error)):
                raise _cause(error) from None
            self._captures = False
            reason = str(_cause(error)).partition("\n")[0]
            logger.warning("%s continue without CUDA graphs: %s", self.what, reason)
            return None
        taken = _used_outside_torch(self.device) - before
        self._memory += min(max(taken, 0), _LARGEST_GRAPH)
        captured = self._graphs[key] = _Captured(graph, result)
        count = len(self._graphs)
        if count >= self._next_log:
            self._next_log = 2 * count
            logger.info(
                "captured %d CUDA graphs of %s, which take %.2f of at most %.1f GiB", count,
                self.what, self._memory / 2**30, self._budget / 2**30,
            )  # fmt: skip
        return captured

    def _forget_failure(self) -> None:
        """Clean up torch's capture state after a failed capture, which torch does not do itself."""
        with contextlib.suppress(RuntimeError):  # raised if torch has ended the capture itself
            # During a capture the allocator holds back memory that other streams have used, and
            # empties no cache.
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool.id)
            torch._C._cuda_releasePool(self.device.index, self._pool.id)
        # torch's random generator leaves capture mode only at the end of the next capture.
        graph, something = torch.cuda.CUDAGraph(), torch.zeros(1, device=self.device)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            something.zero_()
            graph.capture_end()

    def clear(self) -> None:
        """Drop all graphs and free their memory."""
        self._eager_runs.clear()
        if self._captures:
            torch.cuda.synchronize(self.device)  # a graph that uses the pool may still be running
            self._graphs.clear()
            self._begin()


class _Pool:
    """A private pool of torch's allocator, for graphs and the eager runs between them.

    Attributes:
        id: the pool's handle, for ``capture_begin``.
    """

    def __init__(self, device: torch.device) -> None:
        self.id = torch.cuda.graph_pool_handle()
        self._place = place = device.index, self.id
        # torch frees a pool with its last graph. This first use counts as well and is not released
        # until this object is destroyed, so the pool lives that long.
        torch._C._cuda_beginAllocateToPool(*place)
        torch._C._cuda_endAllocateToPool(*place)
        weakref.finalize(self, torch._C._cuda_releasePool, *place).atexit = False

    @contextlib.contextmanager
    def serves(self) -> Iterator[None]:
        """Allocate all device memory from this pool while the context is active.

        ``torch.cuda.use_mem_pool`` does this for the calling thread only, but backward runs in
        another thread. Meanwhile torch does not free memory that it has cached outside this pool.
        """
        torch._C._cuda_beginAllocateToPool(*self._place)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(*self._place)
            torch._C._cuda_releasePool(*self._place)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: destroying another graph would make the capture fail."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _cause(error: BaseException) -> BaseException:
    """The original error of a failed capture; capture_end reports only that the capture failed.

    This is a function because a local variable would keep the exception alive, by a reference cycle
    through its traceback, and with it all GPU tensors of that moment.
    """
    return error.__context__ or error


def wait_for(event: torch.cuda.Event) -> None:
    """Wait until the GPU has passed ``event``.

    Unlike ``event.synchronize``, this does not occupy the CPU core, can be interrupted by Ctrl-C,
    and raises an error if the GPU hangs. It counts polls instead of reading a clock, so that time
    during which the process is stopped does not count.

    Raises:
        GPUHangs: after at least ``PATIENCE`` seconds, with several ranks 30 minutes. It may be up
            to twice as long, because a sleep lasts longer than requested.
    """
    patience = _PATIENCE_WITH_OTHERS if torch.distributed.is_initialized() else PATIENCE
    for _ in range(int(patience / _BETWEEN_LOOKS)):
        if event.query():
            return
        time.sleep(_BETWEEN_LOOKS)
    raise GPUHangs(patience)


def why_not_captured(device: torch.device) -> str | None:
    """Why steps cannot be captured, in a few words; None if they can be captured."""
    if device.type != "cuda":
        return "CUDA graphs need a GPU"
    if os.environ.get("LIGHTSEQ_CAPTURE") == "0":
        return "LIGHTSEQ_CAPTURE=0"
    if os.environ.get("LIGHTSEQ_CHECK_INDICES") == "1":
        return "LIGHTSEQ_CHECK_INDICES=1 checks every index"
    missing = sorted(set(ops.REFERENCES) - set(library.load().kernels))
    return f"there is no kernel for {missing[0]} on this GPU" if missing else None


def _used_outside_torch(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))
