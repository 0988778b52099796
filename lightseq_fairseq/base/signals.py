"""The signals that end training, for the launcher and for the ranks."""

from __future__ import annotations

import os
import signal
from typing import Any

# A second one ends the process at once.
AT_ONCE = (signal.SIGTERM, signal.SIGINT)
# Seconds in which two equal signals count as one: a sender may signal a process and its group.
SAME = 1.0


def usual(number: int) -> Any:
    """Python's own handler of the signal."""
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def tell_user(number: int) -> None:
    """Say what Ctrl-C does. It may arrive within a print, so a handler must not print."""
    if number == signal.SIGINT:
        os.write(2, b"\nCtrl-C: ending with this update and saving; Ctrl-C again ends at once\n")
