"""What the processes of one run of tests make only once, such as a trained toy."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FOLDER = "LIGHTSEQ_TESTS_SHARED"


def begin() -> None:
    """Make the folder; the first process of the run calls it, before the others start."""
    os.environ.setdefault(_FOLDER, tempfile.mkdtemp(prefix="shared-"))


def end() -> None:
    """Remove it; the process that has made it calls this last."""
    shutil.rmtree(os.environ.pop(_FOLDER), ignore_errors=True)


def folder(name: str) -> Path:
    """A folder that all processes of the run have in common."""
    begin()
    place = Path(os.environ[_FOLDER], name)
    place.mkdir(exist_ok=True)
    return place


@contextmanager
def locked(place: Path) -> Iterator[None]:
    """One process at a time is within this block."""
    with place.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
