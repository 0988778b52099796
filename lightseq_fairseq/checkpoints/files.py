"""Files and folders that are written whole or not at all, and folders that one run has to itself.

All go by POSIX locks: NFS knows them, a child process does not inherit them, and they end with
their process, however it ends. Where a file system has none, nothing waits and nobody is told.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from lightseq_fairseq.errors import UserError

_LOCK = ".lightseq-lock"
_TEMPORARY = re.compile(r".+\.([0-9a-f]{8})-[0-9a-f]{8}\.tmp")  # the machine, a random number
_FOLDER = ".d"  # at the end of such a name: what is written along with that file
_DAY = 86400.0  # seconds; nothing is written for so long
_STREAM = "it is not a regular file"
_writing: set[str] = set()  # by this process, which its own locks do not keep out


@contextmanager
def replaced(path: str | Path, advice: str = "", streams: bool = False) -> Iterator[BinaryIO]:
    """A file to fill, which then takes the place of ``path``, or of what it links to.

    The bytes are on the disk before the name is: killed at any moment, the machine even, there is
    either the old file or the new one. Until then they lie beside it in a file of their own, which
    is removed on an error; that of a killed process is removed by the next write to the folder.

    Args:
        advice: what the error says behind the reason.
        streams: a pipe or a device is written to as it is.

    Raises:
        UserError: the file cannot be written, or ``path`` is a folder, or a pipe or a device
            without ``streams``; it is as before and the temporary file gone. An OSError of the
            block that has nothing to do with the file is raised as it is.
    """
    is_stream = _is_stream(path)
    if is_stream and not streams:
        raise _unwritable(path, _STREAM, advice)
    if os.path.isdir(path):  # renaming finds it out, too, when all the work is done
        raise _unwritable(path, os.strerror(errno.EISDIR), advice)
    target = os.path.realpath(path)
    file, within = None, False
    try:
        with _opened(path) if is_stream else _beside(target) as (temporary, number):
            file = _File(number, "wb", closefd=False)
            with io.BufferedWriter(file) as buffered:
                within = True
                yield buffered
                within = False
            if not is_stream:
                os.fsync(number)
                os.replace(temporary, target)
    except BaseException as error:
        failed = file.failed if file is not None else None
        if failed is None and isinstance(error, OSError) and not within:
            failed = error
        if failed is not None:
            raise _unwritable(path, failed, advice) from error
        if _is_interrupt(error):
            raise KeyboardInterrupt from None
        raise


@contextmanager
def placed(path: str | Path) -> Iterator[Path]:
    """The same for what others write by its path, or for a folder: where it is to be made.

    That is alone in a folder beside ``path``, where more may be put that is gone in the end.

    Raises:
        UserError: as for `replaced`, also where the block raised an OSError of any kind, and where
            a file takes the place of a folder, or a folder that of a file or of a full folder.
    """
    if _is_stream(path):
        raise _unwritable(path, _STREAM)
    target = os.path.realpath(path)
    try:
        with _beside(target) as (temporary, _):
            place = Path(temporary + _FOLDER, "new")
            place.parent.mkdir()
            yield place
            for part in (*place.rglob("*"), place):
                _sync(part)
            os.replace(place, target)
    except OSError as error:
        raise _unwritable(path, error) from error


def _is_stream(path: str | Path) -> bool:
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _unwritable(path: str | Path, reason: OSError | str, advice: str = "") -> UserError:
    return UserError(f"cannot write {path} ({getattr(reason, 'strerror', None) or reason}){advice}")


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether it is Ctrl-C, or came of it: torch closes the archive, which then is not whole."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


class _File(io.FileIO):
    """A file that remembers why it could not be written.

    torch.save turns an OSError into a RuntimeError about positions in the archive.
    """

    failed: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failed = error
            raise


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[str, int]]:
    number = os.open(path, os.O_WRONLY)
    try:
        yield str(path), number
    finally:
        os.close(number)


@contextmanager
def _beside(target: str) -> Iterator[tuple[str, int]]:
    """Path and descriptor of a new file beside ``target``, locked for the block.

    What the block has not moved away is removed then, a folder of that name and `_FOLDER` as well.
    """
    folder = os.path.dirname(target)
    _remove_abandoned(folder)
    path, number = _create_beside(target)
    try:
        yield path, number
        _sync(folder)
    finally:
        _remove(path)
        os.close(number)


def _create_beside(target: str) -> tuple[str, int]:
    """The file's mode is what umask leaves."""
    while True:
        path = f"{target}.{_machine()}-{secrets.token_hex(4)}.tmp"
        _writing.add(path)
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        # Another process may have taken it for abandoned before it was locked.
        if _lock(number) is not False and _is_at(path, number):
            return path, number
        os.close(number)
        _remove(path)


def _remove(path: str) -> None:
    shutil.rmtree(path + _FOLDER, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.remove(path)  # the last: whoever finds it tries again
    _writing.discard(path)


def _sync(path: str | Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    try:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    except OSError:
        if not os.path.isdir(path):  # some file systems cannot sync one
            raise


def _remove_abandoned(folder: str) -> None:
    """Remove temporary files whose process has ended.

    A lock that can be had says so among the processes of one machine. Another machine's locks may
    be invisible here, so of its files only those go that nobody has written to for a day.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        path = os.path.join(folder, name)
        found = _TEMPORARY.fullmatch(name)
        if found is None or path in _writing:
            continue
        with contextlib.suppress(OSError):
            number = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                lock = _lock(number)
                is_here = lock is True and found[1] == _machine()
                is_old = time.time() - os.fstat(number).st_mtime > _DAY
                if is_here or (is_old and lock is not False):
                    _remove(path)
            finally:
                os.close(number)


def _machine() -> str:
    """Eight digits for the system that runs, containers included: they share its locks."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            name = file.read()
    except OSError:
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def _lock(number: int) -> bool | None:
    """Lock a file until it is closed: False if another process has, None if there are no locks."""
    try:
        fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _is_at(path: str, number: int) -> bool:
    """Whether ``path`` still names the open file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(number))
    except FileNotFoundError:
        return False


@contextmanager
def sole_user(folder: str) -> Iterator[None]:
    """Within it no other process enters the same block for the same folder.

    A folder that cannot be written to is entered as well: the first file in it will say so.

    Raises:
        UserError: another process is within; the sentence names it. The folder is as it was.
    """
    path = os.path.join(folder, _LOCK)
    number = _enter(folder, path)
    try:
        yield
    finally:
        if number is not None:
            with contextlib.suppress(OSError):
                os.remove(path)  # while it is locked: whoever waits for it finds it gone
            os.close(number)


def _enter(folder: str, path: str) -> int | None:
    while True:
        try:
            number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError:
            return None
        lock = _lock(number)
        if lock and _is_at(path, number):
            since = time.strftime("%Y-%m-%d %H:%M:%S %z")
            with contextlib.suppress(OSError):  # a full disk
                os.truncate(number, 0)
                text = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
                os.write(number, text.encode())
            return number
        if lock is None:
            os.close(number)
            return None
        text = os.read(number, 1000).decode(errors="replace")
        os.close(number)
        if lock is False:  # else the run that had it ended just now and took the file with it
            raise UserError(
                f"Another training run writes to {folder} ({text or 'it has just begun'}): wait "
                f"until it has ended, end it, or choose another --save-dir."
            )


__all__ = ["placed", "replaced", "sole_user"]
