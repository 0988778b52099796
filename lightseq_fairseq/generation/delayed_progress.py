"""Lets the host follow the progress of a search without stopping the GPU."""

from __future__ import annotations

import itertools
import time

import numpy as np
import torch

from lightseq_fairseq.base.errors import GPUHangs
from lightseq_fairseq.memory import graphs

_LOOKS = 1000  # polls of the report between two queries of the stream


class DelayedProgress:
    """Tells the host, one step late, how many sentences are unfinished, so the GPU never waits.

    The delay is always exactly one step. Otherwise the row count, and with it rounding errors,
    would depend on the host's speed. On a CPU there is no delay.

    Every step writes a report to pinned memory, which the host polls. Reports alternate between two
    places. The host launches step n + 1 only after it has read the report of step n - 1, so no
    report is overwritten before it is read. The two numbers of a report are read in one 8-byte
    access.

    Attributes:
        reports: int32 [2, 2], see ``ops.beam_advance``.
    """

    _of_steps: torch.cuda.Stream  # the stream of the steps, looked up once per search

    def __init__(self, device: torch.device) -> None:
        self.reports = torch.zeros(2, 2, dtype=torch.int32)
        self._beside: torch.cuda.Stream | None = None
        self._launched = 0  # number of the newest launched step, plus 1
        if device.type == "cuda":
            self._beside = torch.cuda.Stream(device)
            self._of_steps = torch.cuda.current_stream(device)
            # torch does not see that kernels write this memory, but it sees this copy. So if a
            # search is dropped, torch frees the memory only after the stream's last step.
            self.reports = self.reports.pin_memory()
            self.reports.copy_(torch.zeros_like(self.reports, device=device), non_blocking=True)
            self._of_steps.synchronize()
        self._places = self.reports.flatten().numpy().view(np.uint64)

    def begin(self, unfinished: int, step: int = 0) -> None:
        """Call this before ``step``, the first one of a search of ``unfinished`` sentences."""
        # The last step of the previous search may not have reported yet, since no one waits for it.
        self._report_after(self._launched)
        self._places[:] = 0
        self._places[step % 2] = unfinished << 32 | step
        self._launched = step
        if self._beside is not None:
            self._of_steps = torch.cuda.current_stream(self._beside.device)

    def unfinished(self, step: int) -> int:
        """Unfinished sentences before ``step``, which has just been launched; on a CPU after it."""
        self._launched = step + 1
        return self._report_after(step if self._beside is not None else step + 1)

    def _report_after(self, steps: int) -> int:
        """The number of sentences that are unfinished after ``steps`` steps.

        Raises:
            RuntimeError: the GPU has an error, or is idle without having reported.
            GPUHangs: the GPU is still busy after ``graphs.PATIENCE`` seconds.
        """
        # Limit the CPU time of this thread, which polling uses up: time during which the process is
        # stopped does not count.
        limit = time.thread_time() + graphs.PATIENCE
        is_idle = False
        for look in itertools.count(1):
            report = self._places.item(steps % 2)
            if report & 0xFFFFFFFF == steps:
                return report >> 32
            if is_idle:
                break
            if self._beside is None or look % _LOOKS == 0:
                is_idle = self._beside is None or self._of_steps.query()
                if not is_idle and time.thread_time() > limit:
                    raise GPUHangs(graphs.PATIENCE)
        raise RuntimeError(f"after {steps} steps of a search, the last one has not reported")

    def beside(self, steps_matter: bool) -> torch.cuda.Stream | None:
        """A second stream (None on a CPU); it waits for the launched steps if ``steps_matter``."""
        if self._beside is not None and steps_matter:
            self._beside.wait_stream(self._of_steps)
        return self._beside
