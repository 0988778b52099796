"""Lets the host follow the progress of a search without stopping the GPU."""

from __future__ import annotations

import itertools
import time

import numpy as np
import torch

from lightseq_fairseq.base.errors import GPUHangs
from lightseq_fairseq.memory import graphs

_LOOKS = 1000  # polls of the report between two queries of the stream
_LEAST = 1 << 10  # numbers of ``reports`` at first


class DelayedProgress:
    """Tells the host, one step late, which sentences have ended, so the GPU never waits.

    The delay is always exactly one step. Otherwise the row count, and with it rounding errors,
    would depend on the host's speed. On a CPU there is no delay.

    Every step writes its number to pinned memory, which the host polls, and before that to the
    places of the slots whose sentences have ended.

    Attributes:
        reports: int32 [1 + slots or more], see ``ops.beam_advance``.
    """

    reports: torch.Tensor
    _of_steps: torch.cuda.Stream  # the stream of the steps, looked up once per search

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside: torch.cuda.Stream | None = None
        self._launched = 0  # steps of this search
        if device.type == "cuda":
            self._beside = torch.cuda.Stream(device)
            self._of_steps = torch.cuda.current_stream(device)
        self._allocate(_LEAST)

    def _allocate(self, size: int) -> None:
        self.reports = torch.zeros(size, dtype=torch.int32)
        if self._beside is not None:
            # torch does not see that kernels write this memory, but it sees this copy. So if a
            # search is dropped, torch frees the memory only after the stream's last step.
            self.reports = self.reports.pin_memory()
            zeros = torch.zeros_like(self.reports, device=self._device)
            self.reports.copy_(zeros, non_blocking=True)
            self._of_steps.synchronize()
        self._numbers = self.reports.numpy()

    def make_room(self, slots: int) -> bool:
        """Grow ``reports`` for so many slots; whether it has another address now."""
        if slots < len(self.reports):
            return False
        self._wait(self._launched)
        self._launched = 0
        self._allocate(1 << slots.bit_length())
        return True

    def begin(self) -> None:
        """Call this before the first step of a search."""
        # The last step of the previous search may not have reported yet, since no one waits for it.
        self._wait(self._launched)
        self._numbers.fill(0)
        self._launched = 0
        if self._beside is not None:
            self._of_steps = torch.cuda.current_stream(self._beside.device)

    def step(self) -> None:
        """Call this after each launch of a step."""
        self._launched += 1

    @property
    def is_delayed(self) -> bool:
        return self._beside is not None

    def ended(self) -> tuple[int, np.ndarray]:
        """The number of the newest step of which the host may know, counted from 1, and for each
        slot the number of the step at which its sentence has ended, or an older one: integers.

        On a GPU the number is 0 after the first step.
        """
        step = self._launched - self.is_delayed
        self._wait(step)
        return step, self._numbers[1:]

    def _wait(self, steps: int) -> None:
        """Wait until ``steps`` steps have reported.

        Raises:
            RuntimeError: the GPU has an error, or is idle without having reported.
            GPUHangs: the GPU is still busy after ``graphs.PATIENCE`` seconds.
        """
        # Limit the CPU time of this thread, which polling uses up: time during which the process is
        # stopped does not count.
        limit = time.thread_time() + graphs.PATIENCE
        is_idle = False
        for look in itertools.count(1):
            if self._numbers.item(0) >= steps:
                return
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

    def follow(self) -> None:
        """Let the next steps wait for the work of that stream."""
        if self._beside is not None:
            self._of_steps.wait_stream(self._beside)
