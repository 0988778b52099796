"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from lightseq_fairseq.errors import UserError


@contextmanager
def replaced(path: Path) -> Iterator[TextIO]:
    """A text file that takes the place of ``path`` at the end of the block.

    Until then, and for ever where the block fails, ``path`` is as it was; a link goes on to link
    there. The file itself is that path + ".partial", which is removed where the block fails, and
    where SIGINT, SIGTERM or SIGHUP ends it. A pipe or a device is written to as it is. The block is
    to run in the main thread, which alone may handle signals.

    Raises:
        UserError: the file cannot be opened or moved, or its last bytes not be written.
        SystemExit: SIGTERM or SIGHUP has come, with the status that shells give to it.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        try:
            with path.open("w", encoding="utf-8") as file:
                yield file
        except OSError as error:
            raise unwritable(path, error) from error
        return
    if path.is_dir():  # found out by os.replace otherwise, when all the work is done
        raise unwritable(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    target = path.resolve()
    partial = target.with_name(target.name + ".partial")
    try:
        file = partial.open("w", encoding="utf-8")
    except OSError as error:
        raise unwritable(path, error) from error
    # Not where nohup has a process outlive its terminal.
    ending = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
    before = {number: signal.signal(number, _leave) for number in ending}
    try:
        yield file
        try:
            file.close()
            os.replace(partial, target)
        except OSError as error:
            raise unwritable(path, error) from error
    except BaseException:
        with contextlib.suppress(OSError):
            file.close()
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def unwritable(path: Path, error: OSError) -> UserError:
    """What to tell the user whose file refuses to be written."""
    return UserError(f"cannot write {path} ({error.strerror or error})")
