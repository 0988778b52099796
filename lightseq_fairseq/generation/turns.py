"""Calls of several threads and streams that use the same graphs run one after another."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class Turns:
    """The order of calls on one device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: torch.cuda.Event | None = None  # the work of the last call

    @contextlib.contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        """Wait until the calls of other threads have ended; the current stream waits for the work
        of the last one."""
        with self._lock:
            if device.type != "cuda":
                yield
                return
            stream = torch.cuda.current_stream(device)
            if self._done is not None:
                stream.wait_event(self._done)
            try:
                yield
            finally:
                self._done = stream.record_event()
