"""Memory of a run, measured in the same way for every system of ``lightseq-bench``."""

from __future__ import annotations

import resource

import torch


class MemoryMeter:
    """GPU memory that this process uses from now on; without a GPU, the process's peak resident
    memory.

    torch's allocator counts only its own memory; CUDA graphs, kernel code and libraries use more.
    So the meter reads the GPU's memory in use, for all processes. It subtracts the memory in use
    when it is created (other processes, and this process's context); other processes must not
    change theirs.
    """

    def __init__(self, gpu: bool) -> None:
        self._gpu = gpu
        self._before = _in_use() if gpu else 0

    def peak(self) -> int:
        """Bytes: torch's peak plus other memory in use now, which is rarely released."""
        if not self._gpu:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        given_back = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
        return _in_use() - self._before + given_back


def _in_use() -> int:
    """Bytes of GPU memory in use by all processes, including this process's CUDA context."""
    free, total = torch.cuda.mem_get_info()
    return total - free
