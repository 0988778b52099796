"""Forwards SIGTERM and SIGUSR1 from the process that spawned the ranks to each rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Seconds in which a second SIGTERM counts as the first: it may go to the process and to its group.
_SAME = 1.0


class SpawnedRanks:
    """The ranks that ``torch.multiprocessing.spawn`` has started, if any.

    Attributes:
        told: name of the first signal that was forwarded to them.
    """

    told: str | None = None

    def __init__(self) -> None:
        self._first = float("inf")  # time of the first SIGTERM

    def tell(self, number: int, frame: Any) -> None:
        """Signal handler: forwards the signal to the ranks; a second SIGTERM kills them at once.

        Without ranks the signal ends this process.
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
    """Within the block, a training run, signals are forwarded to spawned ranks.

    A process that trains itself replaces this handler by its own, see ``training.stopping``.
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
