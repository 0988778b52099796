"""Starts the ranks of a training run on this machine, and forwards signals to them."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from lightseq_fairseq.base import signals
from lightseq_fairseq.fairseq_compat import patching


class Ranks:
    """The ranks that this process has started, if any.

    Attributes:
        told: name of the first signal that was forwarded to them.
    """

    told: str | None = None

    def __init__(self) -> None:
        self._first: dict[int, float] = {}  # signal -> time of its first arrival

    def tell(self, number: int, frame: Any) -> None:
        """Signal handler: forwards the signal; a second SIGTERM or Ctrl-C kills the ranks at once.

        Without ranks the signal ends this process.
        """
        children = multiprocessing.active_children()
        now = time.monotonic()
        first = self._first.setdefault(number, now)
        is_second = number in signals.AT_ONCE and now - first > signals.SAME
        for child in children:
            if child.pid is not None:
                os.kill(child.pid, signal.SIGKILL if is_second else number)
        if not children:
            signal.signal(number, signals.usual(number))
            os.kill(os.getpid(), number)
        elif self.told is None:
            self.told = signal.Signals(number).name
            signals.tell_user(number)


def from_torchrun() -> bool:
    """Whether the environment gives this process its rank (the same test as in fairseq)."""
    return {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"} <= os.environ.keys()


@contextmanager
def sent_to_ranks() -> Iterator[Ranks]:
    """Within the block, a training run, signals are forwarded to the ranks.

    A process that trains itself replaces this handler by its own, see ``training.stopping``.
    """
    ranks = Ranks()
    with signals.handled(ranks.tell, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        yield ranks


@contextmanager
def forked() -> Iterator[None]:
    """Within the block, ``torch.multiprocessing.spawn`` forks this process.

    A forked rank need not import torch and fairseq again, which takes longer than all else before
    its first update. But a process can be forked only if it has neither used a GPU nor computed
    with several threads: in a fork of such a process, CUDA fails and OpenMP waits forever. So
    within the block torch has one thread until training begins. If something has used a GPU, ranks
    are spawned.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def spawn(spawn: Callable[..., None], **options: Any) -> None:
        if torch.cuda.is_available():
            first_capability()  # uses a GPU here if CUDA fails in forks
        if torch.cuda.is_initialized():
            spawn(**options)
        else:
            torch.multiprocessing.start_processes(**options, start_method="fork")

    def main(main: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        torch.set_num_threads(threads)
        main(*arguments, **keywords)

    with (
        patching.within("torch.multiprocessing:spawn", spawn),
        patching.within("fairseq_cli.train:main", main, by="cli.start.ranks"),
    ):
        yield


@functools.cache
def first_capability() -> tuple[int, int]:
    """The compute capability of the first GPU.

    With several GPUs it is read in a process of its own, so that this one can still be forked.
    """
    import torch

    if torch.cuda.device_count() > 1 and not torch.cuda.is_initialized():
        with (
            contextlib.suppress(RuntimeError),  # without NVML, torch has counted GPUs by using CUDA
            ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as processes,
        ):
            return processes.submit(torch.cuda.get_device_capability, 0).result()
    return torch.cuda.get_device_capability(0)
