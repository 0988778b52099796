"""Wraps fairseq's training in each process: checkpoint folder lock, signals, checkpoint writing,
the run's report, and messages about ranks that do not respond."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from fairseq.file_io import PathManager

from lightseq_fairseq.base import files, output
from lightseq_fairseq.base.errors import GPUHangs
from lightseq_fairseq.fairseq_compat import patching
from lightseq_fairseq.fairseq_compat.workers import no_loading_left
from lightseq_fairseq.training import ranks, stopping
from lightseq_fairseq.training.background import WRITER
from lightseq_fairseq.training.report import Report
from lightseq_fairseq.training.stopping import STOPPING

logger = logging.getLogger(__name__)


def distributed_init(original: Callable[[Any], int], cfg: Any) -> int:
    """fairseq's ``distributed_init``; it logs when it has to wait for other ranks."""
    settings = cfg.distributed_training
    if multiprocessing.parent_process() is not None:
        # A spawned rank would also spawn its data loading workers, and each would import fairseq.
        multiprocessing.set_start_method("fork", force=True)

    def with_device(init_process_group: Callable[..., None], **keywords: Any) -> None:
        if keywords["backend"] == "nccl":  # else torch guesses the GPU, and warns of it at the end
            keywords["device_id"] = torch.device("cuda", torch.cuda.current_device())
        init_process_group(**keywords)

    with (
        ranks.waiting_for_all(settings.distributed_rank, settings.distributed_world_size),
        patching.within("torch.distributed:init_process_group", with_device),
    ):
        return original(cfg)


def main(original: Callable[..., None], cfg: Any, *arguments: Any, **keywords: Any) -> None:
    """fairseq's ``main`` of training; however it ends, the same command can continue the run.

    It locks the checkpoint folder before data are loaded. A signal ends training with a checkpoint.
    It returns only when the last checkpoint is on disk.

    Raises:
        UserError: another run uses the folder, or a checkpoint could not be written.
        StoppedBySignal: see ``stopping``.
    """

    report = Report()

    def verify_checkpoint_directory(verify: Callable[[str], None], save_dir: str) -> None:
        # Only rank 0 calls this.
        if not cfg.checkpoint.no_save and PathManager.supports_rename(save_dir):
            folder.enter_context(files.no_empty_folder(save_dir))
            with contextlib.suppress(OSError):  # fairseq reports it below
                os.makedirs(save_dir, exist_ok=True)
            folder.enter_context(files.sole_user(save_dir))
            folder.enter_context(report.written(save_dir))
        verify(save_dir)

    def should_stop_early(should_stop: Callable[..., bool], cfg: Any, valid_loss: Any) -> bool:
        stops = should_stop(cfg, valid_loss)
        return stops or STOPPING.reason is not None

    with (
        output.may_be_unread(),
        STOPPING.handled(),
        ranks.watched(),
        no_loading_left(),
        ExitStack() as folder,
        patching.within("torch.utils.data._utils.worker:_worker_loop", stopping.load_batches),
        patching.within("multiprocessing.popen_fork:Popen._launch", stopping.launch),
        patching.within("multiprocessing.popen_spawn_posix:Popen._launch", stopping.launch),
        patching.within(
            "fairseq.checkpoint_utils:verify_checkpoint_directory", verify_checkpoint_directory
        ),
        patching.within("fairseq_cli.train:should_stop_early", should_stop_early),
        patching.within("fairseq.checkpoint_utils:load_checkpoint", report.load_checkpoint),
        patching.within("fairseq_cli.train:train", report.train),
        patching.within(
            "fairseq.logging.progress_bar:progress_bar", report.progress_bar, by="training.process"
        ),
        patching.within("fairseq_cli.train:validate_and_save", report.validate_and_save),
    ):
        try:
            original(cfg, *arguments, **keywords)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                report.interrupted()
            try:
                # With a hung GPU, freeing pinned memory would never return: only write the files.
                WRITER.finish() if isinstance(error, GPUHangs) else WRITER.close()
            except Exception as error:
                logger.error("%s", error)
            raise
        WRITER.close()
        report.end(cfg)
        if STOPPING.reason is not None and torch.distributed.is_initialized():
            torch.distributed.barrier()  # the launcher may end all ranks when the first one ends
