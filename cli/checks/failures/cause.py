"""Finds the original exception: below fairseq's wrapper, or in another process's traceback."""

from __future__ import annotations

import re
import traceback
from typing import NamedTuple

_WRAPPER = "Cannot load model parameters from checkpoint"  # fairseq's; the cause is its __context__
_ERRNO = re.compile(r"\[Errno (\d+)\] [^:]*(?:: '(.*)')?")


class Cause(NamedTuple):
    """One exception: the name of its type (no module), its message, the source file that raised
    it, and for an OSError its file name and errno."""

    kind: str
    text: str
    source: str = ""
    filename: str | None = None
    errno: int | None = None

    @classmethod
    def of(cls, error: BaseException) -> Cause:
        """The cause of ``error``.

        ``torch.multiprocessing.spawn`` and the DataLoader re-raise an exception of another process
        with its formatted traceback as the message; the cause is parsed from that text.
        """
        text = str(error)
        if type(error).__name__ == "ProcessRaisedException" or _IN_WORKER.match(text):
            return _from_traceback(text)
        if text.startswith(_WRAPPER) and error.__context__ is not None:
            return cls.of(error.__context__)
        frames = traceback.extract_tb(error.__traceback__)
        failure = cls(type(error).__name__, text, frames[-1].filename if frames else "")
        if isinstance(error, OSError):
            filename = error.filename if isinstance(error.filename, str) else None
            failure = failure._replace(filename=filename, errno=error.errno)
        return failure


_IN_WORKER = re.compile(r"Caught \w+ in DataLoader worker process \d+\.\n")


def _from_traceback(text: str) -> Cause:
    """Parses the last exception of a formatted traceback, or the one that it replaced."""
    parts = re.split(r"\n(?:During handling|The above exception)[^\n]*\n", text)
    failures = [_from_lines(part.splitlines()) for part in parts]
    if len(failures) > 1 and failures[-1].text.startswith(_WRAPPER):
        return failures[-2]
    return failures[-1]


def _from_lines(lines: list[str]) -> Cause:
    start = 1 + max((i for i, line in enumerate(lines) if line.startswith('  File "')), default=-1)
    source = lines[start - 1].split('"')[1] if start else ""
    while start < len(lines) and lines[start].startswith("    "):  # the source and its carets
        start += 1
    name, _, message = "\n".join(lines[start:]).strip().partition(":")
    kind, message = name.rpartition(".")[2].strip(), message.strip()
    number = _ERRNO.match(message)
    if number is None:
        return Cause(kind, message, source)
    return Cause(kind, message, source, number[2], int(number[1]))
