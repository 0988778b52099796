"""Several ranks: each one says when another one is silent, or does not come.

A rank that has stopped keeps all others waiting in the next exchange of gradients, for minutes and
without a word. So each counts up a number in the store in which the ranks have met, by a thread,
and looks whether the numbers of others go up.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)

SILENCE = 30.0  # seconds; a rank that is silent for longer is reported
_BEAT = 5.0  # seconds between two looks
_LAST_WORDS = 5.0  # seconds that the end of a thread may take
_NEIGHBOURS = 8  # ranks that one watches: enough where a machine's stop at once, few for the store
_HAS_LEFT = 1 << 40  # what a rank adds to its number in the end, beyond all counting


@contextmanager
def reported(
    what: str,
    look: Callable[[], None],
    every: float = _BEAT,
    last: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Within it ``look`` is called now and then by a thread, which calls ``last`` when it ends.

    The thread is waited for, as Python aborts where it ends while torch's code runs in one; but not
    for long, as what it asks may never be answered.
    """
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(every):
            look()
        if last is not None:
            last()

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_LAST_WORDS)


@contextmanager
def waiting_for_all(rank: int, count: int) -> Iterator[None]:
    """Within it, which is the meeting of all ranks, the log says what is waited for.

    torch waits without a look at Python, whose handlers of signals would not be called: so signals
    end the process, as they do before training in any case.
    """
    began = time.monotonic()
    told = 1

    def look() -> None:
        nonlocal told
        waited = time.monotonic() - began
        if waited > told * SILENCE:
            told *= 2
            logger.warning(
                "rank %d has waited %.0f seconds for the others: %d have to start, with the same "
                "--distributed-init-method or MASTER_ADDR and MASTER_PORT; one that has ended says "
                "why in its own log", rank, waited, count,
            )  # fmt: skip

    with reported("meeting", look), _signals_that_end():
        yield


@contextmanager
def _signals_that_end() -> Iterator[None]:
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def watched() -> Iterator[None]:
    """Within it the log says when another rank has been silent, and when it is back.

    To be entered by all ranks once they have met; for one process nothing happens.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        yield
        return
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    # A connection of its own: what waits in the other one would make this one wait, too.
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    store = store.clone()
    watch = Watch(torch.distributed.PrefixStore("alive", store), rank, count)
    with reported("heartbeat", watch.beat, last=watch.leave), reported("ranks", watch.look):
        yield


class Watch:
    """What this rank knows of the next ones.

    Args:
        store: holds a number for each rank.
        clock: in seconds.
    """

    def __init__(
        self, store: Any, rank: int, count: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._rank, self._clock = store, rank, clock
        others = [(rank + i) % count for i in range(1, min(count, _NEIGHBOURS + 1))]
        self._numbers = dict.fromkeys(others, -1)
        self._heard = dict.fromkeys(others, clock())
        self._asked: float | None = None  # when the store was asked for what it has not answered
        self._looked = clock()
        self._silent: set[int | None] = set()  # None: the store
        self._is_over = False

    def beat(self) -> None:
        """Count up, and see how far the others have come."""
        if self._is_over:
            return
        self._asked = self._clock()
        try:
            self._store.add(str(self._rank), 1)
            for other, number in list(self._numbers.items()):
                now = self._store.add(str(other), 0)
                if now >= _HAS_LEFT:
                    self._numbers.pop(other)
                elif now != number:
                    self._numbers[other], self._heard[other] = now, self._clock()
        except RuntimeError:  # whoever keeps it has ended, of which the next exchange will tell
            self._is_over = True
        self._asked = None

    def leave(self) -> None:
        """Say that this rank has come to its end, so that nobody misses it."""
        with contextlib.suppress(RuntimeError):
            self._store.add(str(self._rank), _HAS_LEFT)

    def look(self) -> None:
        """Tell the log what has changed."""
        now, before = self._clock(), self._looked
        self._looked = now
        if now - before > SILENCE / 2:  # this process was stopped, and has heard nobody meanwhile
            self._heard = dict.fromkeys(self._heard, now)
            self._asked = now if self._asked is not None else None
        if self._asked is not None and now - self._asked > SILENCE:
            if 0 not in self._silent:  # who keeps the store as a rule
                self._tell(None, now - self._asked)
            return  # nobody can be heard meanwhile
        for other in list(self._numbers):
            self._tell(other, now - self._heard[other])
        self._tell(None, 0.0)

    def _tell(self, other: int | None, seconds: float) -> None:
        name = f"rank {other}" if other is not None else "rank 0, or whoever started the ranks,"
        if seconds > SILENCE and other not in self._silent and not self._is_over:
            self._silent.add(other)
            logger.warning(
                "%s has been silent for %.0f seconds: its process is stopped, or its machine does "
                "not answer; training waits for it", name, seconds,
            )  # fmt: skip
        elif seconds <= SILENCE and other in self._silent:
            self._silent.remove(other)
            logger.warning("%s is back", name)


__all__ = ["Watch", "waiting_for_all", "watched"]
