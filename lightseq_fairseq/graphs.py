"""Functions that run again and again on a GPU, as CUDA graphs: steps of training, of decoding."""

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

from lightseq_fairseq import library, ops
from lightseq_fairseq.errors import GPUHangs, is_out_of_memory

logger = logging.getLogger(__name__)

PATIENCE = 300.0  # seconds for a step before the GPU counts as hanging
_PATIENCE_WITH_OTHERS = 1800.0  # one of them may be writing a checkpoint
_BETWEEN_LOOKS = 1e-4  # seconds
MOST_GRAPHS = 256
_LARGEST_GRAPH = 64 << 20  # bytes; the rest of what goes meanwhile, other processes have taken
_GRAPH_MEMORY = 0.1  # of the GPU's memory: what graphs themselves, without their tensors, may take


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    result: Any


class Graphs:
    """Runs functions without arguments as CUDA graphs.

    The first time is plain: nothing is done twice, and libraries choose their algorithms then. A
    function for which they have chosen already is captured at once. Graphs and plain runs share one
    pool of memory, which they may since they run one after the other and leave only results in it.
    The least recently used graph goes when there are too many; each time that happens to a function
    it has to run plainly twice as often before it is captured again, since batches of too many
    shapes would else be captured over and over.

    Args:
        what: the functions, in a few words for the log.
    """

    def __init__(self, device: torch.device, what: str) -> None:
        self.device, self.what = device, what
        self._plain: Counter[Any] = Counter()  # plain runs since the graph went, by key
        self._needed: dict[Any, int] = {}  # so many before the next graph, once one has gone
        self._graphs: OrderedDict[Any, _Captured] = OrderedDict()
        self._why_not_captured = _why_not_captured(device)
        if self._why_not_captured:
            logger.info("%s are not captured: %s", what, self._why_not_captured)
        elif self._why_not_captured is None:
            self._begin()

    def _begin(self) -> None:
        self._pool = _Pool(self.device)
        self._stream = torch.cuda.Stream(self.device)
        self._memory = 0  # bytes of the graphs themselves
        self._told = 1  # the log is told when there are so many
        self._budget = int(_GRAPH_MEMORY * torch.cuda.mem_get_info(self.device)[1])
        torch.cuda.empty_cache()  # what is free elsewhere is no use to the pool

    def launch(self, key: Any, function: Callable[[], Any], is_prepared: bool = False) -> Any:
        """Run ``function``, or the graph of an earlier one with that key.

        is_prepared: libraries have nothing to choose any more.
        Returns what the function does; whatever runs next may write over it.
        """
        captured = self._graphs.get(key)
        if captured is not None:
            self._graphs.move_to_end(key)
        elif self._why_not_captured is None and self._plain[key] >= self._needed.get(
            key, not is_prepared
        ):
            captured = self._capture(key, function)
        if captured is None:
            self._plain[key] += 1
            return function() if self._why_not_captured is not None else self._run_plainly(function)
        captured.graph.replay()
        return captured.result

    def _run_plainly(self, function: Callable[[], Any]) -> Any:
        """On the stream of captures: to torch's allocator, free memory is that of one stream."""
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
            self._plain[oldest], self._needed[oldest] = 0, 2 * self._needed.get(oldest, 1)
        before = _used_outside_torch(self.device)
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph: that waits for the device and gives back the allocator's memory.
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
            self._why_not_captured = str(_cause(error)).partition("\n")[0]
            logger.warning("%s go on without CUDA graphs: %s", self.what, self._why_not_captured)
            return None
        taken = _used_outside_torch(self.device) - before
        self._memory += min(max(taken, 0), _LARGEST_GRAPH)
        captured = self._graphs[key] = _Captured(graph, result)
        count = len(self._graphs)
        if count >= self._told:
            self._told = 2 * count
            logger.info(
                "captured %d CUDA graphs of %s, which take %.2f of at most %.1f GiB", count,
                self.what, self._memory / 2**30, self._budget / 2**30,
            )  # fmt: skip
        return captured

    def _forget_failure(self) -> None:
        """End a capture for torch, where it remains underway once its stream refuses to end it."""
        with contextlib.suppress(RuntimeError):  # it has ended: what failed was something else
            # Until then the allocator keeps what other streams have used and empties no cache.
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool.id)
            torch._C._cuda_releasePool(self.device.index, self._pool.id)
        # Torch's generator of random numbers leaves a capture at the end of the next one.
        graph, something = torch.cuda.CUDAGraph(), torch.zeros(1, device=self.device)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            something.zero_()
            graph.capture_end()

    def clear(self) -> None:
        """Forget all graphs and give their memory back."""
        self._plain.clear()
        if self._why_not_captured is None:
            torch.cuda.synchronize(self.device)  # one of them may be running in the pool
            self._graphs.clear()
            self._begin()


class _Pool:
    """Memory of torch's allocator that graphs have to themselves, and what runs between them.

    Attributes:
        id: what ``capture_begin`` takes.
    """

    def __init__(self, device: torch.device) -> None:
        self.id = torch.cuda.graph_pool_handle()
        self._place = place = device.index, self.id
        # A pool ends with its last graph. This one stays: it begins with a use that lasts.
        torch._C._cuda_beginAllocateToPool(*place)
        torch._C._cuda_endAllocateToPool(*place)
        weakref.finalize(self, torch._C._cuda_releasePool, *place).atexit = False

    @contextlib.contextmanager
    def serves(self) -> Iterator[None]:
        """Within it all memory comes from here, which ``torch.cuda.use_mem_pool`` does for the
        calling thread alone: backward has another. Nothing that is cached elsewhere is given back.
        """
        torch._C._cuda_beginAllocateToPool(*self._place)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(*self._place)
            torch._C._cuda_releasePool(*self._place)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Nothing is collected meanwhile: to destroy another graph would end a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _cause(error: BaseException) -> BaseException:
    """What ended a capture. Of one that has failed, capture_end says no more than that.

    A function, since a variable would hold the exception, and with it, in a circle through its
    traceback, everything that lay on the GPU at that moment.
    """
    return error.__context__ or error


def wait_for(event: torch.cuda.Event) -> None:
    """Return when the GPU has passed ``event``.

    Other than ``event.synchronize`` it leaves the core to others, and ends by Ctrl-C or an error
    where the GPU hangs. Looks are counted, and no clock read: a process may be stopped meanwhile.

    Raises:
        GPUHangs: after ``PATIENCE`` seconds or somewhat more, half an hour beside other ranks.
    """
    patience = _PATIENCE_WITH_OTHERS if torch.distributed.is_initialized() else PATIENCE
    for _ in range(int(patience / _BETWEEN_LOOKS)):
        if event.query():
            return
        time.sleep(_BETWEEN_LOOKS)
    raise GPUHangs(patience)


def _why_not_captured(device: torch.device) -> str | None:
    """Why steps cannot be captured, in a few words; empty where nobody expects it."""
    if device.type != "cuda":
        return ""
    if os.environ.get("LIGHTSEQ_CAPTURE") == "0":
        return "LIGHTSEQ_CAPTURE=0"
    if os.environ.get("LIGHTSEQ_CHECK_INDICES") == "1":
        return "LIGHTSEQ_CHECK_INDICES=1 reads every index"
    missing = sorted(set(ops.REFERENCES) - set(library.load().kernels))
    return f"there is no kernel for {missing[0]} on this GPU" if missing else None


def _used_outside_torch(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))
