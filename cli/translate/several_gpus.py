"""Generation on several GPUs, one process per GPU, with the output of a single process.

fairseq shards the test set: shard r of n has the batches r, r + n, r + 2n, ... Taking one batch of
each shard in turn restores the order of a single process.
"""

from __future__ import annotations

import contextlib
import queue
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import multiprocessing

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.translate.ahead import searched_together
from lightseq_fairseq.cli.translate.cached_config import looked_up_once
from lightseq_fairseq.cli.translate.cpu_samples import left_on_cpu
from lightseq_fairseq.cli.translate.output import GenerationOutput, Lines
from lightseq_fairseq.cli.translate.unknown_words import UnknownWords, counted
from lightseq_fairseq.fairseq_compat import patching

_LOOK_AGAIN_S = 1.0


def translate(args: Namespace, sentences: GenerationOutput) -> None:
    """Writes the output of ``fairseq_cli.generate.main(args)``, computed by several processes.

    Their number is ``--distributed-world-size``. Of fairseq's log, only the lines that the first
    process writes until the end of its last batch are kept.

    Raises:
        UserError: the machine has fewer GPUs.
        torch.multiprocessing.ProcessRaisedException: one of the processes raised an exception.
    """
    count, began = args.distributed_world_size, time.perf_counter()
    if not args.cpu and 0 < torch.cuda.device_count() < count:
        raise UserError(
            f"--distributed-world-size is {count}, but only {torch.cuda.device_count()} GPU(s) are "
            "visible: lower it."
        )
    queues = [multiprocessing.get_context("spawn").Queue() for _ in range(count)]
    processes = multiprocessing.start_processes(
        _shard, (args, queues), nprocs=count, join=False, start_method="spawn"
    )
    try:
        # All shards have the same number of batches; the last ones may be empty.
        while not isinstance((batches := [_next(q, processes) for q in queues])[0], UnknownWords):
            for lines in batches:
                for line in lines:
                    sentences.line(line)
        for unknown in batches:
            sentences.unknown.add(unknown)
        while not processes.join():
            pass
    finally:
        for process in processes.processes:
            process.terminate()
    seconds, number = time.perf_counter() - began, len(sentences.output.sentences["H"])
    sentences.log(
        f"Translated {number:,} sentences in {seconds:.1f}s, with the start of {count} processes"
    )


def _next(batches: Any, processes: Any) -> Any:
    """The lines of a shard's next batch; at its end the `UnknownWords` of all its batches."""
    while True:
        try:
            return batches.get(timeout=_LOOK_AGAIN_S)
        except queue.Empty:
            processes.join(timeout=0)  # re-raises an exception of a process


class _Batches(Lines):
    """Collects the lines of a batch, and sends them when the next one begins."""

    def __init__(self, rank: int, batches: Any) -> None:
        self.rank, self.batches = rank, batches
        self.lines: list[str] = []
        self.translated = False

    def line(self, line: str) -> None:
        of_sentence = GenerationOutput.is_sentence(line)
        self.translated |= of_sentence
        # Only rank 0 passes on its log.
        if self.rank == 0 or of_sentence:
            self.lines.append(line)

    def cut(self) -> None:
        self.batches.put(self.lines)
        self.lines = []


class _Progress:
    """Wraps fairseq's progress bar, and splits the output after each batch."""

    def __init__(self, bar: Any, out: _Batches) -> None:
        self.bar, self.out = bar, out

    def __iter__(self) -> Iterator[Any]:
        for batch in self.bar:
            yield batch
            self.out.cut()

    def log(self, *args: Any, **options: Any) -> None:
        self.bar.log(*args, **options)


def _shard(rank: int, args: Namespace, queues: list[Any]) -> None:
    """The body of one process; importing this package there has registered the plugins."""
    from fairseq import utils
    from fairseq_cli import generate

    # Fork the loader's workers, as in a single process: spawned ones would import fairseq again.
    multiprocessing.set_start_method("fork", force=True)
    out, unknown = _Batches(rank, queues[rank]), UnknownWords()

    def progress_bar(original: Callable[..., Any], *args: Any, **options: Any) -> _Progress:
        return _Progress(original(*args, **options), out)

    args.distributed_rank = rank
    if rank > 0:
        args.log_format = "none"
    if torch.cuda.is_available() and not args.cpu:
        torch.cuda.set_device(rank)
    utils.import_user_module(args)
    try:
        with (
            contextlib.redirect_stdout(out),
            left_on_cpu(),
            searched_together(args),
            counted(unknown),
            patching.within(
                "fairseq.logging.progress_bar:progress_bar",
                progress_bar,
                by="cli.translate.several",
            ),
        ):
            generate.main(looked_up_once(args))
    except ZeroDivisionError:  # fairseq's speed report, if a shard has no batch
        if out.translated:
            raise
    queues[rank].put(unknown)
