"""What the host knows of a search that runs ahead of it."""

from __future__ import annotations

import torch
from torch import Tensor

from lightseq_fairseq.ops.beam_search import Progress


class LateProgress:
    """How many sentences are unfinished, known one step late so that the GPU never waits.

    Always exactly one: rows and with them rounding errors would else depend on the host's speed.
    Every step sends what those before it have left, beside its own first kernels and within the
    same graph; the host waits for that, not for the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = None  # beside that of the steps
        self._sent = torch.zeros(len(Progress), dtype=torch.int32)
        if device.type == "cuda":
            self._stream, self._sent = torch.cuda.Stream(device), self._sent.pin_memory()
            self._arrived = torch.cuda.Event(external=True)  # a graph records it, the host waits

    def send(self, progress: Tensor) -> None:
        """At the beginning of a step. progress: int32 [4]."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(progress.device))
            with torch.cuda.stream(self._stream):
                self._sent.copy_(progress, non_blocking=True)
                self._arrived.record(self._stream)

    def hold(self, progress: Tensor) -> None:
        """Later in the step, before it changes ``progress``: not until that has been sent."""
        if self._stream is not None:
            torch.cuda.current_stream(progress.device).wait_stream(self._stream)

    def unfinished(self, step: int, progress: Tensor) -> int:
        """After the steps before ``step``, which is on its way; on a CPU after it as well."""
        if self._stream is None:
            return int(progress[Progress.UNFINISHED])
        self._arrived.synchronize()
        now, unfinished = self._sent[Progress.STEP], self._sent[Progress.UNFINISHED]
        assert int(now) == step, f"step {step} was to be seen, not {int(now)}"
        return int(unfinished)

    def beside(self, steps_matter: bool) -> torch.cuda.Stream | None:
        """A stream beside that of the steps, if any; after those so far where they matter."""
        if self._stream is not None and steps_matter:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return self._stream
