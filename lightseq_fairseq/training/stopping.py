"""SIGTERM and SIGUSR1 end training after an update, with a checkpoint, on all ranks at once.

Batch systems send one of them before they end a job. It may come to one rank, or to each of them
during another update. So each rank adds what has come to it to the numbers that ranks sum up in
every update anyway, and all of them end after the update in which they read the same sum.
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
from typing import Any

from lightseq_fairseq.fairseq_compat import prepared  # noqa: F401  isort: skip

from fairseq import trainer as native
from torch.utils.data._utils import worker as _worker

from lightseq_fairseq.errors import StoppedBySignal

logger = logging.getLogger(__name__)

# What a signal adds to the sum over ranks, in which they are told apart.
_WORTH = {signal.SIGTERM: 1.0, signal.SIGUSR1: float(1 << 20)}
_SAME = 1.0  # seconds; a signal may be sent to a process, and to its group as well


class Stopping:
    """What has come to this process, and what the ranks have agreed on.

    Attributes:
        reason: the signal by which training ends with the update that is under way, or None.
    """

    def __init__(self) -> None:
        self.reason: signal.Signals | None = None
        self._received: dict[int, float] = {}  # signal -> when
        self._before: dict[int, Any] = {}  # handlers
        self._process = 0

    @contextmanager
    def handled(self) -> Iterator[None]:
        """A training run; afterwards signals do what they did before it.

        Until `begin` they end the process, as there is nothing to save.

        Raises:
            StoppedBySignal: at the end, if that was the reason.
        """
        vars(self).update(vars(Stopping()))
        try:
            self._handle(signal.SIG_DFL)
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)
        if self.reason is not None:
            if multiprocessing.parent_process() is not None:
                # A rank that was spawned, which its parent ends when it sees the first one end.
                self._handle(signal.SIG_IGN)
            raise StoppedBySignal(self.reason.name)

    def begin(self, checkpoints: Any) -> None:
        """From now on an update is finished and saved; ``checkpoints``: fairseq's settings."""
        if not checkpoints.no_save and not checkpoints.no_last_checkpoints:
            self._handle(self._receive)

    def _handle(self, handler: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # where Python allows it to nobody else
        self._process = os.getpid()
        for number in _WORTH:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before = signal.signal(number, handler)
                self._before.setdefault(number, before)

    def _receive(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        first = self._received.setdefault(number, now)
        is_ours = os.getpid() == self._process  # and not of a child that has inherited this
        # A spawned rank gets what its parent gets, and perhaps learns of it a long product later:
        # whether a signal is a second one its parent decides, which waits for nothing.
        is_second = now - first > _SAME and multiprocessing.parent_process() is None
        if number == signal.SIGTERM and (is_second or not is_ours):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def worth(self) -> float:
        """What this rank adds to the sum."""
        return sum(_WORTH[signal.Signals(number)] for number in self._received)

    def agree(self, total: float) -> None:
        """``total``: the sum over the ranks, which all of them read after the same update."""
        if total and self.reason is None:
            is_term = total % _WORTH[signal.SIGUSR1] > 0
            self.reason = signal.SIGTERM if is_term else signal.SIGUSR1
            logger.info("%s: training ends with this update", self.reason.name)


STOPPING = Stopping()  # of this process

_load_batches = _worker._worker_loop


def load_batches(*arguments: Any) -> None:
    """torch's loop of a process that loads data, which only the process it loads them for ends.

    Batch systems send signals to all processes of a job, and training needs batches to its end.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _WORTH)  # as `launch` has done
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _load_batches(*arguments)


def launch(original: Callable[[Any, Any], None], popen: Any, process: Any) -> None:
    """multiprocessing's ``Popen._launch``; a child that loads data begins with signals blocked.

    It may have threads before it comes to `load_batches` (a spawned one, of a spawned rank, has
    those of numpy), and a signal finds whichever thread does not block it.
    """
    if process._target is not load_batches:
        return original(popen, process)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WORTH)
    try:
        original(popen, process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    while signal.sigwaitinfo(_WORTH).si_pid != os.getppid():
        pass
    os._exit(0)


class StoppableTrainer(native.Trainer):
    """``fairseq.trainer.Trainer`` whose ranks agree on signals."""

    def begin_epoch(self, epoch: int) -> None:
        """Called before the first update of an epoch."""
        super().begin_epoch(epoch)
        STOPPING.begin(self.cfg.checkpoint)

    def train_step(self, samples: Any, raise_oom: bool = False) -> Any:
        """One update; see ``fairseq.trainer.Trainer.train_step``."""
        output = super().train_step(samples, raise_oom)
        if self.data_parallel_world_size == 1:
            STOPPING.agree(STOPPING.worth())
        return output

    def _aggregate_logging_outputs(self, outputs: Any, *sums: Any, ignore: bool = False) -> Any:
        outputs, sums = super()._aggregate_logging_outputs(
            outputs, *sums, STOPPING.worth(), ignore=ignore
        )
        STOPPING.agree(float(sums[-1]))
        return outputs, sums[:-1]


__all__ = ["STOPPING", "StoppableTrainer", "Stopping", "launch", "load_batches"]
