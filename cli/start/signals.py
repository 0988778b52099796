"""SIGTERM and SIGUSR1 on their way from the process that has started the ranks to each of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SAME = 1.0  # seconds; a signal may be sent to a process, and to its group as well


class SpawnedRanks:
    """Ranks that ``torch.multiprocessing.spawn`` has started, if it has.

    Attributes:
        told: name of the first signal that has been sent on to them.
    """

    told: str | None = None

    def __init__(self) -> None:
        self._first = float("inf")  # when SIGTERM has come

    def tell(self, number: int, frame: Any) -> None:
        """Handler: ranks say what becomes of a signal, a second SIGTERM ends them at once.

        Without any, it ends this process.
        """
        children = multiprocessing.active_children()
        now = time.monotonic()
        is_second = number == signal.SIGTERM and now - self._first > _SAME
        if number == signal.SIGTERM:
            self._first = min(self._first, now)
        for child in children:
            if child.pid is not None:
                os.kill(child.pid, signal.SIGKILL if is_second else number)
        if children:
            self.told = self.told or signal.Signals(number).name
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextmanager
def sent_to_ranks() -> Iterator[SpawnedRanks]:
    """Within it, which is a training run, signals are sent on.

    A process that trains by itself handles them itself, see ``training.stopping``.
    """
    ranks = SpawnedRanks()
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, ranks.tell)
    try:
        yield ranks
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
