"""What surrounds fairseq's training in each process that trains: folder, signals, checkpoints, and
a look at the other ranks."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lightseq_fairseq.training import stopping  # isort: skip  (prepares fairseq)

from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq_cli import train
from torch.utils.data._utils import worker

from lightseq_fairseq.checkpoints import files
from lightseq_fairseq.errors import GPUHangs
from lightseq_fairseq.training import ranks
from lightseq_fairseq.training.background import WRITER
from lightseq_fairseq.training.stopping import STOPPING

logger = logging.getLogger(__name__)


def install(trainer: type = stopping.Trainer) -> None:
    """Make ``fairseq_cli.train`` use this trainer, and its ``main`` what is in this module."""
    train.Trainer = trainer
    if not hasattr(train.main, "is_guarded"):
        train.main = around(train.main)  # spawned ranks find it by its name
        distributed_utils.distributed_init = meeting(distributed_utils.distributed_init)


def meeting(initialise: Callable[[Any], int]) -> Callable[[Any], int]:
    """fairseq's ``distributed_init``, which says so where it has to wait."""

    @functools.wraps(initialise)
    def distributed_init(cfg: Any) -> int:
        settings = cfg.distributed_training
        with ranks.waiting_for_all(settings.distributed_rank, settings.distributed_world_size):
            return initialise(cfg)

    return distributed_init


def around(main: Callable[..., None]) -> Callable[..., None]:
    """fairseq's ``main`` of training, from which the same command can go on however it ends.

    The folder of checkpoints is the run's own before data are loaded. A signal ends it with a
    checkpoint. It has ended when the last checkpoint is on the disk.

    Raises (the function that is returned):
        UserError: another run uses the folder, or a checkpoint could not be written.
        StoppedBySignal: see ``stopping``.
    """

    @functools.wraps(main)
    def guarded(cfg: Any, *arguments: Any, **keywords: Any) -> None:
        with STOPPING.handled(), ranks.watched(), ExitStack() as folder, _hooks(cfg, folder):
            try:
                main(cfg, *arguments, **keywords)
            except BaseException as error:
                try:
                    # A GPU that hangs keeps whoever gives its memory back.
                    WRITER.finish() if isinstance(error, GPUHangs) else WRITER.close()
                except Exception as error:
                    logger.error("%s", error)
                raise
            WRITER.close()
            if STOPPING.reason is not None and torch.distributed.is_initialized():
                torch.distributed.barrier()  # the first rank that ends may end the others

    guarded.is_guarded = True  # type: ignore[attr-defined]
    return guarded


@contextmanager
def _hooks(cfg: Any, folder: ExitStack) -> Iterator[None]:
    """Where fairseq's ``main`` comes to the folder of checkpoints, and asks whether to stop; and
    where torch starts a process that loads data."""
    verify, should_stop = checkpoint_utils.verify_checkpoint_directory, train.should_stop_early
    load_batches = worker._worker_loop

    def verify_checkpoint_directory(save_dir: str) -> None:  # called by the first rank
        if not cfg.checkpoint.no_save and PathManager.supports_rename(save_dir):
            with contextlib.suppress(OSError):  # fairseq will say so
                os.makedirs(save_dir, exist_ok=True)
            folder.enter_context(files.sole_user(save_dir))
        verify(save_dir)

    @functools.wraps(should_stop)
    def should_stop_early(cfg: Any, valid_loss: Any) -> bool:
        stops = should_stop(cfg, valid_loss)
        return stops or STOPPING.reason is not None

    worker._worker_loop = stopping.load_batches  # type: ignore[assignment]
    checkpoint_utils.verify_checkpoint_directory = verify_checkpoint_directory
    train.should_stop_early = should_stop_early
    try:
        yield
    finally:
        worker._worker_loop = load_batches
        checkpoint_utils.verify_checkpoint_directory = verify
        train.should_stop_early = should_stop


__all__ = ["around", "install"]
