"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from lightseq_fairseq.errors import UserError


@contextmanager
def replaced(path: Path) -> Iterator[TextIO]:
    """A text file that takes the place of ``path`` at the end of the block.

    Until then, and for ever where the block fails, ``path`` is as it was. The file itself is
    ``path`` + ".partial", which is removed where the block fails.

    Raises:
        UserError: the file cannot be opened or moved, or its last bytes not be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        file = partial.open("w", encoding="utf-8")
    except OSError as error:
        raise unwritable(path, error) from error
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


def unwritable(path: Path, error: OSError) -> UserError:
    """What to tell the user whose file refuses to be written."""
    return UserError(f"cannot write {path} ({error.strerror or error})")
