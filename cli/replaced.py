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

    Until then, and for ever where the block fails, ``path`` is as it was. The file itself is
    ``path`` + ".partial", which is removed where the block fails, and where SIGINT or SIGTERM ends
    it. The block is to run in the main thread, which alone may handle signals.

    Raises:
        UserError: the file cannot be opened or moved, or its last bytes not be written.
        SystemExit: SIGTERM has come, with the status that shells give to it.
    """
    if path.is_dir():  # found out by os.replace otherwise, when all the work is done
        raise unwritable(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    partial = path.with_name(path.name + ".partial")
    try:
        file = partial.open("w", encoding="utf-8")
    except OSError as error:
        raise unwritable(path, error) from error
    on_termination = signal.signal(signal.SIGTERM, _leave)
    try:
        yield file
        try:
            file.close()
            os.replace(partial, path)
        except OSError as error:
            raise unwritable(path, error) from error
    except BaseException:
        with contextlib.suppress(OSError):
            file.close()
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    finally:
        signal.signal(signal.SIGTERM, on_termination)


def _leave(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def unwritable(path: Path, error: OSError) -> UserError:
    """What to tell the user whose file refuses to be written."""
    return UserError(f"cannot write {path} ({error.strerror or error})")
