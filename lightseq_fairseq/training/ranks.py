"""With several ranks: log when another rank stops responding, or never joins.

If a rank stops, all others wait in the next gradient all-reduce, for minutes and without a message.
So a thread of each rank increments its own counter in the rendezvous store (a heartbeat), and reads
the counters of other ranks to see whether they increase.
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

from lightseq_fairseq.base import signals

logger = logging.getLogger(__name__)

SILENCE = 30.0  # seconds; a rank without a heartbeat for longer is reported
_BEAT = 5.0  # seconds between two heartbeats, and between two checks
_LAST_WORDS = 5.0  # seconds to wait for the end of a thread
# Ranks that each rank watches: few requests to the store, but enough if all ranks of one machine
# stop at once.
_NEIGHBOURS = 8
_HAS_LEFT = 1 << 40  # a rank adds this to its counter at its end; heartbeats never reach it


@contextmanager
def reported(
    what: str, look: Callable[[], None], last: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Call ``look`` in a thread every `_BEAT` seconds until the context exits; then ``last``.

    The exit waits for the thread, because Python aborts if it ends while a thread runs torch code.
    The wait is limited to `_LAST_WORDS`, since the store may never answer.
    """
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(_BEAT):
            look()
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
    """Log while this rank waits in the rendezvous for the other ranks.

    While torch waits, Python's signal handlers would not run. So the default action of signals
    applies, which ends the process, as always before training starts.
    """
    began = time.monotonic()
    told = 1

    def look() -> None:
        nonlocal told
        waited = time.monotonic() - began
        if waited > told * SILENCE:
            told *= 2
            logger.warning(
                "rank %d has waited %.0f seconds for the other ranks: all %d must start with the "
                "same --distributed-init-method, or the same MASTER_ADDR and MASTER_PORT; the log "
                "of a rank that has ended says why", rank, waited, count,
            )  # fmt: skip

    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    with reported("meeting", look), signals.handled(signal.SIG_DFL, *ending):
        yield


@contextmanager
def watched() -> Iterator[None]:
    """Log when another rank stops responding, and when it responds again.

    All ranks enter this context after the rendezvous. With a single process it does nothing.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        yield
        return
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    # A separate connection: a blocking request on the default one would block heartbeats too.
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    store = store.clone()
    watch = Watch(torch.distributed.PrefixStore("alive", store), rank, count)
    with reported("heartbeat", watch.beat, last=watch.leave), reported("ranks", watch.look):
        yield


class Watch:
    """Sends this rank's heartbeat and watches those of the next ranks.

    Args:
        store: holds a counter for each rank.
        clock: returns seconds.
    """

    def __init__(
        self, store: Any, rank: int, count: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._rank, self._clock = store, rank, clock
        others = [(rank + i) % count for i in range(1, min(count, _NEIGHBOURS + 1))]
        self._numbers = dict.fromkeys(others, -1)
        self._heard = dict.fromkeys(others, clock())
        self._asked: float | None = None  # start time of the pending request to the store, if any
        self._looked = clock()
        self._silent: set[int | None] = set()  # None: the store
        self._is_over = False

    def beat(self) -> None:
        """Increment this rank's counter, and read those of the watched ranks."""
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
        except RuntimeError:  # the store's process has ended; the next collective will report it
            self._is_over = True
        self._asked = None

    def leave(self) -> None:
        """Mark this rank as ended, so that other ranks do not report it."""
        with contextlib.suppress(RuntimeError):
            self._store.add(str(self._rank), _HAS_LEFT)

    def look(self) -> None:
        """Log ranks that became silent or responsive since the last call."""
        now, before = self._clock(), self._looked
        self._looked = now
        if now - before > SILENCE / 2:  # this process itself was stopped, so restart all timers
            self._heard = dict.fromkeys(self._heard, now)
            self._asked = now if self._asked is not None else None
        if self._asked is not None and now - self._asked > SILENCE:
            if 0 not in self._silent:  # rank 0 usually holds the store
                self._tell(None, now - self._asked)
            return  # without the store, other ranks cannot be checked
        for other in list(self._numbers):
            self._tell(other, now - self._heard[other])
        self._tell(None, 0.0)

    def _tell(self, other: int | None, seconds: float) -> None:
        store = "rank 0, or the process that started the ranks,"
        name = store if other is None else f"rank {other}"
        if seconds > SILENCE and other not in self._silent and not self._is_over:
            self._silent.add(other)
            logger.warning(
                "%s has not responded for %.0f seconds: its process is suspended, or its machine "
                "cannot be reached; training waits for it", name, seconds,
            )  # fmt: skip
        elif seconds <= SILENCE and other in self._silent:
            self._silent.remove(other)
            logger.warning("%s responds again", name)
