"""Output that nobody reads any more: Ctrl-C in ``lightseq-train 2>&1 | tee log`` ends tee, too."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def may_be_unread() -> Iterator[None]:
    """Within the block, writes to stdout and stderr whose reader has ended do nothing.

    Else they raise BrokenPipeError, and a run would end without its checkpoint.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_MayBeUnread, before)
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = before


class _MayBeUnread:
    """A text stream; see `may_be_unread`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, function: Callable[[], object]) -> None:
        try:
            function()
        except BrokenPipeError:
            # What is left in the stream's buffer is written at the next flush, or at the exit.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
