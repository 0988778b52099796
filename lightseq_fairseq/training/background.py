"""Write checkpoints in a background thread while training continues.

fairseq's ``save_checkpoint`` lets the trainer write one file, copies this file to its other names
and deletes old files. Here the trainer only copies its state to host memory. One thread then
writes, copies and deletes in the order of fairseq's calls, so no old file is deleted before the new
one is on disk. When fairseq lists the folder in between, it sees the files that will exist when the
queue is empty.
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
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from lightseq_fairseq.checkpoints import saving
from lightseq_fairseq.fairseq_compat import patching
from lightseq_fairseq.fairseq_compat.overlay import Overlay
from lightseq_fairseq.training.host_copies import HostCopies


class Writer:
    """Writes one checkpoint at a time in a thread."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start with an empty queue, no thread and no memory."""
        self._copies = HostCopies()
        self._thread: futures.ThreadPoolExecutor | None = None
        self._tasks: list[futures.Future[None]] = []
        self._failed = False
        # Path -> True if a queued task creates the file, False if it deletes it.
        self._will_exist: dict[str, bool] = {}
        self._began = 0.0
        self._copied: list[str] = []  # names of the copies of the file that is being saved

    def reserve(self, size: int, device: torch.device) -> None:
        """Allocate memory for states of ``size`` bytes in the thread; large ones take a second."""
        self._do(partial(self._copies.reserve, size, device))

    def save(self, state: Any, path: str, device: torch.device) -> None:
        """Copy the current ``state``, and write the copy to ``path`` in the thread.

        Waits first until the previous checkpoint is written.

        Raises:
            UserError: the previous checkpoint could not be written.
        """
        self.finish()
        self._began, self._copied = time.monotonic(), []
        copied, wait = self._copies.of(state, device)

        def write() -> None:
            wait()
            saving.save(copied, path, saving.RESUME)

        self._will_exist[os.path.abspath(path)] = True
        self._do(write)

    def copy(self, source: str, target: str) -> None:
        """Queue a copy of a file."""
        self._will_exist[os.path.abspath(target)] = True
        self._copied.append(os.path.basename(target))
        self._do(partial(saving.copy, source, target, True))

    def remove(self, path: str) -> None:
        """Queue the deletion of a file."""
        self._will_exist[os.path.abspath(path)] = False
        self._do(partial(os.remove, path))

    def say(self, text: Callable[[float], str]) -> None:
        """Queue a log line of fairseq; ``text`` maps the seconds since `save` to the line.

        The names of the copies follow it: fairseq's line names only the first file.
        """
        began, copies = self._began, ", ".join(self._copied)
        also = f", also as {copies}" if copies else ""

        def log() -> None:
            checkpoint_utils.logger.info("%s%s", text(time.monotonic() - began), also)

        self._do(log)

    def listed(self, folder: str, names: list[str]) -> list[str]:
        """The files of ``folder`` after all queued tasks; ``names`` are the files there now."""
        folder = os.path.abspath(folder)
        found = dict.fromkeys(names, True)
        for path, will_exist in list(self._will_exist.items()):
            if os.path.dirname(path) == folder:
                found[os.path.basename(path)] = will_exist
        return [name for name, will_exist in found.items() if will_exist]

    def will_exist(self, path: str) -> bool:
        """Whether a queued task creates this file."""
        return self._will_exist.get(os.path.abspath(path), False)

    def _do(self, task: Callable[[], Any]) -> None:
        if self._thread is None:
            self._thread = futures.ThreadPoolExecutor(1, "checkpoints")
        self._tasks.append(self._thread.submit(self._unless_failed, task))

    def _unless_failed(self, task: Callable[[], Any]) -> None:
        if self._failed:  # after a failed write, copy and delete nothing
            return
        try:
            task()
        except BaseException:
            self._failed = True
            raise

    def finish(self) -> None:
        """Wait until the queue is empty.

        Raises:
            UserError: a file could not be written; the tasks queued after it were not run.
        """
        futures.wait(self._tasks)
        tasks, self._tasks, self._failed = self._tasks, [], False
        self._will_exist.clear()
        for task in tasks:
            task.result()

    def check(self) -> None:
        """If a task has failed already, raise its error as `finish` does."""
        if self._failed:
            self.finish()

    def close(self) -> None:
        """Do as `finish` does, then end the thread and free the memory."""
        try:
            self.finish()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
            self._copies.release()


WRITER = Writer()  # one per process, since a process trains one model at a time
os.register_at_fork(after_in_child=WRITER.begin)  # a forked child does not have the thread


class Folder(PathManager):
    """Replaces ``PathManager`` in fairseq's ``save_checkpoint``; queues copies and deletions."""

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
    """Make fairseq's ``save_checkpoint`` leave copies and deletions to ``WRITER``."""
    patching.apply("saving")
    checkpoint_utils.logger.addFilter(_say_later)


_SAVED = re.compile(r"(Saved checkpoint .* \(writing took )\S+( seconds\))", re.DOTALL)


def _say_later(record: logging.LogRecord) -> bool:
    """Delay fairseq's line "Saved checkpoint" until the file is on disk, with the true duration."""
    found = _SAVED.fullmatch(str(record.msg))
    if found is None or checkpoint_utils.PathManager is not Folder:
        return True
    before, after = found.groups()
    WRITER.say(lambda seconds: f"{before}{seconds:.1f}{after}")
    return False
