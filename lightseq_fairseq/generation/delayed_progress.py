"""What the host knows of a search that runs ahead of it."""

from __future__ import annotations

import itertools
import time

import numpy as np
import torch

from lightseq_fairseq import graphs
from lightseq_fairseq.errors import GPUHangs

_LOOKS = 1000  # between two questions whether the GPU still works


class DelayedProgress:
    """How many sentences are unfinished, known one step late so that the GPU never waits.

    Always exactly one: rows and with them rounding errors would else depend on the host's speed.
    On a CPU, where nothing runs ahead, it is none.

    Every step leaves a report in memory of the host, which looks until it is there. Reports take
    turns in two places: the host launches step n + 1 when it has read the report of step n - 1, so
    none is replaced before it has been read. Both numbers of a report are read at once, too.

    Attributes:
        reports: int32 [2, 2], see ``ops.beam_advance``.
    """

    _of_steps: torch.cuda.Stream  # looked up once a search

    def __init__(self, device: torch.device) -> None:
        self.reports = torch.zeros(2, 2, dtype=torch.int32)
        self._beside: torch.cuda.Stream | None = None
        self._launched = 0  # steps of the search at hand
        if device.type == "cuda":
            self._beside = torch.cuda.Stream(device)
            self._of_steps = torch.cuda.current_stream(device)
            # torch sees this copy, not what kernels write. From now on it keeps the memory, should
            # a search be dropped, until the stream is through with its last step.
            self.reports = self.reports.pin_memory()
            self.reports.copy_(torch.zeros_like(self.reports, device=device), non_blocking=True)
            self._of_steps.synchronize()
        self._places = self.reports.flatten().numpy().view(np.uint64)

    def begin(self, unfinished: int) -> None:
        """Before the first step of a search of so many sentences."""
        # The last step of the search before, which nobody had to wait for, may not have reported.
        self._report_after(self._launched)
        self._places[:] = unfinished << 32, 0
        self._launched = 0
        if self._beside is not None:
            self._of_steps = torch.cuda.current_stream(self._beside.device)

    def unfinished(self, step: int) -> int:
        """After the steps before ``step``, which has been launched; on a CPU after it as well."""
        self._launched = step + 1
        return self._report_after(step if self._beside is not None else step + 1)

    def _report_after(self, steps: int) -> int:
        """The sentences unfinished after so many steps.

        Raises RuntimeError where the GPU has met an error, or is idle and has not reported, and
        GPUHangs where it is neither.
        """
        # By the time that this thread has worked, as looking is: it may be stopped meanwhile.
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
        """A stream beside that of the steps, if any; after those so far where they matter."""
        if self._beside is not None and steps_matter:
            self._beside.wait_stream(self._of_steps)
        return self._beside
