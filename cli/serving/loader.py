"""The process that loads the models, and forks those that use them, so that all share one copy.

It is forked by the server's "forkserver", which has imported this module.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait

import torch

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.serving import device, log, texts
from lightseq_fairseq.cli.serving.messages import Loaded, Plan
from lightseq_fairseq.cli.serving.models import in_flags, load
from lightseq_fairseq.cli.serving.processes import IGNORED


def main(plan: Plan, ends: Sequence[Connection]) -> None:
    """The process. It says ``Loaded``, and ends when the server or one that it has forked ends.

    ends: of the pipe of the device, and of those of texts.
    """
    for number in IGNORED:  # the server ends this
        signal.signal(number, signal.SIG_IGN)
    log.set_up(plan.logs_json)
    parent = parent_process()
    assert parent is not None
    try:
        place = _place(plan)
        threads = max(torch.get_num_threads() - plan.workers, 1)  # the others need processors, too
        torch.set_num_threads(1)  # a process that has used threads of OpenMP must not fork
        is_alone = len(plan.models) == 1
        served = {name: load(name, path, plan.flags, is_alone) for name, path in plan.models}
    except UserError as error:
        ends[0].send(Loaded((), in_flags(str(error))))
        return
    ends[0].send(Loaded(tuple(each.described for each in served.values())))
    context = multiprocessing.get_context("fork")
    uses = [lambda end: device.main(served, plan, place, threads, end)]
    uses += [lambda end: texts.main(served, end)] * plan.workers
    children = [
        context.Process(target=_use, args=(use, end, ends))
        for use, end in zip(uses, ends, strict=True)
    ]
    for child in children:
        child.start()
    for end in ends:
        end.close()
    wait([parent.sentinel, *(child.sentinel for child in children)])
    for child in children:
        child.kill()
    os._exit(1)


def _use(use: Callable[[Connection], None], own: Connection, ends: Sequence[Connection]) -> None:
    _follow_parent()
    for end in ends:
        if end is not own:
            end.close()
    use(own)


def _place(plan: Plan) -> str:
    """ "cuda" or "cpu"."""
    if torch.cuda.is_available() and not plan.cpu:
        return "cuda"
    if plan.dtype == "float16":
        raise UserError("--fp16 needs a GPU, but there is none: remove it, or use --bf16.")
    return "cpu"


def _follow_parent() -> None:
    """End this process when its parent has ended, however that was."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
