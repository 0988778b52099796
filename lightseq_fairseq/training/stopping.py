"""Signals end training after an update, with a checkpoint, on all ranks together.

Ctrl-C sends SIGINT. Batch systems send SIGTERM or SIGUSR1 before they end a job. A signal may reach
only one rank, or reach the ranks during different updates. So each rank encodes its received
signals as a number. These numbers are summed over the ranks in every update, and with every batch
of validation. All ranks read the same sum and stop after the same update.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import proxy

from torch.utils.data._utils import worker as _worker

from lightseq_fairseq.base import signals
from lightseq_fairseq.base.errors import StoppedBySignal

logger = logging.getLogger(__name__)

# The code of each signal. The ranks add up the codes; the sum shows which signals were received.
_CODES = {signal.SIGTERM: 1.0, signal.SIGINT: float(1 << 10), signal.SIGUSR1: float(1 << 20)}


class ReceivedSignals:
    """The signals this process has received, and the one on which the ranks have agreed.

    Attributes:
        reason: the signal because of which training ends with the current update, or None.
    """

    def __init__(self) -> None:
        self.reason: signal.Signals | None = None
        self._received: dict[int, float] = {}  # signal -> time of its first arrival
        self._before: dict[int, Any] = {}  # signal -> handler before `handled`
        self._process = 0

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals during a training run; afterwards restore the previous handlers.

        Until `begin`, a signal ends the process: there is nothing to save yet.

        Raises:
            StoppedBySignal: at the end, if a signal ended training.
        """
        vars(self).update(vars(ReceivedSignals()))
        try:
            self._handle(None)
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)
        if self.reason is not None:
            if multiprocessing.parent_process() is not None:
                # This is a spawned rank. Its parent sends SIGTERM to all ranks when one ends.
                self._handle(signal.SIG_IGN)
            raise StoppedBySignal(self.reason.name)

    def begin(self, checkpoints: Any) -> None:
        """From now on, a signal lets the update finish and a checkpoint be saved.

        If fairseq's settings ``checkpoints`` write no last checkpoint, a signal still ends the
        process.
        """
        if not checkpoints.no_save and not checkpoints.no_last_checkpoints:
            self._handle(self._receive)

    def _handle(self, handler: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows signal handlers to be set only in the main thread
        self._process = os.getpid()
        for number in _CODES:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before = signal.signal(number, handler or signals.usual(number))
                self._before.setdefault(number, before)

    def _receive(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        first = self._received.setdefault(number, now)
        is_ours = os.getpid() == self._process  # False in a forked child, which inherits handlers
        # A spawned rank leaves both to its parent, which only waits: it gets the same signals,
        # but Python may run its handler much later, after a long computation.
        is_alone = multiprocessing.parent_process() is None
        is_second = is_alone and now - first > signals.SAME
        if number in signals.AT_ONCE and (is_second or not is_ours):
            signal.signal(number, signals.usual(number))
            os.kill(os.getpid(), number)
        elif is_alone and first == now:
            signals.tell_user(number)

    def signal_code(self) -> float:
        """The sum of the codes of the signals that this rank has received."""
        received = tuple(self._received)  # at once: the handler may add a signal at any time
        return sum(_CODES[signal.Signals(number)] for number in received)

    def agree(self, total: float) -> None:
        """Set ``reason`` from ``total``, the sum of the ranks' codes: all ranks have the same."""
        if total and self.reason is None:
            # Less than 1024 ranks add up each code, so a sum of lower codes is below the next one.
            received = [number for number, code in _CODES.items() if total % (code * 1024) >= code]
            self.reason = received[0]
            logger.info("%s received: training ends with this update", self.reason.name)


STOPPING = ReceivedSignals()  # one per process

_load_batches = _worker._worker_loop


def load_batches(*arguments: Any) -> None:
    """torch's loop of a data loading worker, which blocks the signals that end training.

    The worker ends with its parent process.

    Batch systems send signals to all processes of a job, but training needs its workers until it
    ends.
    """
    # Blocks them again, because `launch` does not wrap the start method forkserver.
    signal.pthread_sigmask(signal.SIG_BLOCK, _CODES)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _load_batches(*arguments)


def launch(original: Callable[[Any, Any], None], popen: Any, process: Any) -> None:
    """multiprocessing's ``Popen._launch``; a data loading worker starts with signals blocked.

    A worker may have threads before it reaches `load_batches` (numpy starts some in a spawned
    worker), and a signal is delivered to any thread that does not block it. Threads inherit the
    mask, so blocking before the start covers them. Only SIGKILL ends a worker that blocks SIGTERM,
    so ``terminate`` sends SIGKILL.
    """
    if process._target is not load_batches:
        return original(popen, process)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _CODES)
    try:
        original(popen, process)
        popen.terminate = partial(type(popen).kill, proxy(popen))  # no reference cycle
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    # torch's own check compares process ids of the parent: if the parent has already ended when
    # torch first reads the id, the worker runs forever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)
