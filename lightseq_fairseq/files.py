"""Files that are written whole or not at all, and folders that one run has to itself.

Both go by POSIX locks: NFS knows them, a child process does not inherit them, and they end with
their process, however it ends. Where a file system has none, nothing waits and nobody is told.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from lightseq_fairseq.errors import UserError

_LOCK = ".lightseq-lock"
_TEMPORARY = re.compile(r".+\.([0-9a-f]{8})-[0-9a-f]{8}\.tmp")  # the machine, a random number
_DAY = 86400.0  # seconds; no file is written for so long
_writing: set[str] = set()  # by this process, which its own locks do not keep out


def write_atomically(path: str, write: Callable[[BinaryIO], None], advice: str = "") -> None:
    """Let ``write`` fill a file that then takes the place of ``path``, or of what it links to.

    The bytes are on the disk before the name is: killed at any moment, the machine even, there is
    either the old file or the new one. Until then they lie beside it in a file of their own, which
    is removed on an error; that of a killed process is removed by the next write to the folder.

    Args:
        advice: what the error says behind the reason.

    Raises:
        UserError: on any OSError, and where ``path`` is a pipe or a device; it is as before and the
            temporary file gone.
    """
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise UserError(f"cannot write {path} (it is not a regular file){advice}")
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    temporary, file = "", None
    try:
        _remove_abandoned(folder)
        temporary, number = _create_beside(target)
        with _Writer(io.FileIO(number, "wb")) as file:
            write(file)
            file.flush()
            os.fsync(number)
            os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        refusal = error if isinstance(error, OSError) else None
        if refusal is None and file is not None:
            refusal = file.refusal
        if refusal is None:
            if _is_interrupt(error):
                raise KeyboardInterrupt from None
            raise
        raise UserError(f"cannot write {path} ({refusal.strerror or refusal}){advice}") from error
    finally:
        _writing.discard(temporary)
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether it is Ctrl-C, or came of it: torch closes the archive, which then is not whole."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


class _Writer(io.BufferedWriter):
    """A file that remembers why it could not be written.

    torch.save turns an OSError into a RuntimeError about positions in the archive.
    """

    refusal: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.refusal = error
            raise


def _create_beside(target: str) -> tuple[str, int]:
    """Path and descriptor of a new, locked file; its mode is what umask leaves."""
    while True:
        path = f"{target}.{_machine()}-{secrets.token_hex(4)}.tmp"
        _writing.add(path)
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        # Another process may have taken it for abandoned before it was locked.
        if _lock(number) is not False and _is_at(path, number):
            return path, number
        os.close(number)
        _writing.discard(path)
        with contextlib.suppress(OSError):
            os.remove(path)


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
                    os.remove(path)
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


__all__ = ["sole_user", "write_atomically"]
