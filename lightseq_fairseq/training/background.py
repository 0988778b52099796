"""Checkpoints are written while training goes on, by one thread, in the order of fairseq's calls.

fairseq's ``save_checkpoint`` has the trainer write one file, copies it to its other names and
deletes old ones. Here the trainer copies its state to the host's memory, and the rest is put in a
queue: so nothing is deleted before its successor is on the disk. To fairseq, which lists the folder
in between, the folder looks as it will when the queue is empty.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from concurrent import futures
from functools import partial
from typing import Any

import torch

from lightseq_fairseq.checkpoints import saving  # isort: skip  (prepares fairseq for the imports below)

from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from lightseq_fairseq.fairseq_compat import patching
from lightseq_fairseq.fairseq_compat.overlay import Overlay
from lightseq_fairseq.training.host_copies import HostCopies

logger = logging.getLogger(__name__)


class Writer:
    """Writes one checkpoint at a time in a thread."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Have neither a queue nor a thread nor memory."""
        self._copies = HostCopies()
        self._thread: futures.ThreadPoolExecutor | None = None
        self._tasks: list[futures.Future[None]] = []
        self._failed = False
        self._will_exist: dict[str, bool] = {}  # files that the queue makes or deletes
        self._began = 0.0

    def reserve(self, size: int, device: torch.device) -> None:
        """Begin to make room for states of ``size`` bytes, which takes a second for large ones."""
        self._do(partial(self._copies.reserve, size, device))

    def save(self, state: Any, path: str, device: torch.device) -> None:
        """Copy ``state`` as it is now, and write it to ``path`` later.

        Raises:
            UserError: the checkpoint before this one could not be written.
        """
        self.finish()
        self._began = time.monotonic()
        copied, wait = self._copies.of(state, device)

        def write() -> None:
            wait()
            saving.save(copied, path, saving.RESUME)

        self._will_exist[os.path.abspath(path)] = True
        self._do(write)
        self.say(logger, lambda seconds: f"Finished saving checkpoint to {os.path.abspath(path)}")

    def copy(self, source: str, target: str) -> None:
        """Copy a file when it has been written."""
        self._will_exist[os.path.abspath(target)] = True
        self._do(partial(saving.copy, source, target, True))

    def remove(self, path: str) -> None:
        """Delete a file when all before it is done."""
        self._will_exist[os.path.abspath(path)] = False
        self._do(partial(os.remove, path))

    def say(self, to: logging.Logger, text: Callable[[float], str]) -> None:
        """Log a line when all before it is done; ``text`` gets the seconds since `save`."""
        began = self._began
        self._do(lambda: to.info("%s", text(time.monotonic() - began)))

    def listed(self, folder: str, names: list[str]) -> list[str]:
        """``names`` of files in a folder, as they will be."""
        folder = os.path.abspath(folder)
        found = dict.fromkeys(names, True)
        for path, will_exist in list(self._will_exist.items()):
            if os.path.dirname(path) == folder:
                found[os.path.basename(path)] = will_exist
        return [name for name, will_exist in found.items() if will_exist]

    def will_exist(self, path: str) -> bool:
        """Whether the queue makes this file."""
        return self._will_exist.get(os.path.abspath(path), False)

    def _do(self, task: Callable[[], Any]) -> None:
        if self._thread is None:
            self._thread = futures.ThreadPoolExecutor(1, "checkpoints")
        self._tasks.append(self._thread.submit(self._unless_failed, task))

    def _unless_failed(self, task: Callable[[], Any]) -> None:
        if self._failed:  # do not copy or delete after a file that could not be written
            return
        try:
            task()
        except BaseException:
            self._failed = True
            raise

    def finish(self) -> None:
        """Wait until the queue is empty.

        Raises:
            UserError: a file could not be written; what came after it has not been tried.
        """
        futures.wait(self._tasks)
        tasks, self._tasks, self._failed = self._tasks, [], False
        self._will_exist.clear()
        for task in tasks:
            task.result()

    def check(self) -> None:
        """Raise what `finish` would, if something has failed already."""
        if self._failed:
            self.finish()

    def close(self) -> None:
        """The same, and give the memory back."""
        try:
            self.finish()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
            self._copies.release()


WRITER = Writer()  # of this process, which trains one model at a time
os.register_at_fork(after_in_child=WRITER.begin)  # where the thread does not run


class Folder(PathManager):
    """fairseq's access to files, where its ``save_checkpoint`` uses it."""

    @staticmethod
    def copy(source: str, target: str, overwrite: bool = False) -> bool:
        WRITER.copy(source, target)
        return True

    @staticmethod
    def ls(path: str) -> list[str]:
        return WRITER.listed(path, PathManager.ls(path))

    @staticmethod
    def exists(path: str) -> bool:
        return WRITER.will_exist(path) or bool(PathManager.exists(path))

    @staticmethod
    def rm(path: str) -> None:
        WRITER.remove(path)


OS = Overlay(os, remove=Folder.rm)


def take_over() -> None:
    """fairseq's ``save_checkpoint`` leaves copies and deletions to ``WRITER`` from now on."""
    patching.apply("saving")
    checkpoint_utils.logger.addFilter(_say_later)


_SAVED = re.compile(r"(Saved checkpoint .* \(writing took )\S+( seconds\))", re.DOTALL)


def _say_later(record: logging.LogRecord) -> bool:
    """fairseq says that a checkpoint is saved when it is, and how long that took."""
    found = _SAVED.fullmatch(str(record.msg))
    if found is None or checkpoint_utils.PathManager is not Folder:
        return True
    before, after = found.groups()
    WRITER.say(checkpoint_utils.logger, lambda seconds: f"{before}{seconds:.1f}{after}")
    return False


__all__ = ["OS", "WRITER", "Folder", "Writer", "take_over"]
