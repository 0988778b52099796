"""Atomic writes of files and folders, and exclusive use of a folder by one run.

All functions use POSIX locks: NFS supports them, child processes do not inherit them, and the
system releases them when the process ends, even if it is killed. On a file system without locks,
the functions work without locking and give no warning.
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

from lightseq_fairseq.base.errors import UserError

_LOCK = ".lightseq-lock"
_TEMPORARY = re.compile(r".+\.([0-9a-f]{8})-[0-9a-f]{8}\.tmp")  # machine id, random number
_FOLDER = ".d"  # suffix of the folder that belongs to a temporary file
_DAY = 86400.0  # seconds; longer than any write takes
_STREAM = "it is not a regular file"
_writing: set[str] = set()  # this process's temporary files; a lock does not exclude its owner


@contextmanager
def atomic_writer(path: str | Path, advice: str = "", streams: bool = False) -> Iterator[BinaryIO]:
    """Yield a temporary file to write; at the end of the block it replaces ``path`` atomically.

    If ``path`` is a symbolic link, its target is replaced. The data is synced to disk before the
    rename: after a kill or a crash at any moment there is either the old or the new file. The
    temporary file is in the same folder. It is removed on an error; if the process is killed, the
    next write to the folder removes it.

    Args:
        advice: text that the error message adds after the reason.
        streams: allow a pipe or a device, which is written directly.

    Raises:
        UserError: the file cannot be written, or ``path`` is a folder, or (without ``streams``) a
            pipe or a device. ``path`` is unchanged then, and the temporary file is removed. An
            OSError of the block that does not concern the file is raised unchanged.
    """
    is_stream = _is_stream(path)
    if is_stream and not streams:
        raise _unwritable(path, _STREAM, advice)
    if os.path.isdir(path):  # check now: the rename would fail only after all the work
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
    """Yield a temporary path; what the block creates there then replaces ``path`` atomically.

    Like `atomic_writer`, for a folder or for a file that other code writes by path. The temporary
    path is in its own folder beside ``path``. Other files in that folder are removed at the end.

    Raises:
        UserError: as for `atomic_writer`; also on any OSError of the block, and if a file would
            replace a folder, or a folder would replace a file.
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
            if os.path.isdir(target) and place.is_dir():
                os.rename(target, place.parent / "old")  # removed with the temporary folder
            os.replace(place, target)
    except OSError as error:
        raise _unwritable(path, error) from error


def _is_stream(path: str | Path) -> bool:
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _unwritable(path: str | Path, reason: OSError | str, advice: str = "") -> UserError:
    why = getattr(reason, "strerror", None) or reason
    return UserError(f"Cannot write {path} ({why}){advice or ': choose another path'}.")


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether the error is a KeyboardInterrupt or was raised while handling one.

    On Ctrl-C torch.save closes its incomplete archive, which raises another error.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


class _File(io.FileIO):
    """A file that keeps the OSError of a failed write.

    torch.save turns that error into a RuntimeError about positions in the archive.
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
    """Yield path and descriptor of a new file beside ``target``, locked within the block.

    At the end the file is removed, unless the block has renamed it. The folder with its name and
    the suffix `_FOLDER` is removed, too.
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
    """Create and lock a temporary file; its mode follows the umask."""
    while True:
        path = f"{target}.{_machine()}-{secrets.token_hex(4)}.tmp"
        _writing.add(path)
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        # Before it was locked, another process may have removed it as abandoned: then try again.
        if _lock(number) is not False and _is_at(path, number):
            return path, number
        os.close(number)
        _remove(path)


def _remove(path: str) -> None:
    shutil.rmtree(path + _FOLDER, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.remove(path)  # last: if a kill prevents it, a later write removes both
    _writing.discard(path)


def _sync(path: str | Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    try:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    except OSError:
        if not os.path.isdir(path):  # some file systems cannot sync a folder
            raise


def _remove_abandoned(folder: str) -> None:
    """Remove temporary files whose process has ended.

    If the file is from this machine, its process has ended if we can lock it. The locks of another
    machine may be invisible here, so its files are removed only after a day without a write.
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
    """Eight hex digits that identify the running system; its containers share it and its locks."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            name = file.read()
    except OSError:
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).hexdigest()[:8]


def _lock(number: int) -> bool | None:
    """Lock a file until it is closed.

    False if another process holds the lock, None if the file system has no locks.
    """
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
def no_empty_folder(folder: str) -> Iterator[None]:
    """At the end, remove ``folder`` and those above it, if the block made them and they are empty.

    A command that fails leaves nothing behind.
    """
    path = Path(folder)
    made = [place for place in (path, *path.parents) if not place.exists()]
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # not empty
            for place in made:
                place.rmdir()


@contextmanager
def sole_user(folder: str) -> Iterator[None]:
    """Lock a folder: within the block, no other process can enter a block for the same folder.

    If the folder is not writable, the block runs without a lock; the first write into the folder
    then reports the error.

    Raises:
        UserError: another process holds the lock; the message names it. The folder is unchanged.
    """
    path = os.path.join(folder, _LOCK)
    number = _enter(folder, path)
    try:
        yield
    finally:
        if number is not None:
            with contextlib.suppress(OSError):
                os.remove(path)  # before unlocking, so that `_is_at` is false in other processes
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
            with contextlib.suppress(OSError):  # such as a full disk
                os.truncate(number, 0)
                text = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
                os.write(number, text.encode())
            return number
        if lock is None:
            os.close(number)
            return None
        text = os.read(number, 1000).decode(errors="replace")
        os.close(number)
        if lock is False:  # otherwise the other run has just ended and removed the file: try again
            raise UserError(
                f"Another training run writes to {folder} ({text or 'it has just started'}): wait "
                f"until it ends, stop it, or choose another --save-dir."
            )


__all__ = ["atomic_writer", "placed", "sole_user"]
