"""The handlers of signals, and what a signal that ends training does in launcher and ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

# A second one ends the process at once.
AT_ONCE = (signal.SIGTERM, signal.SIGINT)
# Seconds in which two equal signals count as one: a sender may signal a process and its group.
SAME = 1.0


@contextlib.contextmanager
def handled(by: Callable[[int, Any], None] | signal.Handlers, *numbers: int) -> Iterator[None]:
    """Within the block, these signals have the handler ``by``; afterwards, that of before.

    Ignored signals stay ignored: nohup ignores SIGHUP so that a process outlives its terminal. In a
    thread, for which Python allows no handlers, this does nothing.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, by)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def usual(number: int) -> Any:
    """Python's own handler of the signal."""
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def tell_user(number: int) -> None:
    """Say what Ctrl-C does. It may arrive within a print, so a handler must not print."""
    if number == signal.SIGINT:
        with contextlib.suppress(OSError):  # nobody may read it: Ctrl-C also ends `| tee log`
            os.write(
                2, b"\nCtrl-C: ending with this update and saving; Ctrl-C again ends at once\n"
            )
