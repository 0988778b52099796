"""Output that nobody reads any more, or that is on a full disk.

Ctrl-C in ``lightseq-train 2>&1 | tee log`` ends tee, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Unwritable(SystemExit):
    """Standard output cannot be written. Ends a command: no ``except Exception`` catches it.

    Attributes:
        reason: the system's.
    """

    def __init__(self, reason: str | None) -> None:
        super().__init__(2)
        self.reason = reason


@contextmanager
def must_be_written() -> Iterator[None]:
    """Within the block, a failed write to standard output raises `Unwritable`.

    A reader that has ended is no failure here: click ends the command for it.
    """
    before = sys.stdout
    # Python has no stream if the caller has closed standard output.
    stream = sys.stdout = _MustBeWritten(before or open(os.devnull, "w"))  # noqa: SIM115
    try:
        yield
    finally:
        sys.stdout = before
        try:
            stream.flush()  # else Python does it after the command
        finally:
            stream.end = None  # logging flushes it once more


@contextmanager
def may_be_unread() -> Iterator[None]:
    """Within the block, failed writes to stdout and stderr do nothing.

    Else they raise an error, and a run would end without its checkpoint.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_MayBeUnread, before)
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = before


class _Stream:
    """A text stream that calls `failed` after a failed write."""

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
        except (OSError, Unwritable) as error:
            # What is left in the stream's buffer is written at the next flush, or at the exit.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        raise NotImplementedError


class _MustBeWritten(_Stream):
    """See `must_be_written`. All writes after a failed one fail, because one may go unnoticed."""

    end: Unwritable | None = None

    def _try(self, function: Callable[[], object]) -> None:
        if self.end is not None:
            raise self.end
        super()._try(function)

    def failed(self, error: BaseException) -> None:
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            self.end = Unwritable(error.strerror)
            raise self.end from error
        raise error


class _MayBeUnread(_Stream):
    """See `may_be_unread`."""

    def failed(self, error: BaseException) -> None:
        pass
